"""How likely a model finds given texts, and how it continues them."""

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.data import Tokenizer
from depthroute.data.manifest import sha256
from depthroute.evaluate.loss import wide
from depthroute.evaluate.progress import Work
from depthroute.models import CausalLM, generate

# tokens whose logits exist at a time
_CHUNK = 1024


class Score(NamedTuple):
    """How likely a continuation is."""

    log_likelihood: float  # nats, summed over its tokens
    is_greedy: bool  # each of its tokens is the most likely one


class Scorer:
    """Scores and continues token sequences in batches, padded on the right.

    Requests are sorted by length, so that batches hold little padding and are the same for any
    number of processes.

    Args:
        model: The model.
        tokenizer: What made its tokens.
        context: Most tokens that the model reads at a time.
        batch_size: Sequences per forward pass; changes results by rounding only.
        work: Keeps the batches that are done.

    Attributes:
        num_cut: Requests so far that were longer than the context, and lost their beginning.
    """

    def __init__(
        self, model: CausalLM, tokenizer: Tokenizer, *, context: int, batch_size: int, work: Work
    ) -> None:
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.batch_size = batch_size
        self.work = work.with_settings({"batch_size": batch_size, "context": context})
        self.num_cut = 0

    def log_likelihoods(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        """Return the scores of continuations, given the tokens before them.

        The head and all that follows run in float32, whatever the compute dtype is; the sum over
        tokens is float64.

        Args:
            requests: Pairs of tokens: context, not empty, and continuation.

        Raises:
            ValueError: A part of a request is empty, or a continuation exceeds the context.
            FloatingPointError: A log-likelihood is not finite.
        """
        for before, after in requests:
            if not before or not 0 < len(after) <= self.context:
                raise ValueError(
                    f"expected tokens before a continuation of 1 to {self.context} tokens, "
                    f"got {len(before)} before {len(after)}"
                )
        self.num_cut += sum(len(a) + len(b) > self.context + 1 for a, b in requests)
        sequences = [(a + b)[-(self.context + 1) :] for a, b in requests]

        def compute(indices: list[int]) -> list[Any]:
            scored = self._score(
                [sequences[i] for i in indices], [len(requests[i][1]) for i in indices]
            )
            for i, score in zip(indices, scored, strict=True):
                if not math.isfinite(score.log_likelihood):
                    raise FloatingPointError(
                        f"the log-likelihood of request {i} is {score.log_likelihood}"
                    )
            return [tuple(score) for score in scored]

        lengths = [len(sequence) for sequence in sequences]
        rows = self._in_batches("scores", requests, lengths, compute)
        return [Score(log_likelihood, is_greedy) for log_likelihood, is_greedy in rows]

    def continuations(
        self, prompts: Sequence[list[int]], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> list[str]:
        """Return the greedy continuation of each prompt, up to its end token or the first stop.

        Args:
            prompts: Tokens, not empty.
            max_new_tokens: Most tokens to add; below the context.
            stop: Texts that end a continuation and are not part of it.

        Raises:
            ValueError: `max_new_tokens` leaves no room for a prompt.
            FloatingPointError: A logit is not finite.
        """
        room = self.context - max_new_tokens
        if room < 1:
            raise ValueError(
                f"{max_new_tokens} new tokens leave no room for a prompt: the model was trained on "
                f"{self.context} tokens at a time"
            )
        self.num_cut += sum(len(prompt) > room for prompt in prompts)
        kept = [prompt[-room:] for prompt in prompts]

        def compute(indices: list[int]) -> list[Any]:
            with _finite_logits(self.model):
                return self._continue([kept[i] for i in indices], max_new_tokens, stop)

        request = [list(prompts), max_new_tokens, list(stop), self._decoding]
        return self._in_batches("texts", request, [len(p) for p in kept], compute, equal=True)

    @cached_property
    def _decoding(self) -> str:
        """The sha256 of all that the tokenizer saves: what tokens become as text."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(folder)
            files = sorted(Path(folder).iterdir())
            content = [[file.name, sha256(file)] for file in files]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _in_batches(
        self,
        kind: str,
        request: Any,
        lengths: list[int],
        compute: Callable[[list[int]], list[Any]],
        *,
        equal: bool = False,
    ) -> list[Any]:
        """Compute a result per sequence, longest first; `equal` keeps lengths apart."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        batches: list[list[int]] = []
        for i in order:
            full = not batches or len(batches[-1]) == self.batch_size
            if full or (equal and lengths[batches[-1][0]] != lengths[i]):
                batches.append([])
            batches[-1].append(i)
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        work = self.work.with_settings({"kind": kind, "request": digest})
        rows = work.do([len(batch) for batch in batches], lambda b: compute(batches[b]))
        results = dict(zip(order, rows, strict=True))
        return [results[i] for i in range(len(lengths))]

    @torch.no_grad()
    def _score(self, sequences: list[list[int]], num_last: list[int]) -> list[Score]:
        """Score the last tokens of each sequence, as many as `num_last` says."""
        device = self.model.lm_head.weight.device
        length = max(map(len, sequences)) - 1
        ids = torch.full((len(sequences), length), self.tokenizer.end_id)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence) - 1] = torch.tensor(sequence[:-1])
        hidden = self.model.model(ids.to(device))
        # attention is causal: padding on the right reaches nothing before it
        last = torch.cat(
            [
                row[len(sequence) - 1 - n : len(sequence) - 1]
                for row, sequence, n in zip(hidden, sequences, num_last, strict=True)
            ]
        )
        ends = zip(sequences, num_last, strict=True)
        targets = torch.tensor([token for sequence, n in ends for token in sequence[-n:]])
        found = [
            self._likelihoods(h, t)
            for h, t in zip(last.split(_CHUNK), targets.to(device).split(_CHUNK), strict=True)
        ]
        logs, hits = (torch.cat(part).cpu().split(num_last) for part in zip(*found, strict=True))
        return [
            Score(math.fsum(log.tolist()), bool(hit.all()))
            for log, hit in zip(logs, hits, strict=True)
        ]

    def _likelihoods(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-likelihoods of targets `[N]` by hidden states `[N, D]`, and which are top."""
        logits = self.model.lm_head(wide(hidden))
        logs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return logs, logits.argmax(-1) == targets

    def _continue(
        self, prompts: list[list[int]], max_new_tokens: int, stop: Sequence[str]
    ) -> list[str]:
        """Continue prompts of equal length."""
        start, end_id = len(prompts[0]), self.tokenizer.end_id

        def text(ids: Tensor) -> str:
            tokens = ids[start:].tolist()
            if end_id in tokens:
                tokens = tokens[: tokens.index(end_id)]
            return self.tokenizer.decode(tokens)

        def done(ids: Tensor) -> Tensor:
            found = [any(s in text(row) for s in stop) for row in ids]
            return torch.tensor(found, device=ids.device)

        ids = generate(
            self.model,
            torch.tensor(prompts, device=self.model.lm_head.weight.device),
            max_new_tokens=max_new_tokens,
            temperature=0,
            stop_id=end_id,
            stop=done if stop else None,
        )
        return [_before(stop, text(row)) for row in ids]


@contextmanager
def _finite_logits(model: CausalLM) -> Iterator[None]:
    """Look at all logits within the block; a replayed CUDA graph does so too.

    Raises:
        FloatingPointError: One of them is not finite.
    """
    device = model.lm_head.weight.device
    wrong = torch.zeros((), dtype=torch.bool, device=device)  # read once: no wait per token

    def look(_module: Any, _inputs: Any, logits: Tensor) -> None:
        wrong.logical_or_(~logits.isfinite().all())

    hook = model.lm_head.register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()
    if wrong:
        raise FloatingPointError("a logit is not finite")


def _before(stop: Sequence[str], text: str) -> str:
    """Return a text up to the first of the stops in it."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]
