"""The run folder: its resolved config, metrics and checkpoints.

`config.toml` (a valid input of `depthroute train`), `environment.json`, `metrics.jsonl`,
`checkpoints/step_*/`.
"""

import json
import platform
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import depthroute
from depthroute.config import ConfigError, dump, load
from depthroute.data import TokenDataset
from depthroute.files import naming, write_text
from depthroute.models import CausalLM
from depthroute.train.checkpoint import (
    checkpoint_step,
    list_checkpoints,
    load_weights,
    newest_checkpoint,
)
from depthroute.train.config import RunConfig
from depthroute.train.validate import Validation

_SETTINGS = "config.toml"


class RunFolder:
    """One run on disk.

    Nothing is written before `start`.

    Args:
        config: The resolved config of the run.

    Raises:
        ValueError: The folder holds a run of another config, or one that cannot be read.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.out)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        # as settings, not as text: a run may be older than a setting, which then has its default
        if (self.path / _SETTINGS).exists() and (held := load_settings(self.path)) != config:
            raise ValueError(
                f"{self.path} holds a run with other settings; delete it or set another out. "
                f"Changed: {_changes(held, config)}"
            )

    def start(self, step: int) -> None:
        """Make the folder, or take it up again at a step.

        Notes the settings and where it runs; forgets metrics of a killed run's steps beyond its
        checkpoint.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.path / _SETTINGS, dump(self.config))
        write_text(self.path / "environment.json", json.dumps(environment(), indent=1) + "\n")
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        kept = [line for line in map(_parse, lines) if line and line["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def finished(self, steps: int) -> Validation | None:
        """Return the last validation of a run that is complete, else None."""
        found = list_checkpoints(self.checkpoints)
        if not found or checkpoint_step(found[-1]) != steps or not self.metrics.exists():
            return None
        for record in reversed(RunFolder.read(self.path)):
            if record["step"] == steps and "val/loss_nats" in record:
                return Validation.from_record(record)
        return None

    def log(self, records: list[dict[str, Any]]) -> None:
        """Append records to `metrics.jsonl`."""
        with naming(self.metrics), self.metrics.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """Return the metrics of a run folder, one record per step or validation.

        A line that a kill cut short counts for nothing.
        """
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(_parse, lines) if record]


def open_dataset(path: str) -> TokenDataset:
    """Open the dataset of a run.

    Raises:
        ValueError: There is none; the message says how to make it.
    """
    if not Path(path).exists():
        raise ValueError(
            f'data.path: there is no folder {path}; "depthroute prepare {path} source=..." makes it'
        )
    return TokenDataset(path)


def resolve(config: RunConfig, dataset: TokenDataset) -> RunConfig:
    """Fill in what the dataset decides.

    Raises:
        ValueError: The vocabulary is smaller than the dataset's.
    """
    size = config.model.vocab_size or dataset.vocab_size
    if size < dataset.vocab_size:
        raise ValueError(
            f"model.vocab_size must be at least the tokenizer's {dataset.vocab_size}, got {size}"
        )
    return replace(config, model=replace(config.model, vocab_size=size))


def load_settings(folder: str | Path) -> RunConfig:
    """Return the resolved settings of a run.

    Raises:
        ValueError: The folder is no run, or its settings cannot be read.
    """
    file = Path(folder) / _SETTINGS
    if not file.exists():
        raise ValueError(f"{folder} is no run folder: it has no {_SETTINGS}")
    try:
        return load(RunConfig, file)
    except ConfigError as error:
        raise ValueError(f"the settings of the run in {folder} cannot be read: {error}") from error


def load_model(folder: str | Path, *, device: torch.device | str = "cpu") -> CausalLM:
    """Load the newest checkpoint of a run, in float32.

    Args:
        folder: A run folder.
        device: Where to.

    Raises:
        ValueError: The folder is no run, or has no checkpoint yet.
    """
    settings = load_settings(folder)
    checkpoint = newest_checkpoint(Path(folder))
    model = CausalLM(settings.model, seed=None)
    load_weights(checkpoint, model)
    return model.to(device)


def environment() -> dict[str, Any]:
    """Return versions and hardware, for the record."""
    cuda = torch.cuda.is_available()
    return {
        "depthroute": depthroute.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "num_devices": torch.cuda.device_count() if cuda else 0,
    }


def _changes(old: RunConfig, new: RunConfig) -> str:
    """Say which settings differ."""
    before, after = (dict(_settings(tomllib.loads(dump(one)), "")) for one in (old, new))
    return "; ".join(
        f"{key} was {before.get(key, 'not set')}, is {after.get(key, 'not set')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    )


def _settings(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _parse(line: str) -> dict[str, Any] | None:
    """Read one record; None for a line that a kill cut short."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
