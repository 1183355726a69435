"""What several tests need."""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from depthroute.models import CausalLM, ModelConfig
from depthroute.residual import (
    AttnResConfig,
    DeltaConfig,
    DenseFormerConfig,
    DualConfig,
    FromValueKey,
    HyperConfig,
    LaurelConfig,
    MrlaConfig,
    MuddConfig,
    OasisConfig,
    PreNormConfig,
    ProjectedKey,
    Summary,
    TailKey,
    build_residual,
)
from depthroute.residual.attn_res import AttnRes, AttnResState

# One row per scheme, and one for each setting that changes its arithmetic. A new scheme adds a row.
VARIANTS: dict[str, Any] = {
    "prenorm": PreNormConfig(),
    "attn_res_full": AttnResConfig(num_blocks=0),
    "attn_res_block3": AttnResConfig(num_blocks=3),  # 8 writes in blocks of 3, 3, 2
    "attn_res_block1": AttnResConfig(num_blocks=1),
    "attn_res_uneven": AttnResConfig(block_ends=(1, 6, 8)),
    "s_lr": AttnResConfig(num_blocks=4, key=TailKey(rank=8)),
    "s_lr_full_norm": AttnResConfig(num_blocks=3, key=TailKey(rank=8, norm="full")),
    "p_lr_full": AttnResConfig(num_blocks=0, key=ProjectedKey(rank=8)),
    "p_lr": AttnResConfig(num_blocks=3, key=ProjectedKey(rank=8)),
    "p_lr_sum": AttnResConfig(num_blocks=3, key=ProjectedKey(rank=8, block="sum")),
    "from_value": AttnResConfig(num_blocks=3, key=FromValueKey(rank=8)),
    "summary": AttnResConfig(num_blocks=3, summary=Summary(alpha=0.5, beta=0.7)),
    "multi_head": AttnResConfig(num_blocks=0, heads=4),
    "multi_head_low_rank": AttnResConfig(num_blocks=3, heads=4, key=TailKey(rank=8)),
    "qk_v": AttnResConfig(num_blocks=3, roles="qk_v"),
    "q_k_v_heads": AttnResConfig(num_blocks=3, roles="q_k_v", heads=2, key=TailKey(rank=8)),
    "delta": DeltaConfig(num_blocks=0),
    "delta_full_gate_null": DeltaConfig(num_blocks=0, gate="sigmoid", null=True),
    "delta_block3": DeltaConfig(num_blocks=3),
    "delta_block3_gate_null": DeltaConfig(
        num_blocks=3, key=TailKey(rank=8), gate="scalar", null=True
    ),
    "delta_previous": DeltaConfig(
        block_ends=(1, 4, 6, 8),
        key=FromValueKey(rank=8),
        gate="scalar",
        recurrence="previous_entry",
    ),
    "denseformer": DenseFormerConfig(),
    "denseformer_2x2": DenseFormerConfig(dilation=2, period=2),
    "hc": HyperConfig(),
    "hc_static": HyperConfig(coefficients="static"),
    "mhc": HyperConfig(mixing="doubly_stochastic"),
    "mrla": MrlaConfig(head_dim=8),
    "mudd": MuddConfig(),
    "mudd_plain": MuddConfig(norm="none"),
    "dual": DualConfig(num_blocks=2),
    "dual_full": DualConfig(num_blocks=0),  # nothing to mix: every write closes its block
    "dual_uneven": DualConfig(block_ends=(1, 6, 8), keyed_by="own", rank=8),
    "dual_state": DualConfig(num_blocks=3, form="state"),
    "laurel": LaurelConfig(rank=4),
    "laurel_previous": LaurelConfig(balance="fixed", rank=0, previous=3, around="sublayer"),
    "laurel_all": LaurelConfig(rank=4, previous=2),
    "oasis_full": OasisConfig(num_blocks=0),
    "oasis_block3": OasisConfig(num_blocks=3, key=TailKey(rank=8)),
    "oasis_depth_null": OasisConfig(num_blocks=3, depth_null=True),
}

# torch's own: Dynamo (2.13) makes an instance of each autograd.Function that it traces, and looks
# at the gradient of tensors that have none
ignore_dynamo_warnings = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

# relative tolerance by dtype: a few hundred roundings of a sum over depth and width
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_close(
    actual: Tensor, expected: Tensor, name: str = "", rtol: float = 0.0, least: float = 1e-30
) -> None:
    """Compare by the largest error relative to the largest expected value, or to `least`."""
    rtol = rtol or RTOL[actual.dtype]
    assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
    if not actual.numel():
        return
    expected = expected.to(torch.float64)
    error = (actual.to(torch.float64) - expected).abs().max().item()
    bound = rtol * max(expected.abs().max().item(), least)
    assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"


def assert_all_close(
    actual: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str], rtol: float = 0.0
) -> None:
    """Compare several tensors by name."""
    for a, e, name in zip(actual, expected, names, strict=True):
        assert_close(a, e, name, rtol)


def tiny_config(residual: Any, **changes: Any) -> ModelConfig:
    """Return a decoder of 4 layers, 8 sublayers."""
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return ModelConfig(**{**shape, **changes}, residual=residual)


def tiny_model(
    residual: Any, *, dtype: torch.dtype = torch.float32, noise: float = 0.5, **changes: Any
) -> CausalLM:
    """Return a small model whose routing parameters are `noise` away from their start.

    0.5 makes routing sharp, so that it matters, and the model chaotic in bfloat16: there, take 0.1.
    """
    model = CausalLM(tiny_config(residual, **changes)).to(dtype)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.residual.parameters():
            draw = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_(noise * draw)
    return model


