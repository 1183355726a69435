"""Settings of a training run."""

from typing import Literal

import torch

from depthroute.config import config_dataclass
from depthroute.models import ModelConfig
from depthroute.models.compile import CompileMode
from depthroute.models.decoder import Checkpointing
from depthroute.optim import OptimConfig

Device = Literal["auto", "cpu", "cuda"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]


def placement(device: Device, compute_dtype: ComputeDtype) -> tuple[torch.device, torch.dtype]:
    """Return a device and a compute dtype on this machine.

    Args:
        device: "auto" takes CUDA if there is one.
        compute_dtype: "auto" is bfloat16 on CUDA, float32 elsewhere.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    cuda = torch.cuda.is_available()
    name = device if device != "auto" else "cuda" if cuda else "cpu"
    if name == "cuda" and not cuda:
        raise ValueError('device is "cuda" but torch sees no CUDA device')
    if compute_dtype == "auto":
        compute_dtype = "bfloat16" if name == "cuda" else "float32"
    return torch.device(name), getattr(torch, compute_dtype)


@config_dataclass
class DataConfig:
    """What a run reads.

    Args:
        path: Folder that `depthroute prepare` made.
        context: T, tokens per window, >= 1.
        mask_documents: Keep attention within documents.
        val_tokens: Size of the fixed validation set, rounded down to whole windows.
    """

    path: str
    context: int
    mask_documents: bool = True
    val_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context must be >= 1, got {self.context}")
        if self.val_tokens < self.context:
            raise ValueError(
                f"val_tokens must hold one window of context={self.context}, got {self.val_tokens}"
            )


@config_dataclass
class TrainConfig:
    """How a run trains.

    Args:
        steps: Optimiser steps.
        batch_size: Windows per step.
        micro_batch_size: Windows per forward pass, divides `batch_size`; None takes all at once.
        seed: Of the initial weights and of the order of the data.
        init_from: A run folder, or one that `depthroute import` made, whose newest weights the run
            starts with; optimisers start fresh. None draws the weights.
        device: "auto" takes CUDA if there is one.
        compute_dtype: Of activations and products; weights stay float32. "auto" is bfloat16 on
            CUDA, float32 elsewhere.
        deterministic: Ask torch for gradients in a fixed order of addition, so that a run on CUDA
            can be repeated bit for bit; slower there. A CPU always is.
        compile: Nothing, each sublayer, or the whole decoder.
        checkpointing: What the backward pass recomputes; see `Decoder`.
        loss_chunk_tokens: Tokens whose logits exist at a time.
        log_every: Steps between lines; every step is in `metrics.jsonl`.
        val_every: Steps between validations; the last step validates always. 0: only then.
        save_every: Steps between checkpoints; the last step saves always. 0: only then.
        keep_checkpoints: Newest checkpoints to keep, >= 1.
    """

    steps: int
    batch_size: int
    micro_batch_size: int | None = None
    seed: int = 0
    init_from: str | None = None
    device: Device = "auto"
    compute_dtype: ComputeDtype = "auto"
    deterministic: bool = False
    compile: CompileMode = "none"
    checkpointing: Checkpointing = "none"
    loss_chunk_tokens: int = 4096
    log_every: int = 10
    val_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "loss_chunk_tokens", "log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("seed", "val_every", "save_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        micro = self.micro_batch_size
        if micro is not None and (micro < 1 or self.batch_size % micro):
            raise ValueError(
                f"micro_batch_size must divide batch_size={self.batch_size}, got {micro}"
            )

    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Return the device and the compute dtype on this machine.

        Raises:
            ValueError: CUDA is asked for and there is none.
        """
        return placement(self.device, self.compute_dtype)


@config_dataclass
class RunConfig:
    """One training run, complete.

    Args:
        out: The run folder.
        model: Shape and residual scheme.
        data: What it reads.
        optim: How it steps.
        train: How long, where and how precisely.
    """

    out: str
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    train: TrainConfig
