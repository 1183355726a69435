"""DDP and FSDP2 on two processes against one process: losses, gradients, steps, dtypes.

A pair of gloo processes runs this file over every case; the tests look at what it saved.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from depthroute.models import CausalLM
from depthroute.models.decoder import Checkpointing
from depthroute.nn import LowRankConfig
from depthroute.ops import use_backend
from depthroute.optim import OptimConfig, build_optimizers, parameter_groups
from depthroute.parallel import parallelize
from helpers import VARIANTS, assert_close, tiny_config, tiny_model

pytestmark = pytest.mark.dist

WORLD = 2
MODES = ("ddp", "fsdp")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"residual": residual} for name, residual in VARIANTS.items()},
    "tied": {"residual": VARIANTS["p_lr"], "tie_word_embeddings": True},
    "low_rank": {"residual": VARIANTS["p_lr"], "low_rank": LowRankConfig(rank=5)},
}
KERNEL_CASES = (("attn_res_block3", "fsdp"), ("p_lr", "fsdp"), ("s_lr", "ddp"))
IDS = torch.arange(48).view(4, 12) * 17 % 61
TARGETS = IDS.roll(-1, 1).where(torch.arange(4).unsqueeze(1) != 1, -100)  # ranks have unequal parts

Result = dict[str, Any]


def gradients(model: CausalLM, loss: Any, rank: int, world: int) -> Result:
    """Return the objective of a rank's rows, and its gradients as a whole."""
    rows = slice(rank * len(IDS) // world, (rank + 1) * len(IDS) // world)
    sums = loss(IDS[rows], TARGETS[rows], chunk_tokens=10)
    objective = (sums.cross_entropy + 0.1 * sums.squared_lse) / (TARGETS >= 0).sum()
    (world * objective).backward()
    total = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"objective": objective.detach(), "gradients": total}


def step(model: CausalLM, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Return the weights after a step."""
    for optimizer in optimizers:
        optimizer.step()
    return {name: whole(p) for name, p in model.named_parameters()}


def plain_descent(model: CausalLM) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01)]


def muon_and_adamw(model: CausalLM) -> list[Optimizer]:
    return build_optimizers(parameter_groups(model), OptimConfig())


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def run_rank(rank: int, folder: Path, run_all: Callable[[int], dict[Any, Result]]) -> None:
    """Run all cases on one of the two processes; rank 0 saves the results."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD
    )
    results = run_all(rank)
    if rank == 0:
        torch.save(results, folder / "results.pt")


def run_plain(rank: int) -> dict[Any, Result]:
    """Run every case in plain PyTorch."""
    results: dict[Any, Result] = {}
    for case, changes in CASES.items():
        for mode in MODES:
            for checkpointing in ("none", "depth_block"):
                model = tiny_model(**changes, dtype=torch.float64)
                model.model.checkpointing = checkpointing
                result = gradients(model, parallelize(model, mode, device="cpu"), rank, WORLD)
                dist.all_reduce(result["objective"])
                result["weights"] = step(model, plain_descent(model))
                results[case, mode, checkpointing] = result
            results[case, mode, "meta"] = initial_weights(changes, mode)
    for mode in MODES:
        model = tiny_model(**CASES["low_rank"], dtype=torch.float64)
        gradients(model, parallelize(model, mode, device="cpu"), rank, WORLD)
        results["optimizers", mode] = step(model, muon_and_adamw(model))
        results["bfloat16", mode] = run_in_bfloat16(mode, rank)
    return results


def run_kernels(rank: int) -> dict[Any, Result]:
    """Run the cases that have kernels of the block schedule, in Triton's interpreter."""
    results: dict[Any, Result] = {}
    with use_backend("triton"):
        for case, mode in KERNEL_CASES:
            model = tiny_model(VARIANTS[case], num_hidden_layers=2)
            model.model.checkpointing = "depth_block"
            loss = parallelize(model, mode, device="cpu")
            results[case, mode] = gradients(model, loss, rank, WORLD)
    return results


def initial_weights(changes: dict[str, Any], mode: Any) -> Result:
    with torch.device("meta"):
        model = CausalLM(tiny_config(**changes), seed=None)
    parallelize(model, mode, device="cpu")
    model.init_weights(3)
    return {name: whole(p) for name, p in model.named_parameters()}


