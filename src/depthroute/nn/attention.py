"""The attention sublayer."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.nn.context import AttentionContext, Documents, OneLayer
from depthroute.nn.low_rank import LowRankConfig, build_projection
from depthroute.nn.norm import RMSNorm
from depthroute.nn.rope import rotate
from depthroute.ops.scores import accumulation_dtype

# one column would do, but kernels want head widths in multiples of 8
_NULL_COLUMNS = 8


class Attention(nn.Module):
    """Causal attention with grouped key/value heads, QK-norm and RoPE.

    Queries and keys are RMS-normalised per head, then rotated; the softmax scale is
    `1 / sqrt(head_dim)`.

    Args:
        dim: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Width of a head.
        norm_eps: Epsilon of the QK-norm; None leaves queries and keys as they are.
        emit_dim: Columns that the output projection emits for the residual scheme.
        low_rank: Low-rank maps in place of the projections in its scope.
        token_null: Run Softmax1 in place of the softmax, and append its null mass to the output:
            the mean over heads, one column after the emitted ones.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm_eps: float | None,
        emit_dim: int = 0,
        token_null: bool = False,
        low_rank: LowRankConfig | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.token_null = token_null
        build = partial(build_projection, low_rank=low_rank)
        self.q_proj = build("q", dim, heads * head_dim)
        self.k_proj = build("k", dim, kv_heads * head_dim)
        self.v_proj = build("v", dim, kv_heads * head_dim)
        self.o_proj = build("o", heads * head_dim, dim, emit_dim)
        self.qk_norm = nn.Identity() if norm_eps is None else RMSNorm(norm_eps)

    def forward(
        self, *inputs: Tensor, context: AttentionContext, cache: OneLayer | None = None
    ) -> Tensor:
        """Attend.

        Args:
            inputs: One `[B, T, D]` for queries, keys and values; or two (queries and keys,
                values); or three (queries, keys, values).
            context: Positions and documents.
            cache: Past tokens of this layer, which these continue and extend.

        Returns:
            `[B, T, D + emit_dim]`, and one more column with a token null.
        """
        for_q, for_k, for_v = inputs[0], inputs[-2:][0], inputs[-1]
        q = rotate(self.qk_norm(self._heads(self.q_proj(for_q))), context.rotation)
        k = rotate(self.qk_norm(self._heads(self.k_proj(for_k))), context.rotation)
        v = self._heads(self.v_proj(for_v))
        if cache is not None:
            k, v = cache.extend(k, v)
        if self.groups > 1:
            k = k.repeat_interleave(self.groups, dim=1)
            v = v.repeat_interleave(self.groups, dim=1)
        if not self.token_null:
            return self.o_proj(attend(q, k, v, context).transpose(1, 2).flatten(-2))
        out, null = attend_or_null(q, k, v, context)
        y = self.o_proj(out.transpose(1, 2).flatten(-2))
        null = null.mean(1, dtype=accumulation_dtype(null.dtype))
        return torch.cat([y, null.to(y.dtype).unsqueeze(-1)], dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        """View `[B, T, heads * head_dim]` as `[B, heads, T, head_dim]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, *, scale: float | None = None
) -> Tensor:
    """Compute causal softmax attention within documents.

    Args:
        q, k, v: `[B, heads, T, head_dim]` each; keys and values of a cache are longer.
        context: Says which keys a token sees.
        scale: Factor of the scores; None is `1 / sqrt(head_dim)`.

    Returns:
        `[B, heads, T, head_dim]`.
    """
    if context.attend is not None:
        return context.attend(q, k, v, context.mask, scale)
    if context.documents is not None:
        run = _attend_varlen if q.is_cuda else _attend_each
        return run(q, k, v, context.documents, scale)
    if context.mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def attend_or_null(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor]:
    """Compute causal Softmax1 attention within documents, and the mass that it withholds.

    `weight_j = exp(s_j) / (1 + sum_i exp(s_i))`. That is the softmax over one more key, a null
    token before each document: its query and key are zero, so its score is 0 for every token, and
    so is its value. One more column of the values is 1 for it and 0 for the others: there, `attend`
    returns the null mass, with all gradients and whatever the kernel.

    Args:
        q, k, v, context: As for `attend`.

    Returns:
        `out`: `[B, heads, T, head_dim]`. `null`: `1 / (1 + sum_i exp(s_i))`, `[B, heads, T]`, in
        the dtype of `out`.
    """
    width = q.shape[-1]
    if context.documents is not None:
        return _attend_or_null_each(q, k, v, context)
    if context.mask is not None:
        visible = float(context.mask.dtype == torch.bool)  # other masks are added to scores
        context = context._replace(mask=F.pad(context.mask, (1, 0, 1, 0), value=visible))
    q, k, v = (F.pad(x, (0, _NULL_COLUMNS, 1, 0)) for x in (q, k, v))
    v[:, :, 0, width].fill_(1.0)
    out = attend(q, k, v, context, scale=width**-0.5)[:, :, 1:]
    return out[..., :width], out[..., width]


def _attend_or_null_each(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor]:
    """Lay all documents in one row, each behind its null token."""
    batch, heads, tokens, width = q.shape
    bounds, longest = context.documents
    ids = context.documents.ids(batch * tokens)
    places = torch.arange(len(ids), device=q.device) + ids + 1
    bounds = bounds + torch.arange(len(bounds), dtype=bounds.dtype, device=q.device)
    rows = [
        x.new_zeros(heads, len(ids) + len(bounds) - 1, width + _NULL_COLUMNS) for x in (q, k, v)
    ]
    for row, x in zip(rows, (q, k, v), strict=True):
        row[:, places, :width] = x.transpose(0, 1).flatten(1, 2)
    rows[2][:, bounds[:-1], width] = 1.0
    context = context._replace(documents=Documents(bounds, longest + 1))
    out = attend(*(row.unsqueeze(0) for row in rows), context, scale=width**-0.5)
    out = out[0][:, places].unflatten(1, (batch, tokens)).transpose(0, 1)
    return out[..., :width], out[..., width]


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, _, tokens, _ = q.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    bounds, longest = documents.cu_seqlens, documents.max_seqlen
    out = varlen_attn(*flat, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """Run one call per document: exact, and on a CPU faster than a mask over long rows."""
    batch, _, tokens, _ = q.shape
    lengths = documents.lengths()
    parts = [x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v)]
    outs = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in part), is_causal=True, scale=scale
        )
        .squeeze(0)
        .transpose(0, 1)
        for part in zip(*parts, strict=True)
    ]
    return torch.cat(outs).unflatten(0, (batch, tokens)).transpose(1, 2)
