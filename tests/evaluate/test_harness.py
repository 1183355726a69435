"""Tasks of lm-evaluation-harness that read local files, against loops over the model."""

import contextlib
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from depthroute.data import load_tokenizer
from depthroute.evaluate import PRESETS, Scorer, Work, harness_model, run_tasks
from depthroute.evaluate.harness import _WithoutBars, find_tasks
from depthroute.evaluate.tasks import load_tasks, mean_over_tasks, run_loaded

lm_eval = pytest.importorskip("lm_eval", reason='needs pip install "depthroute[eval]"')
# of datasets and what it brings, not ours
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

END = 256


@pytest.fixture
def make_scorer(model, tmp_path):
    numbers = itertools.count()

    def make(batch_size: int = 8, context: int = 64) -> Scorer:
        return Scorer(
            model,
            load_tokenizer("bytes"),
            context=context,
            batch_size=batch_size,
            work=Work(tmp_path / f"progress{next(numbers)}", {}),
        )

    return make


@torch.no_grad()
def log_likelihood(model, before: bytes, after: bytes) -> float:
    """Sum over the tokens of `after`, from a sequence of its own."""
    tokens = [END, *before, *after]
    logs = model(torch.tensor([tokens]))[0].double().log_softmax(-1)
    return sum(float(logs[i - 1, tokens[i]]) for i in range(1 + len(before), len(tokens)))


def hits(model, questions, *, normalised: bool) -> list[float]:
    """Answer each question with the likeliest choice, per character if normalised."""
    found = []
    for one in questions:
        logs = [
            log_likelihood(model, one["question"].encode(), b" " + choice.encode())
            / (len(choice) if normalised else 1)
            for choice in one["choices"]
        ]
        found.append(float(logs.index(max(logs)) == one["answer"]))
    return found


def test_accuracy_is_that_of_a_loop_at_any_batch_size(make_scorer, model, tasks, questions):
    raw, normalised = (hits(model, questions, normalised=flag) for flag in (False, True))
    assert 0 < sum(raw) != sum(normalised) > 0  # so that the two can be told apart
    results = [
        run_tasks(make_scorer(size), ["choice"], include_path=str(tasks))[0] for size in (1, 8)
    ]
    for found in results:
        assert found.metric == "acc_norm"
        assert found.scores.tolist() == normalised
        assert found.value == pytest.approx(sum(normalised) / 20)
        assert found.standard_error == pytest.approx(np.std(normalised, ddof=1) / math.sqrt(20))
        assert found.metrics["choice"]["acc,none"] == pytest.approx(sum(raw) / 20)
        assert found.num_cut == 0
    assert results[0].items == results[1].items
    assert len(set(results[0].items)) == 20


def test_a_group_pools_the_items_of_its_tasks(make_scorer, model, tasks, questions):
    (found,) = run_tasks(make_scorer(), ["pair"], include_path=str(tasks))
    right = hits(model, questions, normalised=True)
    assert sorted(found.metrics) == ["choice", "few"]
    assert found.value == pytest.approx((sum(right) + sum(right[:6])) / 26)
    assert len(found.items) == 26


def test_limit_and_solved_examples_reach_the_harness(make_scorer, tasks, questions):
    scorer = make_scorer(context=400)
    seen: list[list[int]] = []
    scorer.log_likelihoods, plain = (
        lambda requests: seen.extend(before for before, _ in requests) or plain(requests),
        scorer.log_likelihoods,
    )
    (found,) = run_tasks(scorer, ["choice"], include_path=str(tasks), num_fewshot=2, limit=3)
    assert len(found.items) == 3
    assert found.num_fewshot == {"choice": 2}
    text = scorer.tokenizer.decode(seen[0])
    assert text.endswith("\n\n" + questions[0]["question"])
    assert text.count("?") == 3


