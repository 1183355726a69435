"""Validation on a fixed token set."""

import math
from typing import Any, NamedTuple

import torch

from depthroute.data import Batch, ValidationWindows
from depthroute.models import CausalLM
from depthroute.nn import Documents, LossSums


class Validation(NamedTuple):
    """Pure cross-entropy of a fixed token set."""

    loss_nats: float  # per token
    bits_per_byte: float | None  # None if the tokenizer cannot say how many bytes a token is
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return `exp(loss)`; inf above the largest float."""
        try:
            return math.exp(self.loss_nats)
        except OverflowError:
            return math.inf

    def record(self, step: int) -> dict[str, Any]:
        """Return the record of `metrics.jsonl`; JSON has no inf, so None stands for it."""
        return {
            "step": step,
            "val/loss_nats": self.loss_nats,
            "val/perplexity": None if math.isinf(self.perplexity) else self.perplexity,
            "val/bits_per_byte": self.bits_per_byte,
            "val/tokens": self.tokens,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Validation":
        """Return what `record` was made of."""
        return cls(record["val/loss_nats"], record["val/bits_per_byte"], record["val/tokens"])


@torch.no_grad()
def validate(
    model: CausalLM,
    windows: ValidationWindows,
    *,
    batch_size: int,
    mask_documents: bool,
    chunk_tokens: int = 4096,
) -> Validation:
    """Return the mean cross-entropy over all windows.

    The token set does not depend on the batch size, so neither does the result, up to rounding.

    Args:
        model: The model; its device decides where the batches go.
        windows: The fixed set.
        batch_size: Windows per forward pass.
        mask_documents: Keep attention within documents.
        chunk_tokens: Tokens whose logits exist at a time.
    """
    device = next(model.parameters()).device
    total, tokens, num_bytes = 0.0, 0, 0
    for batch in windows.batches(batch_size):
        sums = batch_loss(
            model, batch, device, mask_documents=mask_documents, chunk_tokens=chunk_tokens
        )
        total += sums.cross_entropy.item()
        tokens += int(sums.tokens)
        num_bytes += batch.num_bytes or 0
    per_byte = total / math.log(2) / num_bytes if num_bytes else None
    return Validation(total / tokens, per_byte, tokens)


def batch_loss(
    model: CausalLM,
    batch: Batch,
    device: torch.device,
    *,
    mask_documents: bool,
    chunk_tokens: int,
) -> LossSums:
    """Return the loss sums of a batch on the CPU by a model on `device`."""
    return model.loss(
        batch.ids.to(device, non_blocking=True),
        batch.targets.to(device, non_blocking=True),
        documents=documents_of(batch, device) if mask_documents else None,
        chunk_tokens=chunk_tokens,
    )


def documents_of(batch: Batch, device: torch.device) -> Documents:
    """Return a batch's document boundaries on a device, shaped alike from step to step.

    Boundaries are padded with empty documents to a multiple of 64 and the bound on the length is
    the window, so that a compiled model meets few shapes.
    """
    bounds = batch.cu_seqlens
    padding = bounds[-1:].expand(-len(bounds) % 64)
    return Documents(torch.cat([bounds, padding]).to(device), batch.ids.shape[1])
