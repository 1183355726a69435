"""One model over several processes, each with its own rows of the batch: DDP or FSDP2."""

import warnings
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from depthroute.models import CausalLM
from depthroute.nn import Documents, LossSums

ParallelMode = Literal["ddp", "fsdp"]


def parallelize(
    model: CausalLM, mode: ParallelMode, *, device: torch.device | str
) -> Callable[..., LossSums]:
    """Spread a model over all processes and return what computes the loss of a rank's rows.

    `"ddp"` keeps a whole copy per rank. `"fsdp"` (FSDP2) shards the parameters, gathers those of a
    layer while it runs, in the model's `compute_dtype`, and reduces gradients in the dtype of the
    weights. Routing parameters are never cast.

    Gradients are averaged over the ranks. For the gradient of `sum / tokens` over the global batch,
    a rank's objective is `world_size * its sum / global tokens`.

    Args:
        model: Changed in place; with `compute_dtype` and `checkpointing` as they will be. On the
            meta device it gets memory without values: call `init_weights`, or load a checkpoint.
            Optimisers are built after this.
        mode: How.
        device: Of this rank.

    Returns:
        A function with the arguments and the result of `CausalLM.loss`. With `"ddp"`, calling
        `model` itself works and leaves gradients unreduced.

    Raises:
        ValueError: An unknown mode, or no process group.
    """
    if mode not in get_args(ParallelMode):
        raise ValueError(f"mode must be one of {get_args(ParallelMode)}, got {mode!r}")
    if not dist.is_initialized():
        raise ValueError(
            "parallelize needs a process group; call torch.distributed.init_process_group first"
        )
    device = torch.device(device)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if mode == "fsdp":
        _shard(model, device)
    elif not is_meta:
        model.to(device)
    if is_meta:
        model.to_empty(device=device)
    if mode == "fsdp":
        return model.loss
    return DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)


def _shard(model: CausalLM, device: torch.device) -> None:
    """Make units of the scheme, each layer, and at the root the embedding and the head.

    The scheme's parameters are used by `read` and `write`, between the layers, and the head's by
    the loss; both units stay whole from the forward pass to the end of the backward pass.
    """
    # layers hand sources on as they are, and nothing that a state holds is ever written in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    # the state keeps its own dtypes: casting inputs would round the scheme's float32 parts
    half = MixedPrecisionPolicy(
        param_dtype=model.model.compute_dtype,
        reduce_dtype=model.lm_head.weight.dtype,
        cast_forward_inputs=False,
    )
    fully_shard(model.model.residual, mesh=mesh, reshard_after_forward=False, mp_policy=whole)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=half)
    register_fsdp_forward_method(model, "loss")


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DDP prepares its reductions in."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        documents: Documents | None = None,
        chunk_tokens: int = 4096,
    ) -> LossSums:
        return self.model.loss(ids, targets, documents=documents, chunk_tokens=chunk_tokens)
