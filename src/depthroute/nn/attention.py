"""The attention sublayer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.nn.context import AttentionContext, Documents
from depthroute.nn.linear import Linear, OutProjection
from depthroute.nn.norm import RMSNorm
from depthroute.nn.rope import rotate


class Attention(nn.Module):
    """Causal attention with grouped key/value heads, QK-norm and RoPE.

    Queries and keys are RMS-normalised per head, then rotated; the softmax scale is
    `1 / sqrt(head_dim)`.

    Args:
        layer: Index of the layer, its place in a cache.
        dim: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Width of a head.
        norm_eps: Epsilon of the QK-norm; None leaves queries and keys as they are.
        emit_dim: Columns that the output projection emits for the residual scheme.
    """

    def __init__(
        self,
        *,
        layer: int,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm_eps: float | None,
        emit_dim: int = 0,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.groups = layer, head_dim, heads // kv_heads
        self.q_proj = Linear(dim, heads * head_dim)
        self.k_proj = Linear(dim, kv_heads * head_dim)
        self.v_proj = Linear(dim, kv_heads * head_dim)
        self.o_proj = OutProjection(heads * head_dim, dim, emit_dim)
        self.qk_norm = nn.Identity() if norm_eps is None else RMSNorm(norm_eps)

    def forward(self, *inputs: Tensor, context: AttentionContext) -> Tensor:
        """Attend.

        Args:
            inputs: One `[B, T, D]` for queries, keys and values; or two (queries and keys,
                values); or three (queries, keys, values).
            context: Positions, documents and cache.

        Returns:
            `[B, T, D + emit_dim]`.
        """
        for_q, for_k, for_v = inputs[0], inputs[-2:][0], inputs[-1]
        q = rotate(self.qk_norm(self._heads(self.q_proj(for_q))), context.rotation)
        k = rotate(self.qk_norm(self._heads(self.k_proj(for_k))), context.rotation)
        v = self._heads(self.v_proj(for_v))
        if context.attend is not None:
            return self.o_proj(context.attend(self.layer, q, k, v).flatten(-2))
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        if self.groups > 1:
            k = k.repeat_interleave(self.groups, dim=1)
            v = v.repeat_interleave(self.groups, dim=1)
        return self.o_proj(attend(q, k, v, context).transpose(1, 2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        """View `[B, T, heads * head_dim]` as `[B, heads, T, head_dim]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """Compute causal softmax attention within documents, `[B, heads, T, head_dim]` each."""
    if context.documents is not None:
        run = _attend_varlen if q.is_cuda else _attend_each
        return run(q, k, v, context.documents)
    if context.mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, _, tokens, _ = q.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    bounds, longest = documents.cu_seqlens, documents.max_seqlen
    out = varlen_attn(*flat, bounds, bounds, longest, longest, window_size=(-1, 0))
    return out.unflatten(0, (batch, tokens)).transpose(1, 2)


def _attend_each(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Run one call per document: exact, and on a CPU faster than a mask over long rows."""
    batch, _, tokens, _ = q.shape
    lengths = documents.lengths()
    parts = [x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v)]
    outs = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in part), is_causal=True
        )
        .squeeze(0)
        .transpose(0, 1)
        for part in zip(*parts, strict=True)
    ]
    return torch.cat(outs).unflatten(0, (batch, tokens)).transpose(1, 2)
