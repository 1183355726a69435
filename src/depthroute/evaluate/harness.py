"""A model in the form of lm-evaluation-harness, and its tasks by name."""

import contextlib
import difflib
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from depthroute.evaluate.scoring import Score, Scorer

# names that tasks use for the same thing, in the harness's order
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_LENGTH = 256  # the harness's own
_FEWSHOT_SEED = 1234  # the harness's own


def require_harness() -> str:
    """Return the version of lm-evaluation-harness.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import lm_eval
    except ImportError as error:
        raise ImportError('tasks need lm_eval: pip install "depthroute[eval]"') from error
    return lm_eval.__version__


def harness_model(scorer: Scorer) -> Any:
    """Return a model as the harness wants it, an `lm_eval.api.model.TemplateLM`.

    Every text starts with the end token, as each document does in training.
    """
    require_harness()
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class HarnessModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return scorer.tokenizer.end_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            start = [] if add_special_tokens is False else [self.eot_token_id]
            return start + scorer.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Score]:
            return scorer.log_likelihoods([(before, after) for _, before, after in requests])

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            windows, ends = [], [0]
            for (text,) in (request.args for request in requests):
                tokens = self.tok_encode(text, add_special_tokens=False)
                cut = get_rolling_token_windows(tokens, self.eot_token_id, scorer.context, 1)
                windows += map(make_disjoint_window, cut)
                ends.append(len(windows))
            scores = scorer.log_likelihoods(windows)
            spans = (scores[a:b] for a, b in pairwise(ends))
            return [math.fsum(score.log_likelihood for score in span) for span in spans]

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            alike = defaultdict(list)
            for i, request in enumerate(requests):
                alike[json.dumps(request.args[1], sort_keys=True)].append(i)
            found: dict[int, str] = {}
            for settings, indices in alike.items():
                length, stop = _greedy(json.loads(settings))
                prompts = [self.tok_encode(requests[i].args[0]) for i in indices]
                texts = scorer.continuations(prompts, max_new_tokens=length, stop=stop)
                found.update(zip(indices, texts, strict=True))
            return [found[i] for i in range(len(requests))]

    return HarnessModel()


def find_tasks(names: Sequence[str], include_path: str | None) -> Any:
    """Return an `lm_eval.tasks.TaskManager` that knows the names.

    Args:
        names: Of tasks, groups and tags.
        include_path: Folder with further tasks.

    Raises:
        ValueError: There is no task, group or tag of a name.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:  # without the harness's own tasks, whose index takes seconds
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):  # a group may hold tasks of the harness
            return manager
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
            raise ValueError(f'tasks: lm_eval knows no "{name}"{hint}')
    return manager


@contextlib.contextmanager
def naming_task(name: str) -> Iterator[None]:
    """Say of which task an error is, in one line.

    Args:
        name: Of a task, group or tag.

    Raises:
        ValueError: Whatever a task file, its code or the harness ran into.
        FloatingPointError: The model gave a number that is not finite.
        OSError: The disk, on which progress is kept.
        RuntimeError: The device, or another process.
    """
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"tasks: {name}: {error}") from error
    except (OSError, RuntimeError):  # the device, or another process that died
        raise
    except Exception as error:  # task files and their code fail with any
        kind = "" if type(error) is ValueError else type(error).__name__
        text = ": ".join(filter(None, (kind, " ".join(str(error).split()))))
        raise ValueError(f"tasks: {name} cannot be run: {text}") from error


def load_task(manager: Any, name: str) -> dict[str, Any]:
    """Return a task, or all tasks of a group or tag, in the harness's form.

    Args:
        manager: From `find_tasks`.
        name: Of a task, group or tag.

    Raises:
        ValueError: The data are neither here nor reachable, or there are no tasks.
    """
    with contextlib.redirect_stderr(_WithoutBars()):
        try:
            loaded = manager.load([name])
        except OSError as error:
            raise ValueError(
                f"its data are missing: {error}. Run the same command once on a machine with "
                "network and copy its Hugging Face cache (HF_HOME), or write a task that reads "
                "local files and name its folder in include_path"
            ) from error
        except RuntimeError as error:  # of datasets, about a kind that it has given up
            raise ValueError(f"its data cannot be loaded: {error}") from error
    if not loaded["tasks"]:
        raise ValueError("it holds no tasks")
    return loaded


def run_task(
    model: Any, loaded: dict[str, Any], *, num_fewshot: int, limit: int | None
) -> dict[str, Any]:
    """Return what the harness finds out about a task or group, results of each item included.

    Args:
        model: From `harness_model`.
        loaded: From `load_task`; may be run again.
        num_fewshot: Solved examples; a task that fixes 0 keeps it.
        limit: First items only.
    """
    from lm_eval.evaluator import evaluate

    with contextlib.redirect_stderr(_WithoutBars()):
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", num_fewshot)
            task.set_fewshot_seed(_FEWSHOT_SEED)
        # errors of means are ours to compute: the harness's may start processes
        return evaluate(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=0)


def is_mean(task: Any, metric: str) -> bool:
    """Tell whether a metric is the mean of one number per item, by what the task declares.

    Args:
        task: One of those in `load_task`'s answer.
        metric: Its name.
    """
    from lm_eval.api.metrics import mean

    return task.aggregation().get(metric, mean) is mean  # mean is the harness's default


def _greedy(settings: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the length and the stops that a task asks for.

    Raises:
        ValueError: It asks for sampling or beams.
    """
    # as in the harness, a temperature alone asks for sampling
    sampled = settings.get("do_sample")
    if sampled is None:
        sampled = float(settings.get("temperature") or 0) > 0
    if sampled or settings.get("num_beams", 1) != 1:
        raise ValueError(f"texts are continued greedily, this task asks for {settings}")
    lengths = (settings[key] for key in _LENGTHS if settings.get(key) is not None)
    stop = settings.get("until") or []
    return int(next(lengths, _DEFAULT_LENGTH)), [stop] if isinstance(stop, str) else stop


class _WithoutBars(io.TextIOBase):
    """Standard error without the harness's own progress bars, which would tear ours."""

    def __init__(self) -> None:
        self.stream, self.in_bar = sys.stderr, False

    def write(self, text: str) -> int:
        ends_bar = self.in_bar and text == "\n"
        if text:
            self.in_bar = "\r" in text
        return len(text) if self.in_bar or ends_bar else self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()
