"""Evaluation on a CUDA device, in bfloat16 as by default there, against float32 on the CPU."""

import pytest
import torch

from depthroute.data import load_tokenizer
from depthroute.evaluate import EvaluateConfig, Scorer, Work, evaluate
from depthroute.train import load_model, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
SHAPE = ("model.hidden_size=128", "model.num_attention_heads=2", "data.context=64")


@pytest.fixture
def run(make_run):
    return train(make_run(*SHAPE, "data.val_tokens=512", "train.device=cuda")).path


def test_loss_in_bfloat16_is_that_of_the_cpu_in_float32(run):
    cuda, cpu = (
        evaluate(run, EvaluateConfig(device=device)).loss.total.loss_nats
        for device in ("cuda", "cpu")
    )
    assert cuda != cpu
    assert cuda == pytest.approx(cpu, rel=5e-3)


def test_scores_and_texts_do_not_depend_on_the_batch(run, tmp_path):
    model = load_model(run, device="cuda")
    requests = [([256, *range(n)], [7 * n % 256] * (1 + n % 4)) for n in range(3, 40)]
    prompts = [before for before, _ in requests]
    found = []
    for batch_size in (1, 8):
        scorer = Scorer(
            model,
            load_tokenizer("bytes"),
            context=64,
            batch_size=batch_size,
            work=Work(tmp_path / str(batch_size), {}),
        )
        scores = [one.log_likelihood for one in scorer.log_likelihoods(requests)]
        found.append((scores, scorer.continuations(prompts, max_new_tokens=5, stop=["a"])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert found[0][1] == found[1][1]