def run_in_bfloat16(mode: Any, rank: int) -> Result:
    """Note, beside the gradients, which dtypes the last sublayer finds its and the scheme's in."""
    model = tiny_model(VARIANTS["p_lr"])
    model.model.compute_dtype = torch.bfloat16
    loss = parallelize(model, mode, device="cpu")
    seen: dict[str, torch.dtype] = {}

    def note(mlp: Any, inputs: Any) -> None:
        parameters = {"up": mlp.up_proj.weight, **dict(model.model.residual.named_parameters())}
        seen.update({name: parameter.dtype for name, parameter in parameters.items()})

    model.model.layers[-1].mlp.register_forward_pre_hook(note)
    return {**gradients(model, loss, rank, WORLD), "seen": seen}


def run_pair(folder: Path, what: str) -> dict[Any, Result]:
    """Start two processes that run the same cases, and return what they saved."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(rank), str(folder), what],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Result]:
    return run_pair(tmp_path_factory.mktemp("pair"), "plain")


def compare(ours: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0.0) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(ours[name], value, name, rtol)


@pytest.mark.parametrize("checkpointing", ["none", "depth_block"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_step_of_one(
    results: dict[Any, Result], case: str, mode: str, checkpointing: Checkpointing
) -> None:
    model = tiny_model(**CASES[case], dtype=torch.float64)
    expected, ours = gradients(model, model.loss, 0, 1), results[case, mode, checkpointing]
    assert_close(ours["objective"], expected["objective"])
    compare(ours["gradients"], expected["gradients"])
    compare(ours["weights"], step(model, plain_descent(model)))


@pytest.mark.parametrize("mode", MODES)
def test_our_optimizers_step_alike(results: dict[Any, Result], mode: str) -> None:
    model = tiny_model(**CASES["low_rank"], dtype=torch.float64)
    before = {name: whole(p) for name, p in model.named_parameters()}
    groups = parameter_groups(model)
    matrices = {name for g in groups if g.optimizer == "muon" for name in g.parameters}
    gradients(model, model.loss, 0, 1)
    expected, ours = step(model, muon_and_adamw(model)), results["optimizers", mode]
    for name, value in before.items():
        # Muon orthogonalises in bfloat16, where sharded products add in another order; measured
        # 6 % of the largest entry, and 1e-10 for the rest
        rtol = 0.1 if name in matrices else 1e-8
        assert_close(ours[name] - value, expected[name] - value, name, rtol)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_from_the_meta_device_starts_with_the_same_weights(
    results: dict[Any, Result], case: str, mode: str
) -> None:
    expected = dict(CausalLM(tiny_config(**CASES[case]), seed=3).named_parameters())
    ours = results[case, mode, "meta"]
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("mode", MODES)
def test_routing_stays_float32_when_the_layers_run_in_bfloat16(
    results: dict[Any, Result], mode: str
) -> None:
    ours = results["bfloat16", mode]
    routing = tiny_config(VARIANTS["p_lr"]).build_residual().state_dict()
    layers = torch.bfloat16 if mode == "fsdp" else torch.float32
    assert ours["seen"] == {"up": layers, **dict.fromkeys(routing, torch.float32)}
    model = tiny_model(VARIANTS["p_lr"])
    model.model.compute_dtype = torch.bfloat16
    expected = gradients(model, model.loss, 0, 1)
    for name, value in expected["gradients"].items():
        assert ours["gradients"][name].dtype == torch.float32
        assert_close(ours["gradients"][name], value, name, rtol=0.05)


@pytest.mark.kernel
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_under_both_modes_take_the_gradients_of_plain_pytorch(tmp_path: Path) -> None:
    for (case, _), ours in run_pair(tmp_path, "kernels").items():
        model = tiny_model(VARIANTS[case], num_hidden_layers=2)
        expected = gradients(model, model.loss, 0, 1)
        compare(ours["gradients"], expected["gradients"], rtol=1e-4)


def test_errors_say_what_is_wrong() -> None:
    model = tiny_model(VARIANTS["prenorm"])
    with pytest.raises(ValueError, match=r"mode must be one of .* got 'fsdp1'"):
        parallelize(model, "fsdp1", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parallelize needs a process group"):
        parallelize(model, "fsdp", device="cpu")


if __name__ == "__main__":
    what = {"plain": run_plain, "kernels": run_kernels}[sys.argv[3]]
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), what)
    # PyTorch keeps the process group of a mesh, destroyed or not. A thread of it that lets go of a
    # collective's tensors while the interpreter ends aborts the process.
    os._exit(0)
