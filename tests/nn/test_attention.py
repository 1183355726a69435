"""Attention, rotary positions and document boundaries against their formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.nn import Attention, AttentionContext, Documents, KVCache
from depthroute.nn.attention import attend, attend_or_null
from depthroute.nn.context import attention_context
from depthroute.nn.rope import rotate, rotation
from helpers import assert_close

THETA = 100.0


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def document_of(bounds: list[int], batch: int, tokens: int) -> list[list[int]]:
    """Return the number of each token's document, counted token by token."""
    flat = [sum(bound <= t for bound in bounds) for t in range(batch * tokens)]
    return [flat[row * tokens : (row + 1) * tokens] for row in range(batch)]


@torch.no_grad()
def literal(q: Tensor, k: Tensor, v: Tensor, ids: list[list[int]]) -> Tensor:
    """Attend from each token to the earlier ones of its document; the softmax is written out."""
    batch, heads, tokens, width = q.shape
    out = torch.zeros_like(v)
    for b in range(batch):
        for t in range(tokens):
            seen = [s for s in range(t + 1) if ids[b][s] == ids[b][t]]
            for h in range(heads):
                score = [math.exp(float(q[b, h, t] @ k[b, h, s]) / width**0.5) for s in seen]
                for s, weight in zip(seen, score, strict=True):
                    out[b, h, t] += weight / sum(score) * v[b, h, s]
    return out


# the kernel call


BOUNDS = {
    "one_row_each": [0, 9, 18],
    "single_tokens": [0, 1, 2, 9, 17, 18],
    "padded": [0, 4, 4, 9, 15, 18, 18, 18],
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("way", ["mask", "each"])
def test_documents_are_kept_apart(way: str, bounds: list[int]) -> None:
    q, k, v = (double(2, 3, 9, 4) for _ in range(3))
    documents = Documents(torch.tensor(bounds, dtype=torch.int32), 9)
    context = attention_context(double(2, 9, 12), head_dim=4, theta=THETA, documents=documents)
    assert context.mask is not None
    if way == "each":
        context = AttentionContext(context.rotation, documents=documents)
    expected = literal(q, k, v, document_of(bounds[1:], 2, 9))
    assert_close(attend(q, k, v, context), expected)


def test_without_documents_a_row_is_one() -> None:
    q, k, v = (double(2, 3, 7, 4) for _ in range(3))
    context = attention_context(double(2, 7, 12), head_dim=4, theta=THETA)
    assert_close(attend(q, k, v, context), literal(q, k, v, [[0] * 7] * 2))


def test_long_rows_run_document_by_document_and_equal_the_mask() -> None:
    bounds = torch.tensor([0, 1, 150, 257, 514], dtype=torch.int32)
    q, k, v = (double(2, 2, 257, 4).requires_grad_() for _ in range(3))
    long = attention_context(
        double(2, 257, 8), head_dim=4, theta=THETA, documents=Documents(bounds, 257)
    )
    assert long.mask is None
    ids = torch.tensor(document_of(bounds.tolist()[1:], 2, 257))
    same = (ids.unsqueeze(-1) == ids.unsqueeze(-2)).tril().unsqueeze(1)
    outs = [attend(q, k, v, context) for context in (long, AttentionContext(long.rotation, same))]
    assert_close(*outs)
    gradient = double(2, 2, 257, 4)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), gradient) for out in outs), strict=True):
        assert_close(a, b)


def test_document_numbers_and_lengths_skip_padding() -> None:
    documents = Documents(torch.tensor([0, 2, 2, 5, 6, 6], dtype=torch.int32), 3)
    ids = documents.ids(6).tolist()
    assert [ids[t] == ids[t + 1] for t in range(5)] == [True, False, True, True, False]
    assert documents.lengths() == [2, 3, 1]


# Softmax1


