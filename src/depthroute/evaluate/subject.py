"""The trained model that is evaluated."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from depthroute.data import TokenDataset, ValidationWindows, validation_windows
from depthroute.evaluate.config import EvaluateConfig
from depthroute.models import CausalLM
from depthroute.train import RunConfig, load_model
from depthroute.train.checkpoint import newest_checkpoint
from depthroute.train.run import load_settings, open_dataset


class Subject(NamedTuple):
    """A run's newest checkpoint, ready to be measured.

    Attributes:
        model: On its device, with its compute dtype.
        settings: Of the run.
        checkpoint: Name of the checkpoint.
        weights: sha256 of all weights.
    """

    model: CausalLM
    settings: RunConfig
    checkpoint: str
    weights: str

    @property
    def identity(self) -> dict[str, Any]:
        """Return what every result depends on."""
        return {
            "weights": self.weights,
            "device": self.model.lm_head.weight.device.type,
            "compute_dtype": str(self.model.model.compute_dtype),
        }

    def dataset(self) -> TokenDataset:
        """Open the run's dataset."""
        return open_dataset(self.settings.data.path)


def open_run(run: str | Path, config: EvaluateConfig) -> Subject:
    """Load the newest checkpoint of a run.

    Raises:
        ValueError: The folder is no run, has no checkpoint yet, or there is no such device.
    """
    run = Path(run)
    model = load_model(run)
    settings = load_settings(run)
    place = replace(settings.train, device=config.device, compute_dtype=config.compute_dtype)
    device, dtype = place.placement()
    weights = _hash(model)
    model.to(device)
    model.model.compute_dtype = dtype
    return Subject(model, settings, newest_checkpoint(run).name, weights)


def loss_windows(
    subject: Subject, config: EvaluateConfig
) -> tuple[ValidationWindows, tuple[str, ...]]:
    """Return the windows whose loss is asked for, and the sha256 of the files they are from.

    Raises:
        ValueError: The dataset does not fit the model, has no such split, or it holds no window.
    """
    dataset = subject.dataset() if config.data is None else open_dataset(config.data)
    size = subject.settings.model.vocab_size
    if dataset.vocab_size > size:
        raise ValueError(
            f"data: {dataset.folder} has {dataset.vocab_size} tokens, the model knows {size}"
        )
    if config.data is not None and Path(subject.settings.data.path).exists():
        own = subject.dataset().manifest.tokenizer
        if dataset.manifest.tokenizer != own:
            raise ValueError(
                f"data: {dataset.folder} was made with the tokenizer "
                f"{dataset.manifest.tokenizer}, the run with {own}"
            )
    windows = validation_windows(
        dataset.split(config.split),
        context=subject.settings.data.context,
        max_tokens=None if config.tokens == "all" else config.tokens,
    )
    return windows, tuple(shard.bin_sha256 for shard in dataset.manifest.splits[config.split])


def _hash(model: nn.Module) -> str:
    """Return the sha256 of all parameters, by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()
