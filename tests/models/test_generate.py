"""Sampling: what each setting keeps, where rows end, what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM, generate
from depthroute.residual import PreNormConfig
from helpers import VARIANTS, tiny_model

PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 9]])


@pytest.fixture
def model() -> CausalLM:
    """Return a model with clear preferences."""
    model = tiny_model(PreNormConfig(), dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


def greedy(model: CausalLM, ids: Tensor, **settings: Any) -> Tensor:
    return generate(model, ids, max_new_tokens=7, temperature=0, **settings)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_takes_the_argmax_of_a_forward_without_cache(name: str) -> None:
    model, ids = tiny_model(VARIANTS[name], dtype=torch.float64), PROMPTS
    for _ in range(7):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy(model, PROMPTS), ids)


def test_rows_do_not_depend_on_their_batch(model: CausalLM) -> None:
    rows = [greedy(model, prompt.unsqueeze(0)) for prompt in PROMPTS]
    assert not torch.equal(*rows)
    assert torch.equal(greedy(model, PROMPTS), torch.cat(rows))


def test_nothing_to_add_returns_the_prompt(model: CausalLM) -> None:
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=0), PROMPTS)


def test_a_row_that_ended_repeats_the_stop_token(model: CausalLM) -> None:
    free = greedy(model, PROMPTS)
    stop = free[0, 4].item()
    assert stop not in free[0, 3:4]
    assert stop not in free[1, 3:]
    ended = greedy(model, PROMPTS, stop_id=stop)
    assert ended[0].tolist() == free[0, :5].tolist() + [stop] * 5
    assert torch.equal(ended[1], free[1])


def test_generation_ends_with_the_last_row(model: CausalLM) -> None:
    free = greedy(model, PROMPTS[:1])
    stop = free[0, 4].item()
    assert torch.equal(greedy(model, PROMPTS[:1], stop_id=stop), free[:, :5])


def test_a_condition_ends_rows_too(model: CausalLM) -> None:
    whole = greedy(model, PROMPTS)
    seen: list[Tensor] = []

    def stop(ids: Tensor) -> Tensor:
        seen.append(ids)
        return torch.tensor([ids.shape[1] - PROMPTS.shape[1] >= 2 + row for row in range(len(ids))])

    found = greedy(model, PROMPTS, stop=stop)
    length = PROMPTS.shape[1] + 1 + len(PROMPTS)  # until the last row ended
    assert torch.equal(found, whole[:, :length])
    assert [ids.shape[1] for ids in seen] == list(range(PROMPTS.shape[1] + 1, length + 1))


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-9}], ids=["top_k", "top_p"])
def test_a_choice_of_one_is_greedy(model: CausalLM, only: dict[str, Any]) -> None:
    sampled = generate(model, PROMPTS, max_new_tokens=7, temperature=5.0, **only)
    assert torch.equal(sampled, greedy(model, PROMPTS))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(model: CausalLM, settings: dict[str, Any]) -> None:
    """Sample one token 20000 times; the distribution is worked out token by token."""
    logits = model(PROMPTS[:1])[0, -1] / settings.get("temperature", 1.0)
    best_first = sorted(range(61), key=lambda token: -logits[token].item())
    candidates = best_first[: settings.get("top_k", 61)]
    mass = torch.tensor([logits[token].exp().item() for token in candidates])
    kept, held = {}, 0.0
    for token, share in zip(candidates, (mass / mass.sum()).tolist(), strict=True):
        if held >= settings.get("top_p", 1.0):
            break
        kept[token] = share
        held += share

    prompts = PROMPTS[:1].expand(20_000, -1)
    sampled = generate(model, prompts, max_new_tokens=1, seed=0, **settings)[:, -1]
    counts = torch.bincount(sampled, minlength=61)
    for token in range(61):
        expected = kept.get(token, 0.0) / held
        deviation = (expected * (1 - expected) / 20_000) ** 0.5
        assert abs(counts[token].item() / 20_000 - expected) <= 5 * deviation, token


def test_a_seed_repeats_the_sample(model: CausalLM) -> None:
    one, again, other = (generate(model, PROMPTS, max_new_tokens=9, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_sampling_leaves_the_global_generator_alone(model: CausalLM) -> None:
    before = torch.get_rng_state()
    generate(model, PROMPTS, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_samples_differ(model: CausalLM) -> None:
    one, two = (generate(model, PROMPTS, max_new_tokens=30) for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be >= 0, got -1"),
        ({"temperature": -0.1}, "temperature must be >= 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
    ],
)
def test_a_number_out_of_range_is_an_error(
    model: CausalLM, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, **{"max_new_tokens": 1, **settings})


@pytest.mark.parametrize("ids", [PROMPTS[0], PROMPTS[:, :0]], ids=["shape", "empty"])
def test_a_prompt_must_have_rows_of_tokens(model: CausalLM, ids: Tensor) -> None:
    with pytest.raises(ValueError, match="ids must be"):
        generate(model, ids, max_new_tokens=1)
