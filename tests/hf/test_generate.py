"""`generate` of transformers: what the cache gives is what a full forward gives."""

import pytest
import torch
import torch.nn.functional as F

from depthroute.convert.tokenizer import fast_tokenizer
from depthroute.data import load_tokenizer
from helpers import VARIANTS

PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
LONGER = {"max_new_tokens": 5, "pad_token_id": 60}


@torch.no_grad()
def literal_greedy(model, ids):
    for _ in range(5):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_is_the_argmax_of_full_forwards(pair, name):
    model, shell = pair(name)
    expected = literal_greedy(model, PROMPTS)
    for settings in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        ids = shell.generate(PROMPTS, do_sample=False, **LONGER, **settings)
        assert torch.equal(ids, expected), settings


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dynamic") for name in VARIANTS), ("s_lr", "static"), ("oasis_block3", "static")],
)
def test_left_padded_prompts_continue_as_alone(pair, name, cache):
    model, shell = pair(name)
    ids, mask = PROMPTS.clone(), torch.ones_like(PROMPTS)
    ids[1, :2], mask[1, :2] = 60, 0
    out = shell.generate(
        ids, attention_mask=mask, do_sample=False, cache_implementation=cache, **LONGER
    )
    assert torch.equal(out[:1], literal_greedy(model, PROMPTS[:1]))
    assert torch.equal(out[1:, 2:], literal_greedy(model, PROMPTS[1:, 2:]))


@pytest.mark.parametrize("name", VARIANTS)
def test_beams_and_samples_do_not_depend_on_the_cache(pair, name):
    _, shell = pair(name)
    for settings in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 8}):
        outs = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            outs.append(shell.generate(PROMPTS, use_cache=use_cache, **LONGER, **settings))
        assert torch.equal(*outs), settings


def test_the_best_beam_is_the_most_likely_of_all_continuations(pair):
    """With as many beams as there are pairs of tokens nothing is pruned: an exhaustive search."""
    model, shell = pair("p_lr", vocab_size=7)
    prompt = PROMPTS[:1] % 7
    out = shell.generate(prompt, num_beams=7, do_sample=False, max_new_tokens=2, pad_token_id=0)
    pairs = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    rows = torch.cat([prompt.expand(49, -1), pairs], dim=1)
    log = model(rows)[:, -3:-1].log_softmax(-1).gather(-1, pairs.unsqueeze(-1)).sum((1, 2))
    assert torch.equal(out[0, -2:], pairs[log.argmax()])


def test_a_row_ends_with_the_end_token(pair):
    model, shell = pair()
    expected = literal_greedy(model, PROMPTS[:1])
    stop = expected[0, 7].item()
    assert stop not in expected[0, 5:7]
    out = shell.generate(PROMPTS[:1], do_sample=False, eos_token_id=stop, **LONGER)
    assert torch.equal(out, expected[:, :8])


def test_a_stop_string_ends_a_row(pair):
    model, shell = pair("s_lr", vocab_size=257)
    tokenizer = fast_tokenizer(load_tokenizer("bytes"), context=16)
    with torch.no_grad():
        model.lm_head.weight[128:] = 0  # ascii only
        shell.lm_head.weight[128:] = 0
    expected = literal_greedy(model, PROMPTS[:1])
    stop = chr(expected[0, 7])
    assert stop not in tokenizer.decode(expected[0, :7])
    settings = {"do_sample": False, "stop_strings": stop, "tokenizer": tokenizer, **LONGER}
    assert torch.equal(shell.generate(PROMPTS[:1], **settings), expected[:, :8])


def test_an_unknown_setting_is_refused(pair):
    with pytest.raises(ValueError, match="output_depth_weight"):
        pair()[1].generate(PROMPTS, output_depth_weight=True, **LONGER)


def test_generating_from_embeddings(pair):
    model, shell = pair()
    embeds = shell.get_input_embeddings()(PROMPTS)
    out = shell.generate(inputs_embeds=embeds, do_sample=False, **LONGER)
    assert torch.equal(out, literal_greedy(model, PROMPTS)[:, 5:])


def test_padding_of_the_whole_batch_is_harmless(pair):
    _, shell = pair()
    ids, mask = F.pad(PROMPTS, (2, 0)), F.pad(torch.ones_like(PROMPTS), (2, 0))
    out = shell.generate(ids, attention_mask=mask, do_sample=False, **LONGER)
    assert torch.equal(out[:, 2:], shell.generate(PROMPTS, do_sample=False, **LONGER))


def test_the_static_decode_step_is_one_graph(pair):
    from transformers import StaticCache

    _, shell = pair("s_lr")
    step = torch.compile(shell, fullgraph=True, backend="eager")
    cache = StaticCache(config=shell.config, max_cache_len=8)
    with torch.no_grad():
        shell(PROMPTS, past_key_values=cache)
        logits = step(PROMPTS[:, :1], position_ids=torch.full((2, 1), 5), past_key_values=cache)
        expected = shell(torch.cat([PROMPTS, PROMPTS[:, :1]], dim=1)).logits[:, -1:]
    torch.testing.assert_close(logits.logits, expected)
