"""What only a CUDA device can show: compiled gradients, variable-length attention, training."""

import pytest
import torch
from torch import Tensor

from depthroute.models.compile import compile_model
from depthroute.nn import Documents
from depthroute.nn.attention import attend, attend_or_null
from depthroute.nn.context import AttentionContext, attention_context
from depthroute.ops import depth_attend, depth_merge
from depthroute.ops.reference import depth_attend_reference
from helpers import RTOL, VARIANTS, assert_all_close, assert_close, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own compiler warns about settings that do not concern us
    pytest.mark.filterwarnings("default"),
]

DEVICE = "cuda"


def two_phases(values: list[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = depth_attend(values[:-1], query, out_dtype=torch.float32)
    return depth_merge(out, lse, values[-1], query)


def gradients(read, values: list[Tensor], query: Tensor, upstream: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in [*values, query]]
    out, lse = read(leaves[:-1], leaves[-1])
    grads = torch.autograd.grad([out, lse.sum()], leaves, [upstream.to(out.dtype), None])
    return [out.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("num_sources", [2, 9])
def test_reads_and_gradients_equal_the_float64_oracle(dtype, compiled, num_sources):
    values = [torch.randn(3, 37, 200, device=DEVICE).to(dtype) for _ in range(num_sources)]
    query = torch.randn(4, 72, device=DEVICE)
    upstream = torch.randn(4, 3, 37, 200, device=DEVICE).to(dtype).double()
    names = ["out", *(f"value {i}" for i in range(num_sources)), "query"]
    wide = [x.double() for x in values]
    expected = gradients(depth_attend_reference, wide, query.double(), upstream)
    for read in (depth_attend, two_phases):
        run = torch.compile(read, fullgraph=True) if compiled else read
        actual = gradients(run, values, query, upstream)
        assert_all_close(actual, expected, names, rtol=max(RTOL[dtype], 2e-5))


def test_variable_length_attention_equals_a_mask():
    q, k, v = (torch.randn(2, 4, 64, 32, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    bounds = torch.tensor([0, 1, 20, 64, 100, 128, 128, 128], dtype=torch.int32, device=DEVICE)
    documents = Documents(bounds, 64)
    x = torch.empty(2, 64, 128, device=DEVICE)
    masked = attention_context(x, head_dim=32, theta=1e4, documents=documents)
    assert masked.mask is not None
    rotation = masked.rotation
    expected = attend(q.float(), k.float(), v.float(), AttentionContext(rotation, masked.mask))
    actual = attend(q, k, v, AttentionContext(rotation, documents=documents))
    assert_close(actual, expected)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_variable_length_softmax1_and_its_gradients_equal_a_mask(head_dim):
    shape = (2, 4, 64, head_dim)
    leaves = [torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]
    bounds = torch.tensor([0, 1, 20, 64, 100, 128, 128, 128], dtype=torch.int32, device=DEVICE)
    documents = Documents(bounds, 64)
    x = torch.empty(2, 64, 128, device=DEVICE)
    masked = attention_context(x, head_dim=head_dim, theta=1e4, documents=documents)
    varlen = AttentionContext(masked.rotation, documents=documents)
    actual = attend_or_null(*leaves, varlen)
    expected = attend_or_null(*(leaf.float() for leaf in leaves), masked)
    upstream = [torch.randn_like(y) for y in expected]
    assert_all_close(actual, expected, ["out", "null"])
    got = torch.autograd.grad(actual, leaves, [u.bfloat16() for u in upstream])
    want = torch.autograd.grad(expected, leaves, upstream)
    assert_all_close(got, want, ["q", "k", "v"], rtol=0.03)


def loss_and_gradients(model, ids: Tensor, documents: Documents) -> list[Tensor]:
    sums = model.loss(ids, ids.roll(-1, 1), documents=documents, chunk_tokens=50)
    loss = sums.cross_entropy / sums.tokens
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("mode", ["sublayer", "model"])
@pytest.mark.parametrize(
    "name", ["prenorm", "attn_res_full", "attn_res_block3", "s_lr", "p_lr", "oasis_block3"]
)
def test_compiled_model_has_the_gradients_of_float32(name, mode):
    torch._dynamo.reset()
    ids = torch.randint(61, (2, 64), device=DEVICE)
    documents = Documents(torch.tensor([0, 30, 64, 128], dtype=torch.int32, device=DEVICE), 64)
    model = tiny_model(VARIANTS[name], noise=0.1, hidden_size=64, num_attention_heads=2).to(DEVICE)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    expected = loss_and_gradients(model, ids, documents)
    compile_model(model, mode)
    model.model.compute_dtype = torch.float32
    assert_all_close(loss_and_gradients(model, ids, documents), expected, names, rtol=2e-3)
    model.model.compute_dtype = torch.bfloat16
    actual = loss_and_gradients(model, ids, documents)
    for got, want, parameter in zip(actual, expected, names, strict=True):
        error = (got - want).norm() / want.norm().clamp_min(1e-12)
        assert error < 0.05, f"{parameter}: {error:.3f}"  # eager on a CPU: up to 0.026
