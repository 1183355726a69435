"""What the depth weights of each scheme mix, from its equations: the oracle of the contract."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.residual import AttnResConfig, DeltaConfig, DualConfig, OasisConfig, Summary
from helpers import Step


class Sources(NamedTuple):
    """The sources of one read; both are empty for a site that mixes nothing."""

    values: list[Tensor]
    shares: list[float]  # of each before training, up to a common factor


def sources_of(residual: Any, steps: list[Step], site: int) -> Sources:
    """Return what the weights of the read at `site` mix, null included, in their order."""
    assert type(residual.config) in _SOURCES, f"say what the sources of {residual.config.name} are"
    return _SOURCES[type(residual.config)](residual, steps, site)


def _writes(residual: Any, steps: list[Step]) -> list[Tensor]:
    return [step.written[..., : residual.dim] for step in steps if step.written is not None]


def _ends(config: Any, num_writes: int) -> list[int]:
    blocks = config.num_blocks or num_writes
    ends = [math.ceil(num_writes * j / blocks) for j in range(1, blocks + 1)]
    return list(config.block_ends) or ends


def _block_sums(residual: Any, steps: list[Step], site: int) -> Sources:
    writes = _writes(residual, steps)
    summary = getattr(residual.config, "summary", Summary())
    sources, counts = [steps[0].inputs[0]], [1]
    for start, end in pairwise((0, *_ends(residual.config, len(writes)))):
        block = writes[start : min(end, site)]
        if block:
            total = block[0]
            for write in block[1:]:
                total = total + write
            sources.append(total * len(block) ** -summary.alpha)
            counts.append(len(block))
    return Sources(sources, [count**summary.beta for count in counts])


def _with_depth_null(residual: Any, steps: list[Step], site: int) -> Sources:
    values, shares = _block_sums(residual, steps, site)
    nulls = int(residual.config.depth_null and site > 0)
    return Sources([*values, *[torch.zeros_like(values[0])] * nulls], [*shares, *[1.0] * nulls])


def _deltas(residual: Any, steps: list[Step], site: int) -> Sources:
    """Put each source into the sum: the weights add up to 1, so `s + g mix` mixes `s + g v`."""
    config, writes = residual.config, _writes(residual, steps)
    stream = start = steps[0].inputs[0]
    bank = [stream]
    has_blocks = config.num_blocks or config.block_ends
    for t, write in enumerate(writes[:site], start=1):
        stream = stream + write
        if t in _ends(config, len(writes)):
            last = bank[-1] if config.recurrence == "previous_entry" else start
            bank.append(stream - last if has_blocks else write)
            start = stream
    bank += [torch.zeros_like(stream)] * config.null
    if site in (0, len(writes)) or len(bank) == 1:
        return Sources([], [])
    gate = 1.0 if residual.gate is None else residual.gate[site - 1].double()
    gate = torch.sigmoid(gate) if config.gate == "sigmoid" else gate
    return Sources([stream.double() + gate * v.double() for v in bank], [1.0] * len(bank))


def _two_streams(residual: Any, steps: list[Step], site: int) -> Sources:
    """Take the two streams in turn; `test_dual.py` has their sources from the equations."""
    if site == 0:
        return Sources([steps[0].inputs[0]], [1.0])
    state = steps[site].state
    pairs = [*state.sources, *([] if state.partial is None else [state.partial])]
    gate = 1 / (1 + math.exp(-4.0))  # even sites read stream 0
    gates = [1 - gate, gate] if site % 2 else [gate, 1 - gate]
    return Sources([value for pair in pairs for value in pair], gates * len(pairs))


_SOURCES: dict[type, Callable[[Any, list[Step], int], Sources]] = {
    AttnResConfig: _block_sums,
    OasisConfig: _with_depth_null,
    DeltaConfig: _deltas,
    DualConfig: _two_streams,
}
