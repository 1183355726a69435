"""What `depthroute compare` does."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from depthroute.config import load
from depthroute.train.compare import CompareConfig, compare, format_outcomes


def run(path: Path | None, settings: list[str], say: Callable[[str], None]) -> int | None:
    """Run a comparison and say what came of it; returns the signal that stopped it, if any."""
    own = {field.name for field in dataclasses.fields(CompareConfig)}
    mine = [word for word in settings if word.partition("=")[0].split(".")[0] in own]
    config = load(CompareConfig, path, mine)
    outcomes, signal = compare(config, [word for word in settings if word not in mine])
    if outcomes is None:
        return signal
    for outcome in outcomes:
        say(f"\n--- a continuation by {outcome.label} ---\n{outcome.sample}")
    say(f"\n{format_outcomes(outcomes)}\n")
    for file in sorted(Path(config.out).glob("*.*")):
        say(str(file))
    return None
