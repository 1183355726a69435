"""Reads scheduled by blocks: what a whole block shares is done once, the rest once a site.

`read_ahead` reads the closed sources for all queries of a block; at each site `add_merge_norm` adds
the last write to the open block, merges the block into the site's read, and norms the result. On
CUDA each of them is one kernel. Elsewhere they are composed of `depth_attend`, `depth_merge` and
`rms_norm`, whose semantics they have.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from depthroute.ops import backend
from depthroute.ops.depth_attend import depth_attend
from depthroute.ops.depth_merge import depth_merge
from depthroute.ops.rms_norm import rms_eps, rms_norm
from depthroute.ops.scores import ScoreRule, accumulation_dtype

Norm = Callable[[Tensor], Tensor]

# 16 sources fit the registers of a program up to so many numbers; more are streamed, up to a tile
MAX_RESIDENT, MAX_NUMBERS, MAX_BLOCK_SOURCES = 16, 32768, 64


class KeySum(NamedTuple):
    """How keys that sublayers emit beside their writes are summed to the key of the block."""

    norm_eps: float | None  # of the norm of each write's key; None if it counts as it is

    def add(self, total: Tensor | None, key: Tensor) -> Tensor:
        """Add a key `[*b, R]` to the sum of those before it, in the accumulation dtype."""
        key = key.to(accumulation_dtype(key.dtype))
        if self.norm_eps is not None:
            key = rms_norm(key, eps=self.norm_eps)
        return key if total is None else total + key


class BlockRead(NamedTuple):
    """Arguments of `read_ahead` as the kernels take them."""

    values: tuple[Tensor, ...]  # S of [*b, D]
    keys: tuple[Tensor, ...] | None  # S of [*b, R]
    pending: Tensor | None  # [*b, D]: what the last source lacks
    query: Tensor  # [Q, R]
    rule: ScoreRule
    share: float  # factor of the last source, once it is complete
    norm_eps: float | None  # of the norm of the first read
    lse: Tensor | None = None  # [*b], if the first value is a read itself, with this log-sum-exp


class Site(NamedTuple):
    """Arguments of `add_norm` and `add_merge_norm` as the kernels take them."""

    old: Tensor | None  # [*b, D], the read without the open block
    lse: Tensor | None  # [*b]
    query: Tensor | None  # [rows, R], all of them the same query
    total: Tensor | None  # [*b, D], the open block before the write
    pending: Tensor  # [*b, D], the write; [*b, D + R] with an emitted key
    key: Tensor | None  # [*b, R], of the open block, less an emitted one
    rule: ScoreRule
    share: float  # factor of the open block, as a source
    norm_eps: float | None
    key_sum: KeySum | None = None  # how an emitted key joins it


class Ahead(NamedTuple):
    """What `read_ahead` leaves for the reads of a block, one entry each.

    To be handed to `add_merge_norm` as it is: between the two, the gradient of `lses` is not the
    mathematical one when kernels run.
    """

    outs: tuple[Tensor, ...]  # [*b, D]
    lses: tuple[Tensor, ...]  # [*b] from the kernels, else [*b, H]
    queries: tuple[Tensor, ...]  # [rows, R] from the kernels, else [R]
    fused: bool
    rest: Tensor | None  # rows of the query that it did not serve

    def without(self, count: int) -> "Ahead":
        """Return what is left after so many reads."""
        left = (self.outs[count:], self.lses[count:], self.queries[count:])
        return Ahead(*left, self.fused, self.rest)


def read_ahead(
    values: Sequence[Tensor],
    query: Tensor,
    *,
    keys: Sequence[Tensor] | None,
    pending: Tensor | None,
    share: float,
    bias: Tensor | None,
    rule: ScoreRule,
    complete: int,
    norm: Norm,
    num_now: int | None = None,
) -> tuple[Ahead, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Read the closed sources for all queries of a block; the last source may close on the way.

    Args:
        values: S sources `[*b, D]`.
        query: `[Q, R]`, one row for each read.
        keys: Their separate keys `[*b, R]`; None cuts them from the values.
        pending: The last write of the block that closes, `[*b, D]`: the last source is
            `share * (values[-1] + pending)`. None if the last source is complete.
        share: See `pending`.
        bias: Logit offsets of the sources, `[S]`.
        rule: Heads, key norm, eps and scale.
        complete: How many of the reads, from the first, miss no source; they are normed here.
        norm: Norm of every read.
        num_now: How many come before another source closes; None for all. The kernels serve all,
            if keys are cut from values, and leave what closes meanwhile to `merge_norm`.

    Returns:
        The reads to come; the values and the keys to use from here on. Gradients of later uses
        come back through them, so that each source's is read and written once a block.
    """
    eps, rest = rms_eps(norm), None
    fuses = complete < 2 and (eps is not None or not complete) and _fuses(values, rule, bias)
    serves_all = fuses and keys is None and eps is not None
    if not serves_all and num_now is not None and num_now < len(query):
        query, rest = query[:num_now], query[num_now:]
    if not fuses:
        if pending is not None:
            values = (*values[:-1], scaled(values[-1] + pending, share))
        return _plain_read(tuple(values), query, rest, keys, bias, rule, complete, norm)
    from depthroute.ops import fused_block

    given = BlockRead(
        tuple(values),
        None if keys is None else tuple(keys),
        pending,
        query,
        rule,
        share,
        eps if complete else None,
    )
    return fused_block.read_ahead(given, rest)


