"""Reads of other libraries, where they are installed, in the form of `depth_read`.

A function takes S sources `[T, D]`, a query `[R]` and an eps, and returns `[T, D]`. They agree with
`depth_read` but for rounding: most of them want the query in the sources' dtype.
"""

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SingleRead = Callable[[Sequence[Tensor], Tensor, float], Tensor]


def fast_attnres(values: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """fast-attnres 2.1, the list kernel; it tries 48 launches of each kernel first."""
    from attnres import attnres

    return attnres(list(values), query.to(values[0].dtype), eps=eps)


def fla(values: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """flash-linear-attention 0.6, which recomputes the mix; full rank."""
    from fla.ops.attnres import fused_attnres

    query = query.to(values[0].dtype)
    return fused_attnres(query, list(values), torch.ones_like(query), rms_eps=eps)


def liger(values: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """Liger-Kernel 0.8, of stacked sources; full rank."""
    from liger_kernel.transformers.functional import liger_attn_res

    query = query.to(values[0].dtype)
    return liger_attn_res(torch.stack(list(values)), query, torch.ones_like(query), eps)


def flash_attn_res(values: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """flash-attn-res 0.1, phase 1 of stacked sources; full rank."""
    from flash_attn_res import phase_1_batched_attention_triton_op

    rows = torch.stack([value.unsqueeze(0) for value in values])
    query = query.to(values[0].dtype).unsqueeze(0)
    out, _ = phase_1_batched_attention_triton_op(rows, query, eps)
    return out[0, 0]


# the package that each needs, and whether it takes keys of a lower rank
PEERS: dict[str, tuple[SingleRead, str, bool]] = {
    "fast_attnres": (fast_attnres, "attnres", True),
    "fla": (fla, "fla", False),
    "liger": (liger, "liger_kernel", False),
    "flash_attn_res": (flash_attn_res, "flash_attn_res", False),
}


def installed(low_rank: bool) -> list[str]:
    """Return the peers that are here and take the keys."""
    return [
        name
        for name, (_, package, takes_low_rank) in PEERS.items()
        if importlib.util.find_spec(package) and (takes_low_rank or not low_rank)
    ]
