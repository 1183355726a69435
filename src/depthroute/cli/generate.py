"""What `depthroute generate` does."""

import difflib
import os
import re

import torch

from depthroute.config import config_dataclass
from depthroute.models import generate
from depthroute.train import load_model
from depthroute.train.config import placement
from depthroute.train.run import load_settings, open_dataset


@config_dataclass
class GenerateConfig:
    """Settings of sampling; see `depthroute.models.generate`."""

    tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be >= 0, got {self.tokens}")


def looks_like_setting(word: str) -> bool:
    """Tell whether a word is `key=value` with the name of a setting, or one close to it."""
    found = re.fullmatch(r"-*(\w+)=\S*", word)
    known = GenerateConfig.__dataclass_fields__
    return found is not None and bool(difflib.get_close_matches(found[1], known, cutoff=0.8))


def sample(run: str, prompt: str, config: GenerateConfig) -> str:
    """Return the prompt and its continuation by the newest checkpoint of a run.

    Raises:
        ValueError: The prompt is no text, or the run or its dataset is not there.
    """
    _check_is_text(prompt)
    device, _ = placement("auto", "auto")  # a run of another machine may name what is not here
    model = load_model(run, device=device)
    tokenizer = open_dataset(load_settings(run).data.path).tokenizer()
    ids = [tokenizer.end_id, *tokenizer.encode(prompt)]
    out = generate(
        model,
        torch.tensor([ids], device=device),
        max_new_tokens=config.tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        stop_id=tokenizer.end_id,
    )
    continuation = [token for token in out[0, len(ids) :].tolist() if token != tokenizer.end_id]
    return prompt + tokenizer.decode(continuation)


def _check_is_text(prompt: str) -> None:
    """Refuse bytes that are not UTF-8, which a command line hands on as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt must be valid UTF-8, got {os.fsencode(prompt[error.start : error.end])!r} "
            f"at character {error.start}; convert it to UTF-8"
        ) from error
