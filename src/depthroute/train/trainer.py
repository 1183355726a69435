"""The training loop."""

import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from depthroute.data import TokenDataset, TokenLoader, ValidationWindows, micro
from depthroute.data import validation_windows as fixed_windows
from depthroute.models import CausalLM
from depthroute.models.compile import compile_model
from depthroute.optim import (
    build_optimizers,
    format_groups,
    parameter_groups,
    schedule_factor,
    set_learning_rates,
)
from depthroute.train.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_weights,
    newest_checkpoint,
    save_checkpoint,
)
from depthroute.train.config import RunConfig
from depthroute.train.determinism import determinism
from depthroute.train.memory import PeakMemory
from depthroute.train.report import Reporter, reported
from depthroute.train.run import RunFolder, open_dataset, resolve
from depthroute.train.signals import StopRequest
from depthroute.train.validate import Validation, batch_loss, validate


class RunResult(NamedTuple):
    """How a run ended."""

    path: Path
    step: int  # steps done
    validation: Validation | None  # at the last step; None if the run was stopped before it
    stopped_by: int | None  # number of the signal that stopped it


def train(config: RunConfig, *, reporter: Reporter | None = None) -> RunResult:
    """Train a model, or continue its run folder from the newest checkpoint.

    The objective of a step is `(sum CE + z_loss * sum lse^2) / tokens` over the global batch, in
    micro-batches; what is reported is pure cross-entropy. A continued run equals an uninterrupted
    one bit for bit on a CPU; on CUDA that takes `train.deterministic`, since some of torch's own
    gradients vary in rounding from run to run. The first SIGINT or SIGTERM saves and stops. A run
    that is complete is not done again: what it measured is read from its folder.

    Args:
        config: The run; `out` is made, or must hold a run of the same settings.
        reporter: Where progress goes; None prints it.

    Raises:
        ValueError: Settings that do not fit the data or the run folder.
        FloatingPointError: The loss or the gradient is not finite; the last checkpoint stands.
    """
    dataset = open_dataset(config.data.path)
    config = resolve(config, dataset)
    folder = RunFolder(config)
    if finished := folder.finished(config.train.steps):
        return RunResult(folder.path, config.train.steps, finished, None)
    initial = _initial_checkpoint(folder)
    with (
        reporter or Reporter(folder.path.name, config.train.steps) as report,
        reported(logging.getLogger("depthroute.ops"), report),  # what runs the reads, once
        StopRequest() as stop,
        determinism(config.train.deterministic),
    ):
        trainer = _Trainer(config, dataset)
        step = trainer.resume(folder, initial, report)
        folder.start(step)
        validation = stopped_by = None
        while step < config.train.steps and stopped_by is None:
            trainer.step(step)
            step += 1
            # once a step: a signal that comes later, in validation, waits for the next save
            stopped_by = stop.signal
            last = step == config.train.steps
            saving = last or stopped_by is not None or _due(step, config.train.save_every)
            validating = last or _due(step, config.train.val_every)
            # looking at the numbers first keeps a state with NaN out of the checkpoints
            if saving or validating or _due(step, config.train.log_every):
                folder.log(trainer.flush(report))
            with trainer.clock_stopped():
                if validating:
                    validation = trainer.validate()
                    folder.log([validation.record(step)])
                    report.say(_describe(report.title, step, validation))
                if saving:
                    trainer.save(folder, step)
        if step < config.train.steps:
            validation = None
        elif validation is None:  # complete, but what it measured is lost
            validation = trainer.validate()
            folder.log([validation.record(step)])
        return RunResult(folder.path, step, validation, stopped_by)