def literal_or_null(q: Tensor, k: Tensor, v: Tensor, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Divide by one more than the sum of the exponentials; differentiable."""
    batch, heads, tokens, width = q.shape
    out, null = torch.zeros_like(v), v.new_zeros(batch, heads, tokens)
    for b in range(batch):
        for t in range(tokens):
            seen = [s for s in range(t + 1) if ids[b][s] == ids[b][t]]
            for h in range(heads):
                score = torch.exp(k[b, h, seen] @ q[b, h, t] / width**0.5)
                out[b, h, t] = score @ v[b, h, seen] / (1 + score.sum())
                null[b, h, t] = 1 / (1 + score.sum())
    return out, null


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("way", ["whole_rows", "mask", "each"])
def test_softmax1_and_its_gradients_equal_the_formula(way: str, bounds: list[int]) -> None:
    q, k, v = (double(2, 3, 9, 4).requires_grad_() for _ in range(3))
    documents = Documents(torch.tensor(bounds, dtype=torch.int32), 9)
    context = attention_context(double(2, 9, 12), head_dim=4, theta=THETA, documents=documents)
    ids = document_of(bounds[1:], 2, 9)
    if way == "each":
        context = AttentionContext(context.rotation, documents=documents)
    elif way == "whole_rows":
        context, ids = AttentionContext(context.rotation), [[0] * 9] * 2
    actual, expected = attend_or_null(q, k, v, context), literal_or_null(q, k, v, ids)
    upstream = [torch.randn_like(x) for x in expected]
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
    # of the output, of the null mass alone, and of both
    for first, last in ((0, 1), (1, 2), (0, 2)):
        got, want = (
            torch.autograd.grad(
                x[first:last], (q, k, v), upstream[first:last], retain_graph=True, allow_unused=True
            )
            for x in (actual, expected)
        )
        for name, a, e in zip("qkv", got, want, strict=True):
            assert_close(a, torch.zeros_like(a) if e is None else e, name)


def test_softmax1_is_the_softmax_times_the_mass_that_its_lse_leaves() -> None:
    q, k, v = (double(1, 2, 5, 4) for _ in range(3))
    context = AttentionContext(rotation(torch.arange(5), 4, THETA, torch.float64))
    scores = q @ k.mT / 2
    lse = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf).logsumexp(-1)
    out, null = attend_or_null(q, k, v, context)
    assert_close(null, torch.sigmoid(-lse))
    assert_close(out, torch.sigmoid(lse).unsqueeze(-1) * attend(q, k, v, context))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shift", "mass"), [(-90.0, 1.0), (0.0, 1 / 4), (math.log(2.0), 1 / 7), (90.0, 0.0)]
)
def test_a_shift_of_all_scores_moves_the_null_mass(
    shift: float, mass: float, dtype: torch.dtype
) -> None:
    q, k = torch.zeros(1, 1, 3, 4, dtype=dtype), torch.zeros(1, 1, 3, 4, dtype=dtype)
    q[..., 0], k[..., 0] = 2.0, shift
    v = torch.ones(1, 1, 3, 4, dtype=dtype)
    context = AttentionContext(rotation(torch.arange(3), 4, THETA, torch.float32))
    out, null = attend_or_null(q, k, v, context)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert null.dtype == out.dtype == dtype
    assert abs(null[0, 0, 2].item() - mass) < tolerance
    assert abs(out[0, 0, 2, 0].item() - (1 - mass)) < tolerance


def test_a_small_null_mass_keeps_its_relative_precision_in_bfloat16() -> None:
    """Read off as a mass, not as 1 minus the others' sum, of which nothing would be left."""
    q = torch.full((1, 1, 1, 1), 10.0, dtype=torch.bfloat16)
    context = AttentionContext(rotation(torch.arange(1), 2, THETA, torch.float32))
    _, null = attend_or_null(q, torch.ones_like(q), torch.ones_like(q), context)
    assert abs(null.item() / (1 / (1 + math.exp(10.0))) - 1) < 2**-7


# the sublayer


def build(
    *,
    kv_heads: int = 4,
    head_dim: int = 6,
    eps: float | None = 1e-6,
    emit: int = 0,
    null: bool = False,
) -> Attention:
    layer = Attention(
        dim=10,
        heads=4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=eps,
        emit_dim=emit,
        token_null=null,
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@torch.no_grad()
def literal_sublayer(layer: Attention, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Project, norm, rotate as complex numbers, attend, project back."""
    parts = []
    for x, name in zip(inputs, "qkv", strict=True):
        y = x @ getattr(layer, f"{name}_proj").weight.T
        y = torch.stack(y.split(layer.head_dim, dim=-1), dim=1)  # [B, heads, T, head_dim]
        if name != "v" and not isinstance(layer.qk_norm, torch.nn.Identity):
            y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        if name != "v":
            y = turned(y)
        # query heads 2j and 2j + 1 share key head j where there are half as many
        parts.append(torch.stack([y[:, h * y.shape[1] // 4] for h in range(4)], dim=1))
    ids = [[0] * inputs[0].shape[1]] * len(inputs[0])
    weight = torch.cat(list(layer.o_proj.parameters()))
    if not layer.token_null:
        return torch.cat(literal(*parts, ids).unbind(1), dim=-1) @ weight.T
    out, null = literal_or_null(*parts, ids)
    y = torch.cat(out.unbind(1), dim=-1) @ weight.T
    return torch.cat([y, null.mean(1).unsqueeze(-1)], dim=-1)


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    angle = torch.tensor(
        [[t * THETA ** (-j / half) for j in range(half)] for t in range(x.shape[-2])],
        dtype=torch.float64,
    )
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"kv_heads": 2},
        {"kv_heads": 1},
        {"eps": None},
        {"head_dim": 2},
        {"emit": 3},
        {"null": True},
        {"null": True, "kv_heads": 2, "emit": 3},
    ],
    ids=str,
)
def test_sublayer_equals_its_formula(layer: dict[str, Any]) -> None:
    attention, x = build(**layer), double(2, 5, 10)
    context = attention_context(x, head_dim=attention.head_dim, theta=THETA)
    y = attention(x, context=context)
    assert y.shape == (2, 5, 10 + layer.get("emit", 0) + layer.get("null", False))
    assert_close(y, literal_sublayer(attention, (x, x, x)))


@pytest.mark.parametrize("null", [False, True], ids=["softmax", "softmax1"])
def test_sublayer_continues_from_a_cache(null: bool) -> None:
    attention, x = build(kv_heads=2, null=null), double(2, 7, 10)
    cache = KVCache(1, 2, 2, 7, 6, dtype=torch.float64, device=torch.device("cpu"))
    parts = []
    for part in x.split([3, 1, 2, 1], dim=1):
        context = attention_context(part, head_dim=6, theta=THETA, cache=cache)
        parts.append(attention(part, context=context, cache=cache.layer(0)))
        cache.advance(part.shape[1])
    assert_close(torch.cat(parts, dim=1), literal_sublayer(attention, (x, x, x)))


@pytest.mark.parametrize("roles", [(0, 0, 1), (0, 1, 2)], ids=["qk_v", "q_k_v"])
def test_inputs_by_role(roles: tuple[int, int, int]) -> None:
    attention = build(kv_heads=2)
    inputs = [double(2, 5, 10) for _ in range(roles[-1] + 1)]
    context = attention_context(inputs[0], head_dim=6, theta=THETA)
    expected = literal_sublayer(attention, tuple(inputs[role] for role in roles))
    assert_close(attention(*inputs, context=context), expected)


def test_cache_keeps_the_rows_and_order_of_its_tokens() -> None:
    cache = KVCache(2, 2, 3, 5, 4, dtype=torch.float64, device=torch.device("cpu"))
    parts = [double(2, 3, n, 4) for n in (2, 1, 2)]
    for count, part in enumerate(parts, 1):
        for layer in range(2):
            sign = 1 - 2 * layer  # layers do not mix
            key, value = cache.layer(layer).extend(sign * part, sign * 10 * part)
            seen = sign * torch.cat(parts[:count], dim=2)
            assert torch.equal(key, seen)
            assert torch.equal(value, 10 * seen)
        cache.advance(part.shape[2])
    assert cache.length == cache.capacity == 5


# rotary positions


def test_scores_depend_on_the_distance_only() -> None:
    q, k = double(8), double(8)

    def score(at_q: int, at_k: int) -> Tensor:
        by_q, by_k = (rotation(torch.tensor([at]), 8, THETA, torch.float64) for at in (at_q, at_k))
        return (rotate(q.view(1, 1, 1, 8), by_q) * rotate(k.view(1, 1, 1, 8), by_k)).sum()

    assert_close(score(7, 3), score(1007, 1003))
    assert_close(score(5, 5), q @ k)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


@pytest.mark.parametrize("theta", [100.0, 500_000.0])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_angles_are_exact_at_any_position(position: int, theta: float) -> None:
    by = rotation(torch.tensor([position]), 6, theta, torch.float32)
    assert by.cos.dtype == by.sin.dtype == torch.float32
    angle = [position * theta ** (-2 * j / 6) for j in range(3)]
    for actual, function in ((by.cos, math.cos), (by.sin, math.sin)):
        expected = torch.tensor([function(a) for a in angle], dtype=torch.float64)
        assert (actual.double().view(3) - expected).abs().max() < 1e-7


def test_positions_may_differ_by_row() -> None:
    positions = torch.tensor([[0, 1, 2], [5, 6, 9]])
    by = rotation(positions, 4, THETA, torch.float64)
    assert by.cos.shape == (2, 1, 3, 2)
    for row in range(2):
        alone = rotation(positions[row], 4, THETA, torch.float64)
        assert torch.equal(by.cos[row], alone.cos[0])
        assert torch.equal(by.sin[row], alone.sin[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotation_keeps_dtype_and_length(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 8, dtype=dtype)
    y = rotate(x, rotation(torch.arange(5), 8, THETA, torch.float32))
    assert y.dtype == dtype
    # float32 angles, whatever the input
    rtol = 1.6e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=rtol)
    assert torch.equal(y[:, :, 0], x[:, :, 0])


def test_context_computes_angles_for_the_dtype_of_its_input() -> None:
    for dtype, wide in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        context = attention_context(torch.zeros(1, 3, 8, dtype=dtype), head_dim=4, theta=THETA)
        assert context.rotation.cos.dtype == wide