def literal_read(
    values: Tensor,
    query: Tensor,
    *,
    keys: Tensor | None = None,
    heads: int = 1,
    key_norm: str = "tail",
    eps: float = 1e-6,
    scale: float = 1.0,
    bias: Tensor | None = None,
    null: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a depth read from its formula, one query, token and head at a time, in float64.

    Takes values `[S, *b, D]`, keys `[S, *b, R]`, a query `[Q, R]`, a bias `[Q, S, *b]` and a null
    logit `[Q, H]`; returns out `[Q, *b, D]`, lse `[Q, *b, H]` and weights `[Q, S, *b, H]`.
    """
    batch, width, (num_queries, rank) = values.shape[1:-1], values.shape[-1], query.shape
    v = values.double().reshape(len(values), -1, width)
    k = v[..., width - rank :] if keys is None else keys.double().reshape(len(v), -1, rank)
    b = None if bias is None else bias.double().reshape(num_queries, len(v), -1)
    out, lse, weights = [], [], []
    for q, n, h in product(range(num_queries), range(v.shape[1]), range(heads)):
        cut = slice(h * rank // heads, (h + 1) * rank // heads)
        logits = []
        for s in range(len(v)):
            under = {"tail": k[s, n], "full": v[s, n], "none": None}[key_norm]
            rms = 1.0 if under is None else ((under**2).sum() / len(under) + eps).sqrt()
            logit = scale * (query[q, cut].double() * k[s, n, cut] / rms).sum()
            logits.append(logit if b is None else logit + b[q, s, n])
        if null is not None:
            logits.append(null[q, h].double())
        z = torch.stack(logits)
        w = (z - z.max()).exp() / (z - z.max()).exp().sum()
        columns = slice(h * width // heads, (h + 1) * width // heads)
        out.append(sum(w[s] * v[s, n, columns] for s in range(len(v))))
        lse.append(z.max() + (z - z.max()).exp().sum().log())
        weights.append(w[: len(v)])
    return (
        torch.cat(out).view(num_queries, *batch, width),
        torch.stack(lse).view(num_queries, *batch, heads),
        torch.stack(weights, -1).view(len(v), num_queries, *batch, heads).transpose(0, 1),
    )


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradient of `sum <output, upstream>` for every input, zeros where it is unused."""
    return list(
        torch.autograd.grad(outputs, inputs, upstream, allow_unused=True, materialize_grads=True)
    )


class Step(NamedTuple):
    """One site of a pass: the state before the read, what was read, and what was written."""

    site: int
    state: Any
    inputs: tuple[Tensor, ...]
    written: Tensor | None  # None at the last site, whose read feeds the head


class ToyModel(nn.Module):
    """A scheme over sublayers `tanh(W h)` without attention; routing is away from zero."""

    def __init__(self, config: Any, *, dim: int = 16, num_sublayers: int = 8) -> None:
        super().__init__()
        kinds = ("attention", "mlp") * (num_sublayers // 2)
        self.residual = build_residual(config, dim=dim, kinds=kinds)
        width = dim + self.residual.emit_dim
        with_null = self.residual.token_null
        self.has_null = tuple(with_null and kind == "attention" for kind in kinds)
        self.sublayers = nn.ParameterList(
            torch.randn(width + null, dim) * (2.0 / dim) ** 0.5 for null in self.has_null
        )
        # logits of order one: a softmax of large ones turns roundings into errors of any size
        for parameter in self.residual.parameters():
            nn.init.normal_(parameter, std=min(0.5, 2.0 / max(1, parameter.shape[-1]) ** 0.5))

    def sublayer(self, site: int, inputs: tuple[Tensor, ...]) -> Tensor:
        h = sum(inputs)
        y = h @ self.sublayers[site].to(h.dtype).T
        if not self.has_null[site]:
            return torch.tanh(y)
        return torch.cat([y[..., :-1].tanh(), y[..., -1:].sigmoid()], dim=-1)  # a mass, 0 to 1

    def resume(
        self, state: Any, site: int, norm: Callable[[Tensor], Tensor] = torch.clone
    ) -> Iterator[Step]:
        """Run from the read at `site` to the end."""
        for t in range(site, len(self.sublayers)):
            inputs, after = self.residual.read(state, t, norm)
            written = self.sublayer(t, inputs)
            yield Step(t, self.residual.settle(state), inputs, written)
            state = self.residual.write(after, t, written)
        hidden = self.residual.finish(state, norm)
        yield Step(len(self.sublayers), self.residual.settle(state), (hidden,), None)

    def steps(self, x: Tensor) -> list[Step]:
        return list(self.resume(self.residual(x), 0))

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.resume(self.residual(x), 0)
        return last.inputs[0]


def before_phase_1(scheme: AttnRes, state: AttnResState, site: int) -> AttnResState:
    """Return a settled state whose next read, at `site`, goes over the sources with its queries."""
    return state._replace(ahead=None, queries=(scheme.query[scheme.starts[site] :],))


def assert_same_gradients(module: nn.Module, actual: Tensor, expected: Tensor) -> None:
    """Compare what two float64 results, made by the same parameters, give each of them."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    upstream = torch.randn_like(expected)
    got, want = (torch.autograd.grad(x, parameters, upstream) for x in (actual, expected))
    assert_all_close(got, want, names, rtol=1e-9)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow, which the system refuses as it does where a disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