def merge_norm(
    ahead: Ahead, values: Sequence[Tensor], *, rule: ScoreRule, norm: Norm
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Merge complete sources into the first read of `ahead`, and norm it; in kernels only.

    Args:
        ahead: The reads to come, of kernels that served more than a block.
        values: The sources that closed since, and the open block, `[*b, D]`.
        rule: Key norm, eps and scale.
        norm: `rms_norm` as a module.

    Returns:
        The normed read; the sources to use from here on, as `read_ahead` returns them.
    """
    from depthroute.ops import fused_block

    sources = (ahead.outs[0], *values)
    given = BlockRead(
        sources, None, None, ahead.queries[0], rule, 1.0, rms_eps(norm), ahead.lses[0]
    )
    return fused_block.merge(given)


def add_merge_norm(
    ahead: Ahead,
    total: Tensor | None,
    pending: Tensor,
    *,
    key: Tensor | None,
    key_sum: KeySum | None,
    share: float,
    bias: float | None,
    rule: ScoreRule,
    norm: Norm,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Add a write to the open block, merge the block into the first read of `ahead`, norm it.

    Args:
        ahead: The reads to come.
        total: The open block before this write, `[*b, D]`; None if it has no other.
        pending: The write, `[*b, D]`; or `[*b, D + R]` with the key that was emitted.
        key: Separate key of the open block, `[*b, R]`, less a key that `pending` has.
        key_sum: How that key joins it.
        share: Factor of the block's sum as a source.
        bias: Its logit offset.
        rule: Heads, key norm, eps and scale.
        norm: Norm of the read.

    Returns:
        The open block, its key (None if cut from it), and the normed read.
    """
    width = ahead.outs[0].shape[-1]
    if pending.shape[-1] == width:
        key_sum = None
    if ahead.fused:
        from depthroute.ops import fused_block

        first, eps = (ahead.outs[0], ahead.lses[0], ahead.queries[0]), rms_eps(norm)
        given = Site(*first, total, pending, key, rule, share, eps, key_sum)
        total, key, out = fused_block.site(given)
        return total, key, out if eps is not None else norm(out)
    if key_sum is not None:
        pending, emitted = pending.tensor_split((width,), dim=-1)
        key = key_sum.add(key, emitted)
    total = pending if total is None else total + pending
    out, _ = depth_merge(
        ahead.outs[0],
        ahead.lses[0],
        scaled(total, share),
        ahead.queries[0],
        key=key,
        bias=bias,
        key_norm=rule.key_norm,
        eps=rule.eps,
        scale=rule.scale,
    )
    return total, key, norm(out)


def add_norm(total: Tensor, pending: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Add a write to the residual stream and norm the sum: `s = total + pending`, `norm(s)`.

    Args:
        total: The stream, `[*b, D]`.
        pending: The write, `[*b, D]`.
        norm: The norm; one kernel does both if it is `rms_norm`.
    """
    eps = rms_eps(norm)
    if eps is not None and pending.dtype == total.dtype and backend.fuses(total):
        from depthroute.ops import fused_block

        rule = ScoreRule(1, "none", eps, 1.0)
        given = Site(None, None, None, total, pending, None, rule, 1.0, eps)
        total, _, out = fused_block.site(given)
        return total, out
    total = total + pending
    return total, norm(total)


def scaled(x: Tensor, share: float) -> Tensor:
    """Return `share * x`, and x itself for a share of 1."""
    return x if share == 1.0 else x * share


def _fuses(values: Sequence[Tensor], rule: ScoreRule, bias: Tensor | None) -> bool:
    """Decide whether the kernels of this schedule take a read; if not, others may."""
    num_values, width = len(values), values[0].shape[-1]
    numbers = num_values * (1 << (width - 1).bit_length())
    apart = ""
    if rule.heads > 1 or bias is not None:
        apart = "several heads" if rule.heads > 1 else "logits have a bias"
    elif num_values > MAX_BLOCK_SOURCES or (numbers > MAX_NUMBERS and num_values <= MAX_RESIDENT):
        apart = f"{num_values} sources of width {width}"
    return backend.fuses(values[0], apart)


def _plain_read(
    values: tuple[Tensor, ...],
    query: Tensor,
    rest: Tensor | None,
    keys: Sequence[Tensor] | None,
    bias: Tensor | None,
    rule: ScoreRule,
    complete: int,
    norm: Norm,
) -> tuple[Ahead, tuple[Tensor, ...], tuple[Tensor, ...]]:
    dtype = values[0].dtype
    outs, lses = depth_attend(
        values,
        query,
        keys=keys,
        heads=rule.heads,
        key_norm=rule.key_norm,
        eps=rule.eps,
        scale=rule.scale,
        bias=bias,
        # a result that will be merged is rounded once, after the merge
        out_dtype=None if complete == len(query) else accumulation_dtype(dtype),
    )
    reads = [norm(out.to(dtype)) if i < complete else out for i, out in enumerate(outs.unbind(0))]
    ahead = Ahead(tuple(reads), lses.unbind(0), query.unbind(0), False, rest)
    return ahead, values, tuple(keys or ())
