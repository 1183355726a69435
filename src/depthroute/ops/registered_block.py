"""The launchers of the block schedule; under torch.compile, as operations that it takes whole."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from depthroute.ops.block import BlockRead, Site
from depthroute.ops.scores import KeyNorm, ScoreRule


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
    first: Tensor | None,
    weights: Tensor,
    logits: Tensor,
    rstds: Tensor,
    norm_rstds: Tensor | None,
    grad_outs: list[Tensor],
    grad_lses: list[Tensor],
    grad_values: list[Tensor] | None,
    grad_keys: list[Tensor] | None,
    slots: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the `ReadAheadGradients` of phase 1."""
    saved = (first, weights, logits, rstds, norm_rstds)
    if torch.compiler.is_compiling():
        values, keys, lse, query = _read_ahead_backward(
            *_flat(given), *saved, grad_outs, grad_lses, grad_values or [], grad_keys or [], slots
        )
        none_or = (None if given.keys is None else keys, None if given.lse is None else lse)
        return values, *none_or, query
    from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd as launch

    return tuple(launch(given, *saved, grad_outs, grad_lses, grad_values, grad_keys, slots))  # type: ignore[return-value]


def site_fwd(given: Site) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the `SiteResult` of a site."""
    if torch.compiler.is_compiling():
        total, out, numbers = _site(*given[:6], *_numbers(given))
        return None if given.total is None else total, out, numbers
    from depthroute.ops.kernels.add_merge_norm import site_fwd as launch

    return tuple(launch(given))  # type: ignore[return-value]


def site_bwd(
    given: Site, out: Tensor, numbers: Tensor, grad_out: Tensor, grad_total: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the `SiteGradients` of a site."""
    if torch.compiler.is_compiling():
        grads = _site_backward(*given[:6], *_numbers(given), out, numbers, grad_out, grad_total)
        merges = given.query is not None
        present = (True, merges, merges, merges, given.key is not None)
        return tuple(g if is_there else None for g, is_there in zip(grads, present, strict=True))
    from depthroute.ops.kernels.add_merge_norm import site_bwd as launch

    return tuple(launch(given, out, numbers, grad_out, grad_total))


def _numbers(given: BlockRead | Site) -> tuple[Any, ...]:
    return (*given.rule[1:], given.share, given.norm_eps)


def _flat(given: BlockRead) -> tuple[Any, ...]:
    return (
        list(given.values),
        list(given.keys or ()),
        given.pending,
        given.query,
        given.lse,
        *_numbers(given),
    )


def _block_read(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    pending: Tensor | None,
    query: Tensor,
    lse: Tensor | None,
    key_norm: str,
    eps: float,
    scale: float,
    share: float,
    norm_eps: float | None,
) -> BlockRead:
    rule = ScoreRule(1, cast(KeyNorm, key_norm), eps, scale)
    return BlockRead(tuple(values), tuple(keys) or None, pending, query, rule, share, norm_eps, lse)


def _without_none(results: Sequence[Tensor | None], like: Tensor) -> tuple[Any, ...]:
    return tuple(like.new_empty(0) if x is None else x for x in results)


@torch.library.custom_op("depthroute::read_ahead", mutates_args=())
def _read_ahead(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    pending: Tensor | None,
    query: Tensor,
    lse: Tensor | None,
    key_norm: str,
    eps: float,
    scale: float,
    share: float,
    norm_eps: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from depthroute.ops.kernels.read_ahead_fwd import read_ahead_fwd as launch

    given = _block_read(values, keys, pending, query, lse, key_norm, eps, scale, share, norm_eps)
    return _without_none(launch(given), query)


@_read_ahead.register_fake
def _(values, keys, pending, query, lse, *numbers):  # type: ignore[no-untyped-def]
    from depthroute.ops.kernels.block_layout import BlockLayout, ReadAhead

    given = _block_read(values, keys, pending, query, lse, *numbers)
    return _without_none(ReadAhead.empty(BlockLayout.of(given), given), query)


@torch.library.custom_op("depthroute::read_ahead_backward", mutates_args=())
def _read_ahead_backward(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    pending: Tensor | None,
    query: Tensor,
    lse: Tensor | None,
    key_norm: str,
    eps: float,
    scale: float,
    share: float,
    norm_eps: float | None,
    first: Tensor | None,
    weights: Tensor,
    logits: Tensor,
    rstds: Tensor,
    norm_rstds: Tensor | None,
    grad_outs: Sequence[Tensor],
    grad_lses: Sequence[Tensor],
    grad_values: Sequence[Tensor],
    grad_keys: Sequence[Tensor],
    slots: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd as launch

    given = _block_read(values, keys, pending, query, lse, key_norm, eps, scale, share, norm_eps)
    grads = launch(
        given, first, weights, logits, rstds, norm_rstds, grad_outs, grad_lses,
        grad_values or None, grad_keys or None, slots,
    )  # fmt: skip
    return _without_none(grads, query)


@_read_ahead_backward.register_fake
def _(values, keys, pending, query, lse, key_norm, eps, scale, share, norm_eps, *rest):  # type: ignore[no-untyped-def]
    from depthroute.ops.kernels.block_layout import ReadAheadGradients

    *_, slots = rest
    given = _block_read(values, keys, pending, query, lse, key_norm, eps, scale, share, norm_eps)
    return _without_none(ReadAheadGradients.empty(given, slots), query)


@torch.library.custom_op("depthroute::site", mutates_args=())
def _site(
    old: Tensor | None,
    lse: Tensor | None,
    query: Tensor | None,
    total: Tensor | None,
    pending: Tensor,
    key: Tensor | None,
    key_norm: str,
    eps: float,
    scale: float,
    share: float,
    norm_eps: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from depthroute.ops.kernels.add_merge_norm import site_fwd as launch

    rule = ScoreRule(1, cast(KeyNorm, key_norm), eps, scale)
    given = Site(old, lse, query, total, pending, key, rule, share, norm_eps)
    return _without_none(launch(given), pending)


@_site.register_fake
def _(old, lse, query, total, pending, *rest):  # type: ignore[no-untyped-def]
    from depthroute.ops.kernels.block_layout import SiteResult

    rule = ScoreRule(1, "none", 1.0, 1.0)
    given = Site(old, lse, query, total, pending, None, rule, 1.0, None)
    return _without_none(SiteResult.empty(given), pending)


@torch.library.custom_op("depthroute::site_backward", mutates_args=())
def _site_backward(
    old: Tensor | None,
    lse: Tensor | None,
    query: Tensor | None,
    total: Tensor | None,
    value: Tensor,
    key: Tensor | None,
    key_norm: str,
    eps: float,
    scale: float,
    share: float,
    norm_eps: float | None,
    out: Tensor,
    numbers: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from depthroute.ops.kernels.add_merge_norm import site_bwd as launch

    rule = ScoreRule(1, cast(KeyNorm, key_norm), eps, scale)
    given = Site(old, lse, query, total, value, key, rule, share, norm_eps)
    return _without_none(launch(given, out, numbers, grad_out, grad_total), out)


@_site_backward.register_fake
def _(old, lse, query, total, value, key, *rest):  # type: ignore[no-untyped-def]
    from depthroute.ops.kernels.block_layout import SiteGradients

    rule = ScoreRule(1, "none", 1.0, 1.0)
    given = Site(old, lse, query, total, value, key, rule, 1.0, None)
    return _without_none(SiteGradients.empty(given), value)
