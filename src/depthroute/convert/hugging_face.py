"""A model of this package as a Hugging Face model, and back as a start for training."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from depthroute.config import config_dataclass, dump
from depthroute.files import new_folder, write_text
from depthroute.models import CausalLM, ModelConfig
from depthroute.train.checkpoint import save_checkpoint


@config_dataclass
class _Start:
    """The part of a run file that an imported model decides."""

    @config_dataclass
    class Train:
        init_from: str

    model: ModelConfig
    train: Train


def to_hugging_face(model: CausalLM, **fields: Any) -> Any:
    """Return the same model as a `DepthRouteForCausalLM`, which shares its weights.

    It computes in the dtype of the weights: the decoder's `compute_dtype` does not come along.

    Args:
        model: The model; its weights should be float32, as trained.
        fields: Fields of `DepthRouteConfig` beside the model's, such as `eos_token_id`.

    Raises:
        TypeError: `model` is no `CausalLM`.
    """
    from depthroute.models.hf import DepthRouteConfig, DepthRouteForCausalLM

    if not isinstance(model, CausalLM):
        raise TypeError(f"model must be a CausalLM, got {type(model).__name__}")
    config = DepthRouteConfig.from_model_config(
        model.config, dtype=str(model.lm_head.weight.dtype).removeprefix("torch."), **fields
    )
    with torch.device("meta"):
        shell = DepthRouteForCausalLM(config)
    shell.load_state_dict(model.state_dict(), assign=True)
    shell.tie_weights()
    return shell.eval()


def from_hugging_face(shell: Any) -> CausalLM:
    """Return the model in a `DepthRouteForCausalLM`, which shares its weights.

    Raises:
        TypeError: `shell` is no `DepthRouteForCausalLM`.
    """
    # by its name: the class may come from a folder with code of its own
    if "DepthRouteForCausalLM" not in (kind.__name__ for kind in type(shell).__mro__):
        raise TypeError(f"shell must be a DepthRouteForCausalLM, got {type(shell).__name__}")
    with torch.device("meta"):
        model = CausalLM(shell.config.model_config(), seed=None)
    model.load_state_dict(shell.state_dict(), assign=True)
    model.tie_weights()
    return model


def import_model(folder: str | Path, out: str | Path) -> ModelConfig:
    """Make a Hugging Face folder of this architecture the start of a run.

    `out` holds `start.toml`, a base for run files; the weights in float32, as a checkpoint that
    `train.init_from` takes; and `tokenizer.json`, if the folder has one, so that
    `depthroute prepare ... tokenizer=OUT` makes data of the same tokens.

    Args:
        folder: A local folder that `save_pretrained` or `depthroute export` wrote.
        out: A new folder.

    Returns:
        The model's config.

    Raises:
        FileExistsError: `out` exists.
        ValueError: The folder holds another architecture, or its tensors are not exactly those of
            its config.
    """
    folder, out = Path(folder), Path(out)
    with new_folder(out) as unfinished:
        model = from_hugging_face(load_shell(folder))
        save_checkpoint(unfinished / "checkpoints", 0, model, [], keep=1)
        start = _Start(model=model.config, train=_Start.Train(init_from=str(out)))
        write_text(unfinished / "start.toml", dump(start))
        if (folder / "tokenizer.json").is_file():
            shutil.copyfile(folder / "tokenizer.json", unfinished / "tokenizer.json")
    return model.config


def load_shell(folder: str | Path) -> Any:
    """Load a folder as a `DepthRouteForCausalLM`, in float32, on the CPU.

    Its own code is not run: the classes are those of this package.

    Args:
        folder: A local folder that `save_pretrained` or `depthroute export` wrote.

    Raises:
        ValueError: A file is missing or damaged, or the folder holds another architecture, or its
            tensors are not exactly those of its config.
        ImportError: transformers is not installed.
    """
    from depthroute.models.hf import DepthRouteForCausalLM

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no Hugging Face folder: it has no config.json")
    from safetensors import SafetensorError  # which transformers brings

    try:
        with without_bars():
            shell, info = DepthRouteForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below, with the others
            )
    # the last three are what transformers raises for values of its own fields
    except (OSError, ValueError, SafetensorError, AttributeError, TypeError, ImportError) as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    wrong = {kind: sorted(map(str, info[kind])) for kind in info if info[kind]}
    if wrong:
        raise ValueError(f"the tensors in {folder} do not fit its config.json: {wrong}")
    return shell


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars where a log may be written."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
