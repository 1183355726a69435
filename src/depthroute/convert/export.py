"""A training run as a Hugging Face folder."""

from pathlib import Path
from typing import Any

from depthroute.config import config_dataclass
from depthroute.convert.card import model_card
from depthroute.convert.code import write_code
from depthroute.convert.hugging_face import to_hugging_face, without_bars
from depthroute.convert.tokenizer import fast_tokenizer
from depthroute.files import new_folder, write_text
from depthroute.models import fold
from depthroute.train import load_model
from depthroute.train.run import load_settings, open_dataset


@config_dataclass
class ExportConfig:
    """Settings of an export.

    Args:
        license: Identifier for the model card, such as "apache-2.0"; it is yours to choose.
    """

    license: str = "unknown"

    def __post_init__(self) -> None:
        if not self.license or not self.license.replace("-", "").replace(".", "").isalnum():
            raise ValueError(
                f'license must be an identifier such as "apache-2.0", got "{self.license}"'
            )


def export_run(
    run: str | Path, out: str | Path, config: ExportConfig, *, with_code: bool = False
) -> None:
    """Write the newest checkpoint of a run as a folder that transformers loads.

    It holds the weights in float32 (safetensors), config, generation config, tokenizer and model
    card, and the code that `trust_remote_code=True` runs: an import of depthroute, or with
    `with_code` all of the files that the model needs. Low-rank maps are folded
    (`depthroute.models.fold`).

    Args:
        run: A run folder.
        out: A new folder.
        config: Settings.
        with_code: Make the folder work where depthroute is not installed.

    Raises:
        FileExistsError: `out` exists.
        ValueError: The run has no checkpoint, or its tokenizer cannot be converted.
        ImportError: transformers is not installed.
    """
    run, out = Path(run), Path(out)
    model = fold(load_model(run))
    settings = load_settings(run)
    dataset = open_dataset(settings.data.path)
    context = settings.data.context
    ids: dict[str, Any] = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), dataset.manifest.end_id
    )
    shell = to_hugging_face(model, max_position_embeddings=context, **ids)
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    shell.generation_config = GenerationConfig(**ids)
    with new_folder(out) as unfinished, without_bars():
        fast_tokenizer(dataset.tokenizer(), context=context).save_pretrained(unfinished)
        try:
            shell.save_pretrained(unfinished)
        except SafetensorError as error:
            raise OSError(f"{out} cannot be written: {error}") from error
        if with_code:
            write_code(unfinished)
        card = model_card(run, settings, dataset.manifest, model, license_id=config.license)
        write_text(unfinished / "README.md", card)