class _Trainer:
    """Model, optimisers and data of a run, and what happens in one step."""

    def __init__(self, config: RunConfig, dataset: TokenDataset) -> None:
        self.config = config
        self.device, dtype = config.train.placement()
        self.memory = PeakMemory(self.device)
        random.seed(config.train.seed)
        torch.manual_seed(config.train.seed)
        self.model = CausalLM(config.model, seed=config.train.seed).to(self.device)
        self.model.model.compute_dtype = dtype
        self.model.model.checkpointing = config.train.checkpointing
        self.groups = parameter_groups(self.model)
        self.optimizers: list[Optimizer] = build_optimizers(self.groups, config.optim)
        self.loader = TokenLoader(
            dataset.split("train"),
            context=config.data.context,
            global_batch=config.train.batch_size,
            seed=config.train.seed,
        )
        self.windows: ValidationWindows = fixed_windows(
            dataset.split("val"), context=config.data.context, max_tokens=config.data.val_tokens
        )
        self.pending: list[dict[str, Any]] = []
        self.flushed_at = time.perf_counter()

    def resume(self, folder: RunFolder, initial: Path | None, report: Reporter) -> int:
        """Announce the run, load its newest checkpoint or an initial one, and return the step."""
        count = sum(p.numel() for p in self.model.parameters())
        report.say(f"{count:,} parameters on {self.device}\n{format_groups(self.groups)}")
        step = 0
        if found := list_checkpoints(folder.checkpoints):
            step = load_checkpoint(found[-1], self.model, self.optimizers)
            report.say(f"continuing {folder.path} at step {step}")
        elif initial is not None:
            load_weights(initial, self.model)
            report.say(f"starting with the weights of {self.config.train.init_from}")
        if self.config.train.compile != "none":
            report.say("compiling: the first step takes a while")
            compile_model(self.model, self.config.train.compile)
        self.flushed_at = time.perf_counter()
        return step

    def save(self, folder: RunFolder, step: int) -> None:
        """Write the checkpoint after `step` steps."""
        keep = self.config.train.keep_checkpoints
        save_checkpoint(folder.checkpoints, step, self.model, self.optimizers, keep=keep)

    def step(self, step: int) -> None:
        """Do one optimiser step."""
        config = self.config
        batch = self.loader.batch(step)
        tokens = int((batch.targets >= 0).sum())
        num_micro = config.train.batch_size // (
            config.train.micro_batch_size or config.train.batch_size
        )
        losses, squares = [], []
        for i in range(num_micro):
            sums = batch_loss(
                self.model,
                micro(batch, i, num_micro),
                self.device,
                mask_documents=config.data.mask_documents,
                chunk_tokens=config.train.loss_chunk_tokens,
            )
            objective = sums.cross_entropy + config.optim.z_loss * sums.squared_lse
            (objective / tokens).backward()
            losses.append(sums.cross_entropy.detach())
            squares.append(sums.squared_lse.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip_norm)
        rates = set_learning_rates(
            self.optimizers, schedule_factor(step, config.train.steps, config.optim.schedule)
        )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.pending.append(
            {
                "step": step + 1,
                "train/tokens": (step + 1) * batch.targets.numel(),
                "train/loss_nats": torch.stack(losses).sum() / tokens,
                "train/z_loss_nats": config.optim.z_loss * torch.stack(squares).sum() / tokens,
                "train/grad_norm": norm,
                "lr/muon": rates["sublayer matrices"],
                "lr/adamw": rates["embedding"],
            }
        )

    def flush(self, report: Reporter) -> list[dict[str, Any]]:
        """Wait for the device and return the records of the steps since the last call.

        Raises:
            FloatingPointError: A loss or gradient norm is not finite.
        """
        names = ("train/loss_nats", "train/z_loss_nats", "train/grad_norm")
        records = [
            {key: float(value) if key in names else value for key, value in record.items()}
            for record in self.pending
        ]
        seconds = (time.perf_counter() - self.flushed_at) / len(records)
        peak = self.memory.gib()
        per_step = records[-1]["train/tokens"] // records[-1]["step"]
        for record in records:
            if not math.isfinite(record["train/loss_nats"] + record["train/grad_norm"]):
                raise FloatingPointError(
                    f"step {record['step']}: loss {record['train/loss_nats']}, gradient norm "
                    f"{record['train/grad_norm']}; lower the learning rates or raise warmup_steps"
                )
            record["perf/step_s"] = seconds
            record["perf/tokens_per_s"] = per_step / seconds
            if peak is not None:
                record["perf/peak_memory_gib"] = peak
        last = records[-1]
        report.step(
            last["step"],
            f"loss {last['train/loss_nats']:.4f}  grad {last['train/grad_norm']:.3f}  "
            f"{last['perf/tokens_per_s']:,.0f} tokens/s",
        )
        self.pending = []
        self.flushed_at = time.perf_counter()
        return records

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Keep what happens inside out of the time per step."""
        began = time.perf_counter()
        yield
        self.flushed_at += time.perf_counter() - began

    def validate(self) -> Validation:
        """Validate on the fixed windows."""
        config = self.config
        return validate(
            self.model,
            self.windows,
            batch_size=config.train.micro_batch_size or config.train.batch_size,
            mask_documents=config.data.mask_documents,
            chunk_tokens=config.train.loss_chunk_tokens,
        )


def _initial_checkpoint(folder: RunFolder) -> Path | None:
    """Return the checkpoint of `init_from`, if the run is to start with one.

    Raises:
        ValueError: There is none.
    """
    source = folder.config.train.init_from
    if source is None or list_checkpoints(folder.checkpoints):
        return None
    try:
        return newest_checkpoint(Path(source))
    except ValueError as error:
        raise ValueError(f"train.init_from: {error}") from error


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _describe(title: str, step: int, validation: Validation) -> str:
    per_byte = validation.bits_per_byte
    bits = "" if per_byte is None else f", {per_byte:.4f} bits per byte"
    return f"{title} step {step} validation loss {validation.loss_nats:.4f} nats{bits}"
