"""Settings of an evaluation."""

from pathlib import Path
from typing import Literal

from depthroute.config import config_dataclass
from depthroute.train.config import ComputeDtype, Device

MAX_RESAMPLES = 1_000_000


@config_dataclass
class EvaluateConfig:
    """What is measured of a model: the newest checkpoint of a run, or a Hugging Face folder.

    Args:
        tokens: Size of the token set of the loss, rounded down to whole windows; "all", or more
            than it holds, takes the whole split, 0 leaves the loss out.
        split: Split of the dataset that the loss is measured on.
        data: Dataset folder of the loss; None is the run's own. A Hugging Face folder has none.
        context: Tokens per window, and most tokens of a request; None is that of training.
        mask_documents: Keep attention within documents in the loss; None is as in training, and
            true for a Hugging Face folder, which does not say.
        tasks: Tasks, groups and tags of lm-evaluation-harness, or `"paper8"`; an array, or one
            text with commas.
        include_path: Folder with task files of your own, in the harness's YAML form.
        num_fewshot: Solved examples before each question, >= 0; tasks that fix 0 keep it.
        limit: Take the first questions of each task only; None takes all.
        batch_size: Windows, or requests, per forward pass.
        bootstrap: Resamples of a difference's interval, >= 100.
        compare_with: Folder that is evaluated alike; differences are this model minus that one.
        out: Folder of the results; None is `evaluation` in the folder of the model.
        device: "auto" takes CUDA if there is one.
        compute_dtype: As in training: "auto" is bfloat16 on CUDA, float32 elsewhere.
    """

    tokens: int | Literal["all"] = "all"
    split: str = "val"
    data: str | None = None
    context: int | None = None
    mask_documents: bool | None = None
    tasks: str | tuple[str, ...] = ()
    include_path: str | None = None
    num_fewshot: int = 0
    limit: int | None = None
    batch_size: int = 8
    bootstrap: int = 2000
    compare_with: str | None = None
    out: str | None = None
    device: Device = "auto"
    compute_dtype: ComputeDtype = "auto"

    def __post_init__(self) -> None:
        for name, least in (("num_fewshot", 0), ("batch_size", 1), ("bootstrap", 100)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.bootstrap > MAX_RESAMPLES:
            raise ValueError(f"bootstrap must be <= {MAX_RESAMPLES:,}, got {self.bootstrap:,}")
        for name, default in (("limit", "all"), ("context", "that of training")):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be >= 1, or left out for {default}, got {getattr(self, name)}"
                )
        if self.tokens != "all" and self.tokens < 0:
            raise ValueError(f'tokens must be "all" or >= 0, got {self.tokens}')
        if self.out == "":
            raise ValueError("out must be a folder, or left out for that of the model, got none")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"include_path must be a folder, got {self.include_path}")
        if self.tokens == 0 and not self.task_names:
            raise ValueError("nothing to measure: tokens is 0 and there are no tasks")
        if len(set(self.task_names)) < len(self.task_names) or "" in self.task_names:
            raise ValueError(f"tasks must be different names, got {self.tasks!r}")

    @property
    def task_names(self) -> tuple[str, ...]:
        """Return the names in `tasks`."""
        if not isinstance(self.tasks, str):
            return self.tasks
        return tuple(name.strip() for name in self.tasks.split(",")) if self.tasks else ()
