"""Shells around the decoder that transformers can load, save, train and generate with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from depthroute.models.decoder import Decoder
from depthroute.models.hf.attention import OUTPUT_CACHE, transformers_context
from depthroute.models.hf.config import DepthRouteConfig
from depthroute.nn import DuplicatedLatentLinear, Linear
from depthroute.residual.base import ResidualScheme
from depthroute.residual.probe import Probe


@dataclass
class DepthRouteOutput(BaseModelOutputWithPast):
    """Hidden states, and on request what made them.

    Attributes:
        hidden_states: What the attention of each layer reads, normed (of several roles the
            first), and as the last of L + 1 entries what the head reads; `[B, T, D]` each.
        depth_weights: Weights of each read over its sources, 2 L + 1 entries
            `[roles, S, B, T, H]`, without gradient; None for a scheme that has none.
    """

    depth_weights: tuple[Tensor, ...] | None = None


@dataclass
class DepthRouteCausalLMOutput(CausalLMOutputWithPast):
    """Logits and loss; the other fields are those of `DepthRouteOutput`."""

    depth_weights: tuple[Tensor, ...] | None = None


class DepthRoutePreTrainedModel(PreTrainedModel):
    """What both shells share: loading, initial weights, and the pass through the decoder.

    Parameters have the names that they have in `depthroute.models.CausalLM`.
    """

    config: DepthRouteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ("Decoder",)  # every read sees sources of all depths: one device
    _keep_in_fp32_modules_strict = ("model.residual",)

    def __init__(self, config: DepthRouteConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config.model_config())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all parameters but routing's."""
        return self.model.embed_tokens.weight.dtype

    @property
    def gradient_checkpointing(self) -> bool:
        """Tell whether layers are recomputed in the backward pass."""
        return self.model.checkpointing != "none"

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: the config writes the code whenever a model is saved."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.model.embed_tokens = value

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        settings = getattr(gradient_checkpointing_func, "keywords", {"use_reentrant": False})
        function = getattr(gradient_checkpointing_func, "func", torch.utils.checkpoint.checkpoint)
        plain = function is torch.utils.checkpoint.checkpoint and every_n_layers == 1
        if enable and not (plain and settings == {"use_reentrant": False}):
            raise ValueError(
                "gradient checkpointing recomputes each layer, with use_reentrant=False, without "
                f"offloading, got {settings}, every_n_layers={every_n_layers}"
            )
        self.model.checkpointing = "layer" if enable else "none"

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters that no checkpoint gave; a scheme decides about its own."""

        def draw(parameter: nn.Parameter, std: float = self.config.init_std) -> None:
            nn.init.normal_(parameter, std=std)  # skips those that were loaded

        scheme = self.model.residual
        if any(module is part for part in scheme.modules()):  # it knows its parts, not they it
            loaded = {
                parameter: parameter.clone()
                for parameter in scheme.parameters()
                if getattr(parameter, "_is_hf_initialized", False)
            }
            scheme.init_weights(draw)
            for parameter, value in loaded.items():
                parameter.copy_(value)
        elif isinstance(module, DuplicatedLatentLinear):
            module.init_weights(draw)
        elif isinstance(module, Linear | nn.Linear | nn.Embedding):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    draw(parameter)
                else:
                    nn.init.zeros_(parameter)

    def _decode(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
        output_depth_weights: bool,
    ) -> dict[str, Any]:
        """Run the decoder; returns the fields of `DepthRouteOutput`."""
        self._check(input_ids, inputs_embeds, attention_mask, cache)
        cache = self._cache_to_fill(cache, use_cache)
        x = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds.to(self.dtype)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shown = _Shown(
            reads={} if _asked(output_hidden_states, self.config.output_hidden_states) else None,
            attentions=[] if _asked(output_attentions, self.config.output_attentions) else None,
            weights={} if output_depth_weights else None,
        )
        context = transformers_context(
            self.config,
            x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            token_null=self.model.residual.token_null,
            attentions=shown.attentions,
        )
        # products follow the dtype of x by themselves; autocast would take routing with them
        with torch.autocast(x.device.type, enabled=False):
            hidden = self.model.from_embeddings(x, context, residual=shown.by(self.model.residual))
        return {
            "last_hidden_state": hidden,
            OUTPUT_CACHE: None if use_cache is False else cache,
            # reads of attention sublayers, and the last one
            "hidden_states": None if shown.reads is None else tuple(shown.reads.values())[::2],
            "attentions": None if shown.attentions is None else tuple(shown.attentions),
            "depth_weights": tuple(shown.weights.values()) if shown.weights else None,
        }

    def _check(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
    ) -> None:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if input_ids is not None:
            if input_ids.ndim != 2 or input_ids.numel() == 0 or input_ids.is_floating_point():
                got = f"{input_ids.dtype} {tuple(input_ids.shape)}"
                raise ValueError(f"input_ids must be integers [B, T] with T >= 1, got {got}")
        elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            got = tuple(inputs_embeds.shape)
            raise ValueError(f"inputs_embeds must be [B, T, {self.config.hidden_size}], got {got}")
        if attention_mask is not None and attention_mask.ndim not in (2, 4):
            raise ValueError(
                "attention_mask must be [B, past + T] or [B, 1, T, past + T], got "
                f"{tuple(attention_mask.shape)}"
            )
        ready = attention_mask is not None and attention_mask.ndim == 4
        if ready and attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                "an attention_mask of four dimensions must be boolean or what is added to the "
                f"scores, got {attention_mask.dtype}"
            )
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f"the cache must be a transformers.Cache, got {type(cache).__name__}")
        if any(parameter.is_meta for parameter in self.model.residual.parameters()):
            raise ValueError(
                "the routing parameters are on the meta device: give model.residual a device with "
                'memory; a device map may put "model.layers" alone on "disk"'
            )

    def _cache_to_fill(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the given cache, or a new one where one is wanted."""
        recomputes = self.gradient_checkpointing and torch.is_grad_enabled()
        if recomputes and (use_cache or cache is not None):
            raise ValueError("gradient checkpointing recomputes layers: it cannot fill a cache")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not recomputes
        return DynamicCache(config=self.config) if use_cache and cache is None else cache


