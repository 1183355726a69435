"""Settings of a decoder in the form of a Hugging Face `config.json`."""

import dataclasses
import difflib
import shutil
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from depthroute.config import from_dict, to_dict
from depthroute.models.config import ModelConfig

ENTRY = "modeling_depthroute"
# what transformers itself writes into a config.json, or hands on when it reads one
_LIBRARY_KEYS = {
    *("model_type", "auto_map", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash"),
    *("attn_implementation", "experts_implementation", "output_attentions", "num_labels"),
    *("quantization_config", "transformers_weights"),
}
_MODEL_KEYS = tuple(field.name for field in dataclasses.fields(ModelConfig))
_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "residual"),
)


class DepthRouteConfig(PreTrainedConfig):
    """The fields of `ModelConfig`, with configs inside it as nested dictionaries.

    Args:
        vocab_size: Rows of the embedding, >= 1.
        residual: The scheme's config, as in a run's TOML file.
        max_position_embeddings: Tokens that the model was trained on at a time; a statement for
            tools, which limits nothing here. None is unknown.
        use_cache: Keep keys and values unless told otherwise; off in training mode.
        pad_token_id: Id of padding; None for none.
        bos_token_id: Id that starts a document; None for none.
        eos_token_id: Id, or ids, that end a document; None for none.

    All others are those of `depthroute.models.ModelConfig`; `num_key_value_heads` and `head_dim`
    are filled in.

    Raises:
        ValueError: A field is unknown, of the wrong type, or contradicts another; also on saving,
            for fields that were set since.
    """

    model_type: ClassVar[str] = "depthroute"
    attribute_map: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
    }

    # transformers builds a config without arguments when it writes one
    vocab_size: int = 257
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 500_000.0
    qk_norm: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    tie_word_embeddings: bool = False
    residual: dict[str, Any] | None = None
    low_rank: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        for key in kwargs.keys() - _LIBRARY_KEYS:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f', did you mean "{nearest[0]}"?' if nearest else ""
            raise ValueError(f'unknown config field "{key}"{hint}')
        if kwargs.pop("model_type", self.model_type) != self.model_type:
            raise ValueError(f'model_type must be "{self.model_type}"')
        if self.residual is None:
            self.residual = {"name": "prenorm"}
        model = self.model_config()
        self.residual = to_dict(model.residual)
        self.low_rank = None if model.low_rank is None else to_dict(model.low_rank)
        self.num_key_value_heads, self.head_dim = model.kv_heads, model.head_width
        self._check_own_fields()
        kwargs["auto_map"] = {
            "AutoConfig": f"{ENTRY}.DepthRouteConfig",
            "AutoModel": f"{ENTRY}.DepthRouteModel",
            "AutoModelForCausalLM": f"{ENTRY}.DepthRouteForCausalLM",
        }
        super().__post_init__(**kwargs)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **fields: Any) -> "DepthRouteConfig":
        """Return the config of a decoder; `fields` are those that `ModelConfig` lacks."""
        return cls(**to_dict(config), **fields)

    def model_config(self) -> ModelConfig:
        """Return the config of the decoder.

        Raises:
            ValueError: A field has a wrong type, or contradicts another.
        """
        config = from_dict(ModelConfig, {key: getattr(self, key) for key in _MODEL_KEYS})
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size must be >= 1, got {config.vocab_size}")
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from the content of a `config.json`, which must state what shapes the model.

        Raises:
            ValueError: It is no table, of another kind of model, or lacks a required field.
        """
        if not isinstance(config_dict, dict):
            raise ValueError(f"the config must be a table, got {config_dict!r}")
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f'model_type must be "{cls.model_type}", as depthroute writes it, got "{kind}"'
            )
        missing = [key for key in _REQUIRED if config_dict.get(key) is None]
        if missing:
            raise ValueError(f"the config lacks {', '.join(missing)}")
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what `config.json` holds: every field of the model, defaults included."""
        return {**super().to_diff_dict(), **{key: getattr(self, key) for key in _MODEL_KEYS}}

    def save_pretrained(
        self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write `config.json` and the code that its `auto_map` names.

        Where depthroute is installed that is one file which imports it; see `depthroute export
        --with-code` for a folder that needs no installation.

        Raises:
            ValueError: A field that was set since the config was made could not be loaded.
        """
        type(self).from_dict(self.to_dict())
        entry = Path(__file__).with_name(f"{ENTRY}.py")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        for file in (entry, *map(Path, get_relative_import_files(entry))):
            shutil.copyfile(file, folder / file.name)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` always writes the code."""

    def _check_own_fields(self) -> None:
        """Check what `ModelConfig` lacks."""
        if type(self.use_cache) is not bool:
            raise ValueError(f"use_cache must be true or false, got {self.use_cache!r}")
        context = self.max_position_embeddings
        if context is not None and (type(context) is not int or context < 1):
            raise ValueError(f"max_position_embeddings must be null or >= 1, got {context!r}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if value is None:
                continue
            several = name == "eos_token_id" and isinstance(value, list)
            for one in value if several else [value]:
                if type(one) is not int or not 0 <= one < self.vocab_size:
                    raise ValueError(f"{name} must be in [0, {self.vocab_size}), got {one!r}")
