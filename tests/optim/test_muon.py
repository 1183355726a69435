import pytest
import torch
from torch import Tensor, nn

from depthroute.optim import Group, MuonConfig, OptimConfig, build_optimizers, parameter_groups
from helpers import VARIANTS, assert_close, tiny_model

# five bf16 Newton-Schulz iterations of this polynomial leave singular values in about [0.7, 1.2]
SINGULAR_VALUES = (0.6, 1.3)


def update(*grads: Tensor, **settings) -> Tensor:
    """Return how far the last of several steps moves a zero matrix, per unit of learning rate."""
    weight = nn.Parameter(torch.zeros_like(grads[0]))
    config = OptimConfig(muon=MuonConfig(**{"lr": 1.0, "weight_decay": 0.0, **settings}))
    groups = [Group("sublayer matrices", "muon", True, {"w": weight})]
    (optimizer,) = build_optimizers(groups, config)
    for grad in grads:
        before = weight.detach().clone()
        weight.grad = grad.clone()
        optimizer.step()
    return before - weight.detach()


def spread(shape: tuple[int, int]) -> Tensor:
    """Return a random matrix with singular values from 0.2 to 1."""
    u, s, vt = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    return u * torch.linspace(0.2, 1.0, len(s)) @ vt


def assert_near_polar(actual: Tensor, matrix: Tensor, scale: float = 1.0) -> None:
    """Check singular vectors closely, singular values within what the iteration promises."""
    u, _, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    inner = u.T @ (actual.double() / scale) @ vt.T
    low, high = SINGULAR_VALUES
    assert inner.diag().min() > low
    assert inner.diag().max() < high
    assert (inner - inner.diag().diag()).abs().max() < 0.05
    expected = u @ vt
    cosine = (actual.double() * expected).sum() / actual.double().norm() / expected.norm()
    assert cosine > 0.95


@pytest.mark.parametrize(
    ("shape", "scale"), [((24, 24), 1.0), ((48, 12), 2.0), ((12, 48), 1.0), ((27, 12), 1.5)]
)
def test_update_is_the_polar_factor_times_root_of_rows_over_columns(shape, scale):
    grad = spread(shape)
    assert_near_polar(update(grad), grad, scale)


def test_rms_matching_differs_by_a_factor_of_the_shape_alone():
    grad = torch.randn(48, 12)
    ratio = 0.2 * 48**0.5 / 2.0
    assert_close(update(grad, adjust_lr="match_rms_adamw"), ratio * update(grad))


def test_second_update_follows_the_nesterov_average():
    first, second = torch.randn(12, 48), torch.randn(12, 48)
    average = 0.9 * (0.1 * first) + 0.1 * second
    lookahead = 0.9 * average + 0.1 * second
    assert_near_polar(update(first, second, momentum=0.9), lookahead)


def test_more_iterations_leave_the_directions():
    grad = spread((16, 16))
    assert not torch.equal(update(grad, ns_steps=4), update(grad))
    assert_near_polar(update(grad, ns_steps=8), grad)


def test_emitted_rows_step_like_a_matrix_of_their_own():
    model = tiny_model(VARIANTS["p_lr"])
    projection = model.model.layers[1].mlp.down_proj
    parts = (projection.weight, projection.emit_weight)
    before = [part.detach().clone() for part in parts]
    # gradients of keys are far smaller than those of values, at the start above all
    grads = [torch.randn(parts[0].shape), 0.001 * torch.randn(parts[1].shape)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for part, grad in zip(parts, grads, strict=True):
        part.grad = grad.clone()
    config = OptimConfig(muon=MuonConfig(lr=0.1, weight_decay=0.3))
    for optimizer in build_optimizers(parameter_groups(model), config):
        optimizer.step()

    def alone(start: Tensor, grad: Tensor) -> Tensor:
        weight = nn.Parameter(start.clone())
        weight.grad = grad.clone()
        torch.optim.Muon([weight], lr=0.1, weight_decay=0.3).step()
        return weight.detach()

    for part, start, grad in zip(parts, before, grads, strict=True):
        assert_close(part.detach(), alone(start, grad))
    fused = alone(torch.cat(before), torch.cat(grads))[len(before[0]) :]
    shrunk = before[1] * (1 - 0.1 * 0.3)
    fused_rms, rms = ((x.detach() - shrunk).square().mean().sqrt() for x in (fused, parts[1]))
    assert fused_rms < 0.3 * rms  # as rows of one matrix they would starve


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-30, 1.0])
@pytest.mark.parametrize("rank", [1, 16])
def test_degenerate_gradients_give_bounded_updates(scale, rank):
    grad = scale * torch.randn(16, rank) @ torch.randn(rank, 24)
    moved = update(grad, grad)
    assert moved.isfinite().all()
    assert torch.linalg.matrix_norm(moved, 2) < SINGULAR_VALUES[1]
    if scale == 0.0:
        assert not moved.any()
