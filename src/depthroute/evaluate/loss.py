"""The loss of a token set, window by window."""

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from depthroute.data import Batch, ValidationWindows
from depthroute.evaluate.progress import Work
from depthroute.evaluate.statistics import mean_and_error
from depthroute.models import CausalLM
from depthroute.train.validate import Validation, documents_of


class WindowLosses(NamedTuple):
    """Pure cross-entropy of each window of a token set.

    Attributes:
        sums_nats: Sum over the tokens of each window, in float64.
        context: Tokens per window.
        shards: sha256 of the files that the windows are from, tokens and document starts.
        num_bytes: UTF-8 bytes that the targets stand for; None if the tokenizer cannot say.
    """

    sums_nats: tuple[float, ...]
    context: int
    shards: tuple[str, ...]
    num_bytes: int | None

    @property
    def source(self) -> tuple[Any, ...]:
        """Return what is equal for losses of the same windows."""
        return len(self.sums_nats), self.context, self.shards

    @property
    def means_nats(self) -> np.ndarray:
        """Return the loss of each window, nats per token."""
        return np.array(self.sums_nats) / self.context

    @property
    def standard_error_nats(self) -> float | None:
        """Return the standard error of the loss, as if windows were independent."""
        return mean_and_error(self.means_nats)[1]

    @property
    def total(self) -> Validation:
        """Return the loss of the set; the windows are added exactly, then rounded once."""
        nats, tokens = math.fsum(self.sums_nats), len(self.sums_nats) * self.context
        per_byte = nats / math.log(2) / self.num_bytes if self.num_bytes else None
        return Validation(nats / tokens, per_byte, tokens)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of `results.json`."""
        total = self.total
        return {
            "loss_nats": total.loss_nats,
            "standard_error_nats": self.standard_error_nats,
            "perplexity": total.perplexity,
            "bits_per_byte": total.bits_per_byte,
            "tokens": total.tokens,
            "windows": len(self.sums_nats),
            "context": self.context,
        }


def window_losses(
    model: CausalLM,
    windows: ValidationWindows,
    work: Work,
    *,
    shards: tuple[str, ...],
    batch_size: int,
    mask_documents: bool,
    chunk_tokens: int = 4096,
) -> WindowLosses:
    """Measure the cross-entropy of every window.

    As in training's validation, products run in the model's compute dtype and everything after the
    logits in float32; sums over tokens and windows are float64.

    Args:
        model: The model; its device decides where the batches go.
        windows: The fixed set.
        work: Keeps the batches that are done.
        shards: sha256 of the files that the windows are from.
        batch_size: Windows per forward pass; changes the result by rounding only.
        mask_documents: Keep attention within documents.
        chunk_tokens: Tokens whose logits exist at a time.

    Raises:
        FloatingPointError: The loss of a window is not finite.
    """
    settings = {
        "shards": shards,
        "windows": windows.num_windows,
        "context": windows.context,
        "batch_size": batch_size,
        "mask_documents": mask_documents,
        "chunk_tokens": chunk_tokens,
        "token_bytes": None if windows.token_bytes is None else _sha256(windows.token_bytes),
    }

    def compute(i: int) -> list[Any]:
        first = i * batch_size
        indices = range(first, min(first + batch_size, windows.num_windows))
        batch = windows.batch(indices)
        losses = token_losses(
            model, batch, mask_documents=mask_documents, chunk_tokens=chunk_tokens
        )
        sums = losses.double().sum(1).tolist()
        for index, nats in zip(indices, sums, strict=True):
            if not math.isfinite(nats):
                raise FloatingPointError(f"the loss of window {index} is {nats}")
        return list(zip(sums, batch.row_bytes or [None] * len(sums), strict=True))

    n = windows.num_windows
    sizes = [min(batch_size, n - first) for first in range(0, n, batch_size)]
    rows = work.with_settings(settings).do(sizes, compute)
    sums_nats, num_bytes = zip(*rows, strict=True)
    known = None if num_bytes[0] is None else sum(num_bytes)
    return WindowLosses(sums_nats, windows.context, shards, known)


@torch.no_grad()
def token_losses(
    model: CausalLM, batch: Batch, *, mask_documents: bool, chunk_tokens: int
) -> Tensor:
    """Return the cross-entropy of each target of a batch, float32 `[B, T]`, on the model's device.

    Args:
        model: The model.
        batch: Windows, on the CPU.
        mask_documents: Keep attention within documents.
        chunk_tokens: Tokens whose logits exist at a time.
    """
    device = model.lm_head.weight.device
    documents = documents_of(batch, device) if mask_documents else None
    hidden = model.model(batch.ids.to(device), documents=documents).flatten(0, 1)
    targets = batch.targets.to(device).flatten()
    parts = [
        F.cross_entropy(wide(model.lm_head(h)), t, reduction="none")
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return torch.cat(parts).view(batch.ids.shape)


def _sha256(table: np.ndarray) -> str:
    return hashlib.sha256(table.tobytes()).hexdigest()


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
