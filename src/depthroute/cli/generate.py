"""What `depthroute generate` does."""

import difflib
import re

import torch

from depthroute.config import config_dataclass
from depthroute.models import generate
from depthroute.train import load_model
from depthroute.train.run import load_settings, open_dataset


@config_dataclass
class GenerateConfig:
    """Settings of sampling; see `depthroute.models.generate`."""

    tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int | None = None


def looks_like_setting(word: str) -> bool:
    """Tell whether a word is `key=value` with the name of a setting, or one close to it."""
    found = re.fullmatch(r"(\w+)=\S*", word)
    known = GenerateConfig.__dataclass_fields__
    return found is not None and bool(difflib.get_close_matches(found[1], known))


def sample(run: str, prompt: str, config: GenerateConfig) -> str:
    """Return the prompt and its continuation by the newest checkpoint of a run."""
    settings = load_settings(run)
    device, _ = settings.train.placement()
    model = load_model(run, device=device)
    tokenizer = open_dataset(settings.data.path).tokenizer()
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
