"""Validation of a read's arguments, once, at the public edge."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from depthroute.ops.scores import KeyNorm, ScoreRule, accumulation_dtype


class Read(NamedTuple):
    """Validated arguments of a read, in canonical form."""

    values: tuple[Tensor, ...]  # S of [*b, D]
    keys: tuple[Tensor, ...] | None  # S of [*b, R]
    query: Tensor  # [Q, R]
    bias: Tensor | None  # [Q or 1, S, *(b or ones)], accumulation dtype
    null: Tensor | None  # [Q, H], accumulation dtype
    rule: ScoreRule
    out_norm_eps: float | None = None  # of the norm of the output, if there is one


def tensor(name: str, x: object) -> Tensor:
    """Check that an argument is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    return x


def floating(name: str, x: object) -> Tensor:
    """Check that an argument is a tensor of a floating dtype."""
    given = tensor(name, x)
    if not given.is_floating_point():
        raise ValueError(f"{name} must be a floating tensor, got {given.dtype}")
    return given


def number(name: str, x: object) -> float:
    """Check that an argument is a real number."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise ValueError(f"{name} must be a number, got {x!r}")
    return float(x)


def sources(name: str, given: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    """Return the sources as a tuple; a stacked tensor is split along its first axis."""
    if not isinstance(given, Tensor | Sequence):
        raise ValueError(
            f"{name} must be a sequence of tensors or one stacked [S, ..., width], "
            f"got {type(given).__name__}"
        )
    if isinstance(given, Tensor) and given.ndim < 2:
        raise ValueError(
            f"{name} must be a sequence of tensors or one stacked [S, ..., width], "
            f"got a tensor of shape {tuple(given.shape)}"
        )
    items = given.unbind(0) if isinstance(given, Tensor) else tuple(given)
    if not items:
        raise ValueError(f"{name} must hold at least one source, got none")
    first = items[0]
    for i, item in enumerate(items):
        if not isinstance(item, Tensor):
            raise ValueError(f"{name}[{i}] must be a tensor, got {type(item).__name__}")
        if not item.is_floating_point() or item.ndim < 1:
            raise ValueError(
                f"{name}[{i}] must be a floating tensor [..., width], "
                f"got {item.dtype} of shape {tuple(item.shape)}"
            )
        if item.shape != first.shape:
            raise ValueError(
                f"{name}[{i}] must have the shape of {name}[0], {tuple(first.shape)}, "
                f"got {tuple(item.shape)}"
            )
        if item.dtype != first.dtype or item.device != first.device:
            raise ValueError(
                f"{name}[{i}] must have the dtype and device of {name}[0], {first.dtype} on "
                f"{first.device}, got {item.dtype} on {item.device}"
            )
    return items


def rule(
    width: int,
    rank: int,
    *,
    heads: int,
    key_norm: KeyNorm,
    eps: float,
    scale: float,
    separate: bool,
) -> ScoreRule:
    """Check the numbers of a read against its widths."""
    if not separate and not 1 <= rank <= width:
        raise ValueError(
            f"query must have 1 to {width} columns, the width of the values, got rank {rank}"
        )
    if not isinstance(heads, int) or heads < 1 or width % heads or rank % heads:
        raise ValueError(
            f"heads must divide the value width {width} and the key width {rank}, got {heads}"
        )
    if key_norm not in get_args(KeyNorm):
        raise ValueError(f"key_norm must be one of {get_args(KeyNorm)}, got {key_norm!r}")
    if separate and key_norm == "full":
        raise ValueError(
            'key_norm="full" normalises the values before keys are cut from them; '
            'with separate keys use "tail" or "none"'
        )
    check_eps("eps", eps)
    number("scale", scale)
    return ScoreRule(heads, key_norm, eps, scale)


def check_eps(name: str, eps: float) -> None:
    """Check what a norm adds to the mean square."""
    if not number(name, eps) > 0:
        raise ValueError(f"{name} must be > 0 (0 gives NaN on zeros), got {eps}")


def keys_of(keys: Sequence[Tensor] | Tensor, values: tuple[Tensor, ...], rank: int) -> tuple:
    """Check separate keys against the values and the width of the query."""
    checked = sources("keys", keys)
    if len(checked) != len(values):
        raise ValueError(f"keys must hold one key per value, {len(values)}, got {len(checked)}")
    want = (*values[0].shape[:-1], rank)
    if checked[0].shape != want:
        raise ValueError(
            f"keys must have the batch axes of the values and the width of the query, {want}, "
            f"got {tuple(checked[0].shape)}"
        )
    if checked[0].device != values[0].device:
        raise ValueError(f"keys are on {checked[0].device}, values on {values[0].device}")
    return checked


def queries(query: Tensor, like: Tensor) -> Tensor:
    """Check the query and return it as `[Q, R]`."""
    tensor("query", query)
    if query.ndim not in (1, 2) or not query.is_floating_point() or not query.numel():
        raise ValueError(
            f"query must be a floating tensor [R] or [Q, R] with Q, R >= 1, "
            f"got {query.dtype} of shape {tuple(query.shape)}"
        )
    if query.device != like.device:
        raise ValueError(f"query is on {query.device}, values on {like.device}")
    return query if query.ndim == 2 else query.unsqueeze(0)


def out_dtype_of(out_dtype: torch.dtype | None, like: Tensor) -> torch.dtype:
    """Return the dtype of a read's output: the one asked for, or that of the values."""
    is_dtype = isinstance(out_dtype, torch.dtype)
    if out_dtype is not None and not (is_dtype and out_dtype.is_floating_point):
        raise ValueError(f"out_dtype must be a floating dtype, got {out_dtype}")
    return out_dtype or like.dtype


