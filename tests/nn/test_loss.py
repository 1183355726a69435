"""The chunked loss against torch's own cross-entropy, and the memory that it saves."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from depthroute.nn.loss import IGNORE, chunk_sums, linear_cross_entropy
from helpers import RTOL, assert_all_close, assert_close

NAMES = ["cross_entropy", "squared_lse", "hidden.grad", "weight.grad"]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states of 2 x 6 tokens, a head of 11 rows and targets."""
    hidden = torch.randn(2, 6, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(11, (2, 6))


def with_gradients(
    cross_entropy: Tensor, squared_lse: Tensor, hidden: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    return (
        cross_entropy,
        squared_lse,
        *torch.autograd.grad(cross_entropy + 0.3 * squared_lse, (hidden, weight)),
    )


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Compute the same from all logits at once."""
    logits, targets = (hidden @ weight.T).flatten(0, 1), targets.flatten()
    cross_entropy = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)
    squared_lse = logits[targets != IGNORE].logsumexp(-1).pow(2).sum()
    return with_gradients(cross_entropy, squared_lse, hidden, weight)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    sums = linear_cross_entropy(hidden, weight, targets, **settings)
    return with_gradients(sums.cross_entropy, sums.squared_lse, hidden, weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 6, 12, 4096])
def test_sums_and_gradients_for_any_chunk_size(chunk_tokens: int, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    actual = chunked(*given, chunk_tokens=chunk_tokens)
    assert_all_close(actual, plain(*given), NAMES, RTOL[dtype])


@pytest.mark.parametrize("chunk_tokens", [1, 5, 12])
def test_ignored_tokens_have_no_loss(chunk_tokens: int) -> None:
    hidden, weight, targets = inputs()
    targets[0, 1:4] = targets[1, 5] = IGNORE
    actual = chunked(hidden, weight, targets, chunk_tokens=chunk_tokens)
    assert_all_close(actual, plain(hidden, weight, targets), NAMES)
    assert not actual[2][0, 1:4].any()
    assert linear_cross_entropy(hidden, weight, targets).tokens == 8


def test_a_batch_without_targets_gives_zeros() -> None:
    hidden, weight, targets = inputs()
    actual = chunked(hidden, weight, torch.full_like(targets, IGNORE), chunk_tokens=5)
    for value, name in zip(actual, NAMES, strict=True):
        assert torch.equal(value, torch.zeros_like(value)), name


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(torch.float32)
    actual = chunked(hidden * 1e3, weight, targets)[:2]
    logits = (hidden.double() * 1e3) @ weight.double().T
    lse = logits.logsumexp(-1)
    expected = (lse - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).sum(), lse.pow(2).sum()
    assert_all_close(actual, expected, NAMES[:2])


def test_gradients_against_finite_differences() -> None:
    hidden, weight, targets = inputs()
    targets[0, 2] = IGNORE

    def sums(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(hidden, weight, targets, chunk_tokens=5)[:2]

    assert torch.autograd.gradcheck(sums, (hidden, weight))


def test_sums_are_float32_for_half_precision() -> None:
    hidden, weight, targets = inputs(torch.float32)
    half = hidden.bfloat16()
    sums = linear_cross_entropy(half, weight, targets)
    assert sums.cross_entropy.dtype == sums.squared_lse.dtype == torch.float32
    assert sums.tokens.dtype == torch.int64
    # only the product is rounded: one bfloat16 rounding of each logit
    logits = (half @ weight.bfloat16().T).float().flatten(0, 1)
    assert_close(sums.cross_entropy, F.cross_entropy(logits, targets.flatten(), reduction="sum"))
    sums.cross_entropy.backward()
    assert weight.grad.dtype == torch.float32


class LargestResult(TorchDispatchMode):
    """Record the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_the_logits_of_all_tokens_never_exist() -> None:
    """Neither at once in a live tensor, nor in parts that the backward pass keeps."""
    tokens, dim, vocabulary = 64, 2, 50
    hidden = torch.randn(tokens, dim, requires_grad=True)
    weight = torch.randn(vocabulary, dim, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with LargestResult() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sums = linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)
        forward_kept = sum(kept)
        (sums.cross_entropy + sums.squared_lse).backward()
    assert largest.numel == 4 * vocabulary
    assert forward_kept < tokens * vocabulary


@pytest.mark.parametrize(("chunk_tokens", "sizes"), [(5, [5, 5]), (6, [6, 6]), (4096, [12])])
def test_chunks_of_one_size_are_left_to_what_is_given(chunk_tokens: int, sizes: list[int]) -> None:
    """A compiled form may have another graph, which keeps other tensors, for each size."""
    hidden, weight, targets = inputs()
    seen: list[Tensor] = []

    def chunk(h: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(t)
        return h.sum(), w.sum()

    whole = sum(sizes)
    rest = chunk_sums(hidden.flatten(0, -2)[whole:], weight, targets.flatten()[whole:])
    sums = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, chunk=chunk)
    assert [len(t) for t in seen] == sizes
    assert torch.equal(torch.cat(seen), targets.flatten()[:whole])
    assert_close(sums.cross_entropy, hidden.flatten(0, -2)[:whole].sum() + rest[0])
    assert_close(sums.squared_lse, len(sizes) * weight.sum() + rest[1])


def test_shapes_that_do_not_match_are_an_error() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match=r"targets must have the shape \(2, 6\).*got \(2, 5\)"):
        linear_cross_entropy(hidden, weight, targets[:, :5])


def test_a_chunk_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1, got 0"):
        linear_cross_entropy(*inputs(), chunk_tokens=0)


@pytest.mark.parametrize("target", [-1, 11])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    hidden, weight, targets = inputs()
    targets[1, 2] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)
