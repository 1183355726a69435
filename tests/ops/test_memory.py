"""What a read keeps for its backward pass, counted in distinct storages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge
from depthroute.residual import AttnResConfig, TailKey, build_residual

B, T, D = 2, 8, 96
FLOAT32 = 4  # bytes


class Saved:
    """Tensors that autograd saves, beyond the storages that are known before."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.kept[tensor.untyped_storage().data_ptr()] = tensor  # alive: no address comes twice
        return tensor

    def sizes_beyond(self, known: Sequence[Tensor]) -> list[int]:
        """Return the bytes of each saved storage that belongs to none of the known tensors."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in known}
        return [
            tensor.untyped_storage().nbytes()
            for address, tensor in self.kept.items()
            if address not in addresses
        ]


def sources(num: int, width: int = D) -> list[Tensor]:
    return [torch.randn(B, T, width, requires_grad=True) for _ in range(num)]


@pytest.mark.parametrize("key_norm", ["tail", "full", "none"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("out_norm_eps", [None, 1e-6])
def test_a_read_saves_its_sources_and_one_number_per_logit(
    key_norm: Any, queries: int, out_norm_eps: float | None
) -> None:
    num, heads = 7, 2
    values, query = sources(num), torch.randn(queries, 32, requires_grad=True)
    saved = Saved()
    with saved.hooks():
        out, lse = depth_attend(
            values, query, heads=heads, key_norm=key_norm, out_norm_eps=out_norm_eps
        )
    known = [*values, query]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in known}
    assert addresses <= set(saved.kept)  # the sources themselves, not copies of them
    logits, norms, sums = queries * num * heads, num, queries * heads
    if out_norm_eps is not None:  # the output as returned, and one number for each
        known.append(out)
        norms += queries
    own = saved.sizes_beyond(known)
    assert sum(own) <= FLOAT32 * B * T * (logits + norms + sums)
    assert max(own) < FLOAT32 * B * T * D
    assert out.requires_grad
    assert lse.requires_grad


@pytest.mark.parametrize("out_norm_eps", [None, 1e-6])
def test_a_merge_saves_nothing_of_its_own_but_numbers(out_norm_eps: float | None) -> None:
    value, query = sources(1)[0], torch.randn(1, D, requires_grad=True)
    read = depth_attend(sources(3), query)
    saved = Saved()
    with saved.hooks():
        out, _ = depth_merge(*read, value, query, out_norm_eps=out_norm_eps)
    known = [*read, value, query, *([] if out_norm_eps is None else [out])]
    numbers = 4 if out_norm_eps is None else 5  # per token
    assert sum(saved.sizes_beyond(known)) <= numbers * FLOAT32 * B * T


def bytes_of_all_reads(config: AttnResConfig, layers: int) -> int:
    """Return what the reads of a model save beyond sources, parameters and partial sums."""
    kinds = ("attention", "mlp") * layers
    scheme = build_residual(config, dim=D, kinds=kinds)
    saved, known = Saved(), list(scheme.parameters())
    state = scheme(sources(1)[0])
    for site in range(len(kinds)):
        with saved.hooks():
            _, state = scheme.read(state, site, torch.clone)
        state = scheme.write(state, site, sources(1)[0])
        known += [*state.values, *([] if state.total is None else [state.total])]
    with saved.hooks():
        scheme.finish(state, torch.clone)
    return sum(saved.sizes_beyond(known))


@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("rank", [D, 16])
def test_full_reads_save_numbers_not_vectors(layers: int, rank: int) -> None:
    config = AttnResConfig(num_blocks=0, key=TailKey(rank=rank))
    # the read at site t: a logit and a norm for each of its t + 1 sources, and one log-sum-exp
    numbers = sum(2 * (t + 1) + 1 for t in range(1, 2 * layers + 1))
    assert 0 < bytes_of_all_reads(config, layers) <= FLOAT32 * B * T * numbers


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_block_reads_save_at_most_one_vector_each(layers: int) -> None:
    # the first phase's result, which the merge of the partial sum needs again
    reads = 2 * layers
    logits = 2 * (layers + 2) + 5  # per read: at most N + 1 sources; the merge's own numbers
    total = bytes_of_all_reads(AttnResConfig(num_blocks=layers), layers)
    assert 0 < total <= FLOAT32 * B * T * reads * (D + logits)