def is_one_of(shape: Sequence[int], *allowed: Sequence[int]) -> bool:
    """Compare one by one: Dynamo's `in` takes a symbolic size for unequal to its own value."""
    return any(shape == one for one in allowed)


def bias_of(bias: Tensor, num_queries: int, num_sources: int, like: Tensor) -> Tensor:
    """Bring a bias of shape `[S]`, `[S, *b]` or `[Q, S, *b]` to `[Q or 1, S, *(b or ones)]`."""
    floating("bias", bias)
    batch = tuple(like.shape[:-1])
    allowed = ((num_sources,), (num_sources, *batch), (num_queries, num_sources, *batch))
    if not is_one_of(bias.shape, *allowed):
        raise ValueError(
            f"bias must have shape [S], [S, *batch] or [Q, S, *batch], here one of {allowed}, "
            f"got {tuple(bias.shape)}"
        )
    if bias.device != like.device:
        raise ValueError(f"bias is on {bias.device}, values on {like.device}")
    if bias.ndim == 1:
        bias = bias.view(num_sources, *([1] * len(batch)))
    if bias.ndim == len(batch) + 1:
        bias = bias.unsqueeze(0)
    return bias.to(accumulation_dtype(like.dtype))


def filled(name: str, x: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor; a number is filled in there, as CUDA graphs allow no copy from the host."""
    if not isinstance(x, Tensor):
        return torch.full((), number(name, x), dtype=dtype, device=device)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, values on {device}")
    return floating(name, x).to(dtype)


def null_of(null: Tensor | float, num_queries: int, heads: int, like: Tensor) -> Tensor:
    """Bring a null logit (a number, `[H]` or `[Q, H]`) to `[Q, H]`."""
    dtype = accumulation_dtype(like.dtype)
    null = filled("null", null, dtype, like.device)
    if not is_one_of(null.shape, (), (heads,), (num_queries, heads), (num_queries, 1)):
        raise ValueError(
            f"null must be a number, [H] or [Q, H] with Q={num_queries}, H={heads}, "
            f"got shape {tuple(null.shape)}"
        )
    return null.expand(num_queries, heads)


def read(
    values: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    keys: Sequence[Tensor] | Tensor | None,
    heads: int,
    key_norm: KeyNorm,
    eps: float,
    scale: float,
    bias: Tensor | None,
    null: Tensor | float | None,
    out_norm_eps: float | None = None,
) -> Read:
    """Validate the arguments of `depth_attend` and return them in canonical form."""
    items = sources("values", values)
    rows = queries(query, items[0])
    rank = rows.shape[-1]
    checked = rule(
        items[0].shape[-1],
        rank,
        heads=heads,
        key_norm=key_norm,
        eps=eps,
        scale=scale,
        separate=keys is not None,
    )
    if out_norm_eps is not None:
        check_eps("out_norm_eps", out_norm_eps)
    return Read(
        items,
        None if keys is None else keys_of(keys, items, rank),
        rows,
        None if bias is None else bias_of(bias, len(rows), len(items), items[0]),
        None if null is None else null_of(null, len(rows), heads, items[0]),
        checked,
        out_norm_eps,
    )


class Merge(NamedTuple):
    """Validated arguments of a merge, in canonical form."""

    out: Tensor  # [Q, *b, D]
    lse: Tensor  # [Q, *b, H]
    read: Read  # of the one new source; the norm is that of the merged output


def merge(
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    query: Tensor,
    *,
    key: Tensor | None,
    key_norm: KeyNorm,
    eps: float,
    scale: float,
    bias: Tensor | float | None,
    out_norm_eps: float | None,
) -> Merge:
    """Validate the arguments of `depth_merge` and return them in canonical form."""
    floating("value", value)
    for name, x in {"out": out, "lse": lse}.items():
        if floating(name, x).device != value.device:
            raise ValueError(f"{name} is on {x.device}, value on {value.device}")
    dtype = accumulation_dtype(value.dtype)
    if lse.ndim != out.ndim or not lse.ndim:
        raise ValueError(
            f"lse must be [Q, *batch, H] or [*batch, H], with as many axes as out, {out.ndim}, "
            f"got {lse.ndim}"
        )
    one = read(
        [value],
        query,
        keys=None if key is None else [key],
        heads=lse.shape[-1],
        key_norm=key_norm,
        eps=eps,
        scale=scale,
        bias=None,
        null=None,
        out_norm_eps=out_norm_eps,
    )
    lead, batch = query.shape[:-1], value.shape[:-1]
    if out.shape != (*lead, *value.shape):
        raise ValueError(f"out must have shape {(*lead, *value.shape)}, got {tuple(out.shape)}")
    if lse.shape[:-1] != (*lead, *batch) or lse.dtype != dtype:
        raise ValueError(
            f"lse must be {dtype} of shape {(*lead, *batch, 'H')}, "
            f"got {lse.dtype} of shape {tuple(lse.shape)}"
        )
    if bias is not None:
        bias = filled("bias", bias, dtype, value.device)
        if not is_one_of(bias.shape, (), batch, (*lead, *batch)):
            raise ValueError(
                f"bias must be a number, {tuple(batch)} or {(*lead, *batch)}, "
                f"got shape {tuple(bias.shape)}"
            )
        one = one._replace(bias=bias.expand(len(one.query), *batch).unsqueeze(1))
    if query.ndim == 1:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return Merge(out, lse, one)
