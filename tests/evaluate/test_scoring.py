from pathlib import Path

import pytest
import torch

from depthroute.data import load_tokenizer
from depthroute.data.tokenizer import ByteTokenizer
from depthroute.evaluate import Scorer, Work

END = 256


@pytest.fixture
def make_scorer(model, tmp_path):
    def make(batch_size: int = 4, context: int = 24) -> Scorer:
        return Scorer(
            model,
            load_tokenizer("bytes"),
            context=context,
            batch_size=batch_size,
            work=Work(tmp_path / "progress", {}),
        )

    return make


def draw(length: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(256, (length,), generator=source).tolist()


REQUESTS = [([END, *draw(3 + 5 * i % 11, i)], draw(1 + 3 * i % 7, 50 + i)) for i in range(11)]


@torch.no_grad()
def literal_score(model, before, after):
    """Score token by token, each from a sequence of its own."""
    total, greedy, tokens = 0.0, True, list(before)
    for token in after:
        logits = model(torch.tensor([tokens]))[0, -1].double()
        total += float(logits[token] - torch.logsumexp(logits, 0))
        greedy &= int(logits.argmax()) == token
        tokens.append(token)
    return total, greedy


@torch.no_grad()
def literal_text(model, prompt, length):
    """Continue greedily from the whole sequence each time."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == END:
            break
    return load_tokenizer("bytes").decode(t for t in tokens[len(prompt) :] if t != END)


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_log_likelihoods_are_literal_sums(make_scorer, model, batch_size):
    found = make_scorer(batch_size).log_likelihoods(REQUESTS)
    expected = [literal_score(model, *request) for request in REQUESTS]
    assert [one.log_likelihood for one in found] == pytest.approx(
        [log for log, _ in expected], rel=1e-5
    )
    assert [one.is_greedy for one in found] == [greedy for _, greedy in expected]


def test_a_greedy_continuation_is_called_so(make_scorer, model):
    prompt = [END, *b"abc"]
    with torch.no_grad():
        top = int(model(torch.tensor([prompt]))[0, -1].argmax())
    found = make_scorer().log_likelihoods([(prompt, [top]), (prompt, [(top + 1) % 256])])
    assert [one.is_greedy for one in found] == [True, False]


def test_log_likelihoods_of_a_bfloat16_model_are_not_rounded_to_bfloat16(make_scorer, model):
    model.model.compute_dtype = torch.bfloat16
    requests = [([END, *b"ab"], [token]) for token in range(256)]
    logs = torch.tensor([s.log_likelihood for s in make_scorer().log_likelihoods(requests)])
    assert len(logs.unique()) == 256
    assert float((logs - logs.bfloat16().float()).abs().max()) > 1e-3
    assert float(logs.exp().sum()) < 1 + 1e-5  # all but the end token


def test_a_long_request_loses_its_beginning_and_is_counted(make_scorer):
    long, short = draw(40, 1), draw(3, 2)
    scorer = make_scorer(context=16)
    found = scorer.log_likelihoods([(long, short), (long[-14:], short)])
    assert found[0].log_likelihood == pytest.approx(found[1].log_likelihood, rel=1e-6)
    assert scorer.num_cut == 1


@pytest.mark.parametrize("request_", [([], [1]), ([1], []), ([1], [2] * 25)])
def test_a_request_without_context_or_continuation_is_refused(make_scorer, request_):
    with pytest.raises(ValueError, match="expected tokens before a continuation of 1 to 24"):
        make_scorer().log_likelihoods([request_])


@pytest.mark.parametrize("batch_size", [1, 8])
def test_continuations_are_greedy(make_scorer, model, batch_size):
    prompts = [[END, *draw(2 + i % 3, i)] for i in range(7)]
    found = make_scorer(batch_size).continuations(prompts, max_new_tokens=9)
    assert found == [literal_text(model, prompt, 9) for prompt in prompts]


class Quoting(ByteTokenizer):
    def decode(self, ids):
        return f"'{super().decode(ids)}'"

    def save(self, folder):
        (Path(folder) / "quoting").touch()


def test_texts_of_another_tokenizer_are_decoded_anew(make_scorer):
    plain, quoting = make_scorer(), make_scorer()
    quoting.tokenizer = Quoting()
    texts = [s.continuations([[END, *b"abc"]], max_new_tokens=9)[0] for s in (plain, quoting)]
    assert texts[1] == f"'{texts[0]}'"


def test_a_continuation_ends_before_its_first_stop(make_scorer, model):
    prompts = [[END, *draw(4, i)] for i in range(6)]
    whole = [literal_text(model, prompt, 12) for prompt in prompts]
    stop = [whole[0][2:4], whole[1][3]]
    found = make_scorer().continuations(prompts, max_new_tokens=12, stop=stop)
    cut = [min([text.find(s) for s in stop if s in text] or [len(text)]) for text in whole]
    assert found == [text[:n] for text, n in zip(whole, cut, strict=True)]
    assert found != whole


def test_new_tokens_must_leave_room_for_the_prompt(make_scorer):
    with pytest.raises(ValueError, match="24 new tokens leave no room"):
        make_scorer().continuations([[END]], max_new_tokens=24)
    scorer = make_scorer()
    long = [END, *draw(30, 0)]
    one, other = scorer.continuations([long, long[-15:]], max_new_tokens=9)
    assert one == other
    assert scorer.num_cut == 1
