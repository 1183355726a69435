"""Checkpoints: written whole or not at all, and enough to continue bit for bit."""

import os
import random
import re
import shutil
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

_NAME = re.compile(r"step_(\d+)")


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizers: list[Optimizer], *, keep: int
) -> Path:
    """Write the state after `step` steps and drop all but the newest `keep` checkpoints.

    The state is weights, optimisers with their step counts and averages, and random states; the
    data's place and the schedule follow from the step. Files are written under a temporary name
    that is renamed once they are on disk.

    Args:
        folder: Holds one folder per checkpoint, `step_00000100` and so on.
        step: Steps done.
        model: Its parameters are saved by name.
        optimizers: Saved by parameter name.
        keep: >= 1.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: The checkpoint cannot be written, for example since the disk is full.
    """
    final = folder / f"step_{step:08d}"
    temporary = folder / f".writing_{final.name}"
    for unfinished in folder.glob(".writing_*"):  # left by a kill
        shutil.rmtree(unfinished)
    with _single_process():
        try:
            dcp.save(_state(model, optimizers, step), checkpoint_id=temporary, no_dist=True)
        except dcp.api.CheckpointException as error:  # which is no Exception
            raise OSError(f"{final} cannot be written: {_reason(error)}") from error
    if final.exists():  # of an earlier run of the same step
        shutil.rmtree(final)
    os.replace(temporary, final)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first, by the number of their step."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name)] if folder.exists() else []
    return sorted(found, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the steps done at a checkpoint."""
    return int(path.name.removeprefix("step_"))


def newest_checkpoint(run: Path) -> Path:
    """Return the newest complete checkpoint of a run folder.

    Raises:
        ValueError: It has none, or does not exist.
    """
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}")
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise ValueError(f"{run} has no checkpoint yet")
    return found[-1]


def load_checkpoint(path: Path, model: nn.Module, optimizers: list[Optimizer]) -> int:
    """Restore a checkpoint in place and return its step.

    Raises:
        ValueError: The checkpoint lacks something, or holds tensors of other shapes.
    """
    state = _state(model, optimizers, 0)
    _load(path, state)
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
    )
    torch.set_rng_state(state["random"]["torch"])
    random.setstate(state["random"]["python"])
    if torch.cuda.is_available() and state["random"]["cuda"].numel():
        torch.cuda.set_rng_state(state["random"]["cuda"])
    return state["step"]


def load_weights(path: Path, model: nn.Module) -> None:
    """Restore the weights of a checkpoint, without its optimisers.

    Raises:
        ValueError: The checkpoint lacks something, or holds tensors of other shapes, or others.
    """
    state = {"model": model.state_dict()}
    _load(path, state)
    model.load_state_dict(state["model"])


def _load(path: Path, state: dict[str, Any]) -> None:
    """Fill a state in place from a checkpoint."""
    names = {f"model.{name}" for name in state["model"]}
    with _single_process():
        try:
            # first: where this fails, dcp.load logs tracebacks; and it passes over what is too much
            held = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            if others := sorted(n for n in held if n.startswith("model.") and n not in names):
                raise ValueError(f"the model lacks {', '.join(others)}")
            dcp.load(state, checkpoint_id=path, no_dist=True)
        # a damaged pickle raises anything, and what torch gathers errors in is no Exception
        except (dcp.api.CheckpointException, Exception) as error:
            reason = _reason(error)
            raise ValueError(f"{path} cannot be loaded into this model: {reason}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of those that torch gathers, the first one's."""
    if isinstance(error, dcp.api.CheckpointException):  # its own text has every traceback
        error, _ = next(iter(error.failures.values()))
    return traceback.format_exception_only(error)[0].splitlines()[0]


def _state(model: nn.Module, optimizers: list[Optimizer], step: int) -> dict[str, Any]:
    weights, averages = get_state_dict(model, optimizers)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0)
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": cuda}
    return {"model": weights, "optimizers": averages, "random": generators, "step": step}


@contextmanager
def _single_process() -> Iterator[None]:
    """Keep torch from warning that it saves from one process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
