"""The launchers of the block schedule; under torch.compile, as operations that it takes whole."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.ops.block import BlockRead, KeySum, Site
from depthroute.ops.kernels.results import without_none
from depthroute.ops.scores import ScoreRule


def site_rows(num_tokens: int, width: int, device: torch.device) -> int:
    """Return the rows that the gradient of a site's query comes in."""
    from depthroute.ops.kernels.block_layout import site_programs

    return site_programs(num_tokens, width, device)


def read_ahead_fwd(given: BlockRead) -> tuple[Any, ...]:
    """Return the `ReadAhead` of phase 1."""
    if torch.compiler.is_compiling():
        first, out, lse, closed, weights, logits, rstds, norm_rstds = _read_ahead(*_flat(given))
        return (
            None if given.norm_eps is None else first,
            out,
            lse,
            None if given.pending is None else closed,
            weights,
            logits,
            rstds,
            None if given.norm_eps is None else norm_rstds,
        )
    from depthroute.ops.kernels.read_ahead_fwd import read_ahead_fwd as launch

    return launch(given)


def read_ahead_bwd(
    given: BlockRead,
    saved: Sequence[Any],
    grad_outs: list[Tensor],
    grad_lses: list[Tensor],
    grad_values: list[Tensor] | None,
    grad_keys: list[Tensor] | None,
    slots: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the `ReadAheadGradients` of phase 1.

    Args:
        given: Its arguments, the last source complete.
        saved: Of its results `first`, `weights`, `logits`, `rstds` and `norm_rstds`.
        grad_outs, grad_lses, grad_values, grad_keys, slots: As the launcher takes them.
    """
    if torch.compiler.is_compiling():
        values, keys, lse, query = _read_ahead_backward(
            *_flat(given), *saved, grad_outs, grad_lses, grad_values or [], grad_keys or [], slots
        )
        none_or = (None if given.keys is None else keys, None if given.lse is None else lse)
        return values, *none_or, query
    from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd as launch

    grads = launch(given, *saved, grad_outs, grad_lses, grad_values, grad_keys, slots)  # type: ignore[call-arg]
    return tuple(grads)  # type: ignore[return-value]


def site_fwd(given: Site) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return the `SiteResult` of a site."""
    if torch.compiler.is_compiling():
        total, key, out, numbers = _site(*_flat_site(given))
        return (
            None if given.total is None else total,
            None if given.key_sum is None else key,
            out,
            numbers,
        )
    from depthroute.ops.kernels.add_merge_norm import site_fwd as launch

    return tuple(launch(given))  # type: ignore[return-value]


def site_bwd(given: Site, *results_and_grads: Tensor | None) -> tuple[Any, ...]:
    """Return the `SiteGradients` of a site; arguments as the launcher takes them."""
    if torch.compiler.is_compiling():
        grads = _site_backward(*_flat_site(given), *results_and_grads)
        merges = given.query is not None
        present = (True, merges, merges, merges, given.key is not None)
        return tuple(g if is_there else None for g, is_there in zip(grads, present, strict=True))
    from depthroute.ops.kernels.add_merge_norm import site_bwd as launch

    return tuple(launch(given, *results_and_grads))  # type: ignore[arg-type]


def _numbers(given: BlockRead | Site) -> tuple[Any, ...]:
    return (*given.rule[1:], given.share, given.norm_eps)


def _flat(given: BlockRead) -> tuple[Any, ...]:
    sources = (list(given.values), list(given.keys or ()))
    return (*sources, given.pending, given.query, given.lse, *_numbers(given))


def _flat_site(given: Site) -> tuple[Any, ...]:
    key_sum = given.key_sum
    emits = (False, None) if key_sum is None else (True, key_sum.norm_eps)
    return (*given[:6], *_numbers(given), *emits)


# schemas are written out: each argument list serves an operation and its backward pass
_NUMBERS = "str key_norm, float eps, float scale, float share, float? norm_eps"
_READ = f"Tensor[] values, Tensor[] keys, Tensor? pending, Tensor query, Tensor? lse, {_NUMBERS}"
_SAVED = "Tensor? first, Tensor weights, Tensor logits, Tensor rstds, Tensor? norm_rstds"
_GRADS = (
    "Tensor[] grad_outs, Tensor[] grad_lses, Tensor[] later_values, Tensor[] later_keys, "
    "Tensor[] slots"
)
_SITE = (
    "Tensor? old, Tensor? lse, Tensor? query, Tensor? total, Tensor pending, Tensor? key, "
    f"{_NUMBERS}, bool emits, float? emitted_eps"
)


def _operation(name: str, arguments: str, num_results: int) -> Callable[[Any], Any]:
    schema = f"({arguments}) -> ({', '.join(['Tensor'] * num_results)})"
    return torch.library.custom_op(f"depthroute::{name}", mutates_args=(), schema=schema)


def _block_read(*arguments: Any) -> BlockRead:
    values, keys, pending, query, lse, key_norm, eps, scale, share, norm_eps = arguments
    rule = ScoreRule(1, key_norm, eps, scale)
    keys = tuple(keys) or None
    return BlockRead(tuple(values), keys, pending, query, rule, share, norm_eps, lse)


def _site_of(*arguments: Any) -> Site:
    old, lse, query, total, pending, key, *numbers = arguments
    key_norm, eps, scale, share, norm_eps, emits, emitted_eps = numbers
    rule = ScoreRule(1, key_norm, eps, scale)
    key_sum = KeySum(emitted_eps) if emits else None
    return Site(old, lse, query, total, pending, key, rule, share, norm_eps, key_sum)


@_operation("read_ahead", _READ, 8)
def _read_ahead(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.read_ahead_fwd import read_ahead_fwd as launch

    given = _block_read(*arguments)
    return without_none(launch(given), given.query)


@_read_ahead.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.block_layout import BlockLayout
    from depthroute.ops.kernels.block_results import ReadAhead

    given = _block_read(*arguments)
    return without_none(ReadAhead.empty(BlockLayout.of(given), given), given.query)


@_operation("read_ahead_backward", f"{_READ}, {_SAVED}, {_GRADS}", 4)
def _read_ahead_backward(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd as launch

    given, rest = _block_read(*arguments[:10]), arguments[10:]
    *saved_and_grads, later_values, later_keys, slots = rest
    grads = launch(given, *saved_and_grads, later_values or None, later_keys or None, slots)  # type: ignore[call-arg]
    return without_none(grads, given.query)


@_read_ahead_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.block_results import ReadAheadGradients

    given = _block_read(*arguments[:10])
    return without_none(ReadAheadGradients.empty(given, arguments[-1]), given.query)


@_operation("site", _SITE, 4)
def _site(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.add_merge_norm import site_fwd as launch

    given = _site_of(*arguments)
    return without_none(launch(given), given.pending)


@_site.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.block_results import SiteResult

    given = _site_of(*arguments)
    return without_none(SiteResult.empty(given), given.pending)


_SITE_BACKWARD = (
    "Tensor? new_key, Tensor out, Tensor numbers, Tensor grad_out, Tensor? grad_total, "
    "Tensor? grad_new_key"
)


@_operation("site_backward", f"{_SITE}, {_SITE_BACKWARD}", 5)
def _site_backward(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.add_merge_norm import site_bwd as launch

    given = _site_of(*arguments[:-6])
    return without_none(launch(given, *arguments[-6:]), given.pending)


@_site_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    from depthroute.ops.kernels.block_results import SiteGradients

    given = _site_of(*arguments[:-6])
    return without_none(SiteGradients.empty(given), given.pending)