def test_rolling_likelihood_gives_every_token_its_fullest_window(make_scorer, model, tasks):
    text = "abcad dacab"
    scorer = make_scorer(context=4)

    class Request:
        args = (text,)

    (found,) = harness_model(scorer).loglikelihood_rolling([Request])
    expected, tokens = 0.0, [END, *text.encode()]
    for first, last, start in ((1, 4, 0), (5, 8, 4), (9, 11, 7)):  # targets, first token before
        window = tokens[start:last]
        with torch.no_grad():
            logs = model(torch.tensor([window]))[0].double().log_softmax(-1)
        for i in range(first, last + 1):
            expected += float(logs[i - 1 - start, tokens[i]])
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_is_no_mean_has_no_error_and_stays_out_of_the_mean(make_scorer, tasks):
    found = run_tasks(make_scorer(), ["rolling", "choice"], include_path=str(tasks))
    assert found[0].metric == "byte_perplexity"
    assert found[0].value > 1
    assert found[0].scores is found[0].standard_error is None
    assert mean_over_tasks(found) == (found[1].value, found[1].standard_error)
    assert mean_over_tasks(found[:1]) is None


def test_the_mean_weighs_tasks_equally(make_scorer, tasks):
    found = run_tasks(make_scorer(), ["choice", "few"], include_path=str(tasks))
    mean, error = mean_over_tasks(found)
    assert mean == pytest.approx((found[0].value + found[1].value) / 2)
    assert error == pytest.approx(math.hypot(*(one.standard_error for one in found)) / 2)


def test_texts_are_continued_greedily_up_to_the_stop(make_scorer, model, tasks, questions):
    @torch.no_grad()
    def literal(question: str) -> str:
        tokens, new = [END, *question.encode()], []
        for _ in range(6):
            new.append(int(model(torch.tensor([tokens + new]))[0, -1].argmax()))
            if new[-1] in (*b"a", END):
                return bytes(new[:-1]).decode(errors="replace")
        return bytes(new).decode(errors="replace")

    texts = [literal(one["question"]) for one in questions[:8]]
    assert len(set(texts)) > 2
    data = tasks / "text.jsonl"
    answers = [text if i % 2 else text + "x" for i, text in enumerate(texts)]
    lines = [{**one, "choices": [answer]} for one, answer in zip(questions, answers, strict=False)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = run_tasks(make_scorer(), ["text"], include_path=str(tasks))
    assert found.metric == "exact_match"
    assert found.scores.tolist() == [float(i % 2) for i in range(8)]


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"temperature": 0.7}])
def test_sampling_is_refused(make_scorer, settings):
    class Request:
        args = ("a", settings)

    with pytest.raises(ValueError, match="continued greedily, this task asks for"):
        harness_model(make_scorer()).generate_until([Request])


def test_missing_data_are_named_with_what_to_do(make_scorer, tasks):
    with pytest.raises(
        ValueError, match=r"far cannot be run: its data are .*HF_HOME.*include_path"
    ):
        run_tasks(make_scorer(), ["far"], include_path=str(tasks))


@pytest.fixture
def asked_for_all(monkeypatch) -> list[bool]:
    """List whether each index was to hold the harness's tasks, which take seconds to list."""
    import lm_eval.tasks

    asked = []

    class LocalTasks(lm_eval.tasks.TaskManager):
        def __init__(self, *, include_path, include_defaults=True) -> None:
            asked.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", LocalTasks)
    return asked


def test_only_groups_of_local_files_may_hold_tasks_of_the_harness(tasks, asked_for_all):
    find_tasks(["choice", "few"], str(tasks))
    assert asked_for_all == [False]
    find_tasks(["choice", "pair"], str(tasks))
    assert asked_for_all == [False, False, True]


