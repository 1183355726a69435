"""The trained model that is evaluated."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from depthroute import __version__
from depthroute.config import to_dict
from depthroute.convert.hugging_face import from_hugging_face, load_shell
from depthroute.data import (
    TokenDataset,
    Tokenizer,
    ValidationWindows,
    load_tokenizer,
    validation_windows,
)
from depthroute.evaluate.config import EvaluateConfig
from depthroute.models import CausalLM
from depthroute.train import load_model
from depthroute.train.checkpoint import newest_checkpoint
from depthroute.train.config import placement
from depthroute.train.run import load_settings, open_dataset

_COMPARED_TOKENS = 4096


class Subject(NamedTuple):
    """A model, ready to be measured as it is, and what belongs to it.

    Attributes:
        name: How tables call it.
        model: On its device, with its compute dtype.
        tokenizer: Returns what made its tokens; asked where text is read, or another dataset.
        context: Tokens that it was trained on at a time; None is not known.
        data: Its dataset folder; None if it has none.
        mask_documents: Whether it was trained with attention within documents.
        checkpoint: Name of the checkpoint; None for a model that has none.
    """

    name: str
    model: CausalLM
    tokenizer: Callable[[], Tokenizer]
    context: int | None
    data: str | None = None
    mask_documents: bool = True
    checkpoint: str | None = None

    @classmethod
    def of(
        cls,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        context: int,
        data: str | None = None,
        name: str = "model",
    ) -> Self:
        """Return a model in memory as a subject.

        Args:
            model: It is measured where it is, in its compute dtype, and stays as it is.
            tokenizer: What made its tokens.
            context: Most tokens that it should read at a time.
            data: Dataset folder of the loss.
            name: How tables call it.
        """
        return cls(name, model, lambda: tokenizer, context, data)

    def identity(self) -> dict[str, Any]:
        """Return what every result depends on, the sha256 of all weights among it.

        Weights alone do not say what is computed with them: that is in the config and the code.
        """
        return {
            "depthroute": __version__,
            "model": to_dict(self.model.config),
            "weights": _hash(self.model),
            "device": self.model.lm_head.weight.device.type,
            "compute_dtype": str(self.model.model.compute_dtype),
        }


def open_subject(folder: str | Path, config: EvaluateConfig) -> Subject:
    """Load the newest checkpoint of a run, or a Hugging Face folder.

    Raises:
        ValueError: The folder is neither, or has no checkpoint yet, or there is no such device.
        ImportError: It is a Hugging Face folder, and transformers is not installed.
    """
    folder = Path(folder)
    device, dtype = placement(config.device, config.compute_dtype)
    if (folder / "config.toml").is_file():
        subject = _open_run(folder)
    elif (folder / "config.json").is_file():
        subject = _open_hugging_face(folder)
    else:
        raise ValueError(
            f"{folder} is neither a run folder, which has a config.toml, nor a Hugging Face "
            "folder, which has a config.json"
        )
    subject.model.to(device)
    subject.model.model.compute_dtype = dtype
    return subject


def _open_run(run: Path) -> Subject:
    model, data = load_model(run), load_settings(run).data
    return Subject(
        name=str(run),
        model=model,
        tokenizer=lambda: open_dataset(data.path).tokenizer(),
        context=data.context,
        data=data.path,
        mask_documents=data.mask_documents,
        checkpoint=newest_checkpoint(run).name,
    )


def _open_hugging_face(folder: Path) -> Subject:
    shell = load_shell(folder)
    return Subject(
        name=str(folder),
        model=from_hugging_face(shell),
        tokenizer=lambda: load_tokenizer(folder),
        context=shell.config.max_position_embeddings,
    )


def context_of(subject: Subject, config: EvaluateConfig) -> int:
    """Return how many tokens the model is to read at a time.

    Raises:
        ValueError: Neither the settings nor the model say so.
    """
    context = subject.context if config.context is None else config.context
    if context is None:
        raise ValueError(
            f"context: {subject.name} does not say how many tokens it was trained on at a time; "
            "give context=N"
        )
    return context


class TokenSet(NamedTuple):
    """What a loss is measured on.

    Attributes:
        windows: The fixed set.
        shards: sha256 of the files that the windows are from, tokens and document starts.
        mask_documents: Keep attention within documents.
    """

    windows: ValidationWindows
    shards: tuple[str, ...]
    mask_documents: bool

    @property
    def source(self) -> tuple[Any, ...]:
        """Return what is equal for the same windows, as `WindowLosses.source`."""
        return self.windows.num_windows, self.windows.context, self.shards


def token_set(subject: Subject, config: EvaluateConfig) -> TokenSet:
    """Return the windows whose loss is asked for.

    Raises:
        ValueError: There is no dataset, it does not fit the model, has no such split, or it or
            the budget of tokens holds no window.
    """
    path = subject.data if config.data is None else config.data
    if path is None:
        raise ValueError(
            f"data: {subject.name} has no dataset of its own; give the folder of one made with the "
            "same tokenizer, data=FOLDER, or tokens=0 for tasks alone"
        )
    dataset = open_dataset(path)
    size = subject.model.config.vocab_size
    if dataset.vocab_size > size:
        raise ValueError(
            f"data: {dataset.folder} has {dataset.vocab_size} tokens, the model knows {size}"
        )
    # raw tokens name no tokenizer; a run's lies with its own dataset, which may be gone
    known = dataset.manifest.tokenizer and (subject.data is None or Path(subject.data).exists())
    if config.data is not None and known:
        _check_tokenizer(subject, dataset, config.split)
    context = context_of(subject, config)
    max_tokens = None if config.tokens == "all" else config.tokens
    if max_tokens is not None and max_tokens < context:
        raise ValueError(
            f'tokens must be "all", 0, or at least one window of context={context} tokens, '
            f"got {max_tokens}"
        )
    windows = validation_windows(
        dataset.split(config.split), context=context, max_tokens=max_tokens
    )
    shards = dataset.manifest.splits[config.split]
    files = tuple(file for one in shards for file in (one.bin_sha256, one.idx_sha256))
    mask = subject.mask_documents if config.mask_documents is None else config.mask_documents
    return TokenSet(windows, files, mask)


def _check_tokenizer(subject: Subject, dataset: TokenDataset, split: str) -> None:
    """Compare the model's tokenizer with a dataset's, on the text that the split begins with.

    Raises:
        ValueError: They give other ids.
    """
    own, theirs = subject.tokenizer(), dataset.tokenizer()
    text = theirs.decode(dataset.split(split).shards[0].tokens[:_COMPARED_TOKENS])
    if own.end_id != theirs.end_id or own.encode(text) != theirs.encode(text):
        raise ValueError(
            f"data: {dataset.folder} was made with the tokenizer {theirs.name}, which gives other "
            f"ids than that of {subject.name}, {own.name}"
        )


def _hash(model: nn.Module) -> str:
    """Return the sha256 of all parameters, by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