class _Shown(NamedTuple):
    """What a pass is to show, by site or layer; None for what it need not."""

    reads: dict[int, Tensor] | None
    attentions: list[Tensor] | None
    weights: dict[int, Tensor] | None

    def by(self, scheme: ResidualScheme) -> ResidualScheme:
        """Return the scheme, within a probe if reads or weights are to be shown."""
        if self.reads is None and self.weights is None:
            return scheme
        reads = self.reads

        def show(site: int, inputs: tuple[Tensor, ...]) -> None:
            reads[site] = inputs[0]

        return Probe(
            scheme,
            None if self.weights is None else self.weights.__setitem__,
            reads=None if reads is None else show,
        )


def _asked(argument: bool | None, default: bool | None) -> bool:
    return bool(default if argument is None else argument)


class DepthRouteModel(DepthRoutePreTrainedModel):
    """The decoder without a head."""

    _keys_to_ignore_on_load_unexpected = ("lm_head.weight",)

    def __init__(self, config: DepthRouteConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_depth_weights: bool = False,
        return_dict: bool | None = None,
        past_key_values: Cache | None = None,
    ) -> DepthRouteOutput | tuple[Any, ...]:
        """Return the normed hidden states; the arguments are those of `DepthRouteForCausalLM`."""
        fields = self._decode(
            input_ids,
            inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_cache(cache, past_key_values),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_depth_weights=output_depth_weights,
        )
        output = DepthRouteOutput(**fields)
        return output.to_tuple() if _as_tuple(self.config, return_dict) else output


class DepthRouteForCausalLM(DepthRoutePreTrainedModel, GenerationMixin):
    """The decoder with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: DepthRouteConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_depth_weights: bool = False,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: Cache | None = None,
    ) -> DepthRouteCausalLMOutput | tuple[Any, ...]:
        """Return logits, and on request a loss and what made the logits.

        Args:
            input_ids: Tokens `[B, T]`.
            attention_mask: `[B, past + T]`, 0 for padding, on either side.
            position_ids: `[1 or B, T]`; the default counts a row's real tokens. Where they restart,
                without mask and past, a packed document begins.
            cache: Past keys and values; routing needs none.
            inputs_embeds: Embeddings `[B, T, D]` in place of `input_ids`.
            labels: Tokens `[B, T]`, shifted here, -100 where there is none; for a mean loss.
            use_cache: Return a cache; None asks the config, and is False in training mode.
            logits_to_keep: Logits of the last n tokens, or of these positions; 0 for all.
            output_hidden_states: Return what layers read; see `DepthRouteOutput`.
            output_attentions: Return attention weights; "eager" attention alone has them.
            output_depth_weights: Return depth weights; see `DepthRouteOutput`.
            return_dict: False returns a tuple.
            num_items_in_batch: Divisor of the summed loss, in place of the number of labels.
            past_key_values: Older name of `cache`.

        Raises:
            ValueError: Arguments that contradict each other.
        """
        fields = self._decode(
            input_ids,
            inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_cache(cache, past_key_values),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_depth_weights=output_depth_weights,
        )
        hidden = fields.pop("last_hidden_state")
        all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and not all_logits:
            raise ValueError("labels need the logits of all tokens: leave logits_to_keep at 0")
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be >= 0, got {logits_to_keep}")
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        output = DepthRouteCausalLMOutput(loss=loss, logits=logits, **fields)
        return output.to_tuple() if _as_tuple(self.config, return_dict) else output

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the arguments of the next `forward`, without the tokenizer of stop strings."""
        kwargs.pop("tokenizer", None)
        return super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )


def _one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    if cache is not None and past_key_values is not None:
        raise ValueError("give the cache once, as cache or as past_key_values")
    return past_key_values if cache is None else cache


def _as_tuple(config: DepthRouteConfig, return_dict: bool | None) -> bool:
    return not (config.return_dict if return_dict is None else return_dict)