def edited(tasks: Path, name: str, *change: str) -> None:
    """Write a task like `choice` with one text in its file in place of another."""
    text = (tasks / "choice.yaml").read_text().replace("task: choice", f"task: {name}")
    assert change[0] in text
    (tasks / f"{name}.yaml").write_text(text.replace(*change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("output_type", "output_typ"), "output_typ"),
        (("{{question}}", "{{question"), "TemplateSyntaxError"),
        (("test_split: test", "test_split: tst"), "tst"),
        (("metric: acc\n", "metric: accc\n"), "KeyError"),
        (("doc_to_target: answer", "doc_to_target: 9"), "IndexError"),
        (("doc_to_target: answer", 'doc_to_target: "{{answer + 8}}"'), "."),
        (('"{{question}}"', "!function utils.nope"), "utils"),
        (("doc_to_choice: choices", "doc_to_choice: gone"), "."),
    ],
    ids=["key", "jinja", "split", "metric", "answer", "answers", "function", "choices"],
)
def test_a_mistake_in_a_task_file_is_one_line_with_the_tasks_name(
    make_scorer, tasks, change, message
):
    edited(tasks, "wrong", *change)
    with pytest.raises(ValueError, match=rf"^tasks: wrong cannot be run: .*{message}") as caught:
        run_tasks(make_scorer(), ["wrong"], include_path=str(tasks))
    assert "\n" not in str(caught.value)


def test_groups_and_tasks_without_anything_in_them_are_named(make_scorer, tasks, asked_for_all):
    (tasks / "hollow.yaml").write_text("group: hollow\ntask: []\n")
    with pytest.raises(ValueError, match="hollow cannot be run: it holds no tasks"):
        run_tasks(make_scorer(), ["hollow"], include_path=str(tasks))
    (tasks / "odd.yaml").write_text("group: odd\ntask: [choice, nowhere]\n")
    with pytest.raises(ValueError, match="odd cannot be run: "):
        run_tasks(make_scorer(), ["odd"], include_path=str(tasks))
    (tasks / "few.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"few cannot be run: StopIteration$"):
        run_tasks(make_scorer(), ["few"], include_path=str(tasks))


@pytest.mark.parametrize(
    ("name", "message"),
    [("choice", "the log-likelihood of request [0-9]+ is nan"), ("text", "a logit is not finite")],
)
def test_what_is_not_finite_is_an_error(make_scorer, model, tasks, name, message):
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match=f"tasks: {name}: {message}"):
        run_tasks(make_scorer(), [name], include_path=str(tasks))


def test_a_median_of_one_item_is_no_mean(make_scorer, tasks):
    edited(tasks, "middle", "metric: acc_norm", "metric: acc_norm\n    aggregation: median")
    (found,) = run_tasks(make_scorer(), ["middle"], include_path=str(tasks), limit=1)
    assert found.scores is found.standard_error is None


def test_loaded_tasks_can_be_run_again(make_scorer, tasks):
    loaded = load_tasks(["choice"], include_path=str(tasks))
    first, second = (
        run_loaded(make_scorer(context=400), loaded, num_fewshot=2, limit=5)[0] for _ in range(2)
    )
    assert first.items == second.items
    assert first.scores.tolist() == second.scores.tolist()


def test_only_progress_bars_are_kept_off_standard_error(capsys):
    from tqdm import tqdm

    with contextlib.redirect_stderr(_WithoutBars()):
        print("one", file=sys.stderr)
        for _ in tqdm(range(3)):
            pass
        print("two", file=sys.stderr)
    assert capsys.readouterr().err == "one\ntwo\n"


def test_an_unknown_task_is_named_with_the_nearest(make_scorer, tasks, asked_for_all):
    with pytest.raises(ValueError, match='knows no "choise"; did you mean "choice"'):
        run_tasks(make_scorer(), ["choise"], include_path=str(tasks))


def test_a_preset_is_a_list_of_tasks_that_the_harness_has_with_these_metrics():
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    own = Path(lm_eval.__file__).parent / "tasks"
    folders = ("arc", "commonsense_qa", "hellaswag", "openbookqa", "piqa", "siqa", "winogrande")
    paths = [own / folder for folder in folders]
    index = TaskManager(include_path=paths, include_defaults=False).task_index
    assert len(PRESETS["paper8"]) == 8
    for task, metric in PRESETS["paper8"].items():
        config = load_yaml(index[task].yaml_path, resolve_func=False, recursive=True)
        metrics = [one["metric"] for one in config["metric_list"]]
        assert metric == ("acc_norm" if "acc_norm" in metrics else "acc")
