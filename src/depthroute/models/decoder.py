"""A Llama-shaped decoder whose residual connections are a scheme of choice."""

import zlib
from collections.abc import Iterator
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from depthroute.models.config import ModelConfig
from depthroute.nn import (
    Attention,
    AttentionContext,
    Documents,
    DuplicatedLatentLinear,
    KVCache,
    Linear,
    LossSums,
    RMSNorm,
    SwiGLU,
    linear_cross_entropy,
)
from depthroute.nn.context import attention_context
from depthroute.nn.loss import chunk_sums
from depthroute.residual import ResidualScheme
from depthroute.residual.base import State

Checkpointing = Literal["none", "layer", "depth_block"]


class DecoderLayer(nn.Module):
    """An attention and an MLP sublayer; it knows no residual scheme.

    Args:
        config: Shape of the decoder.
        index: Place of the layer, from 0; its sites are `2 index` and `2 index + 1`.
        emit_dim: Columns that the scheme wants from each output projection.
        token_null: Whether it wants Softmax1 attention, and its null mass.
    """

    def __init__(
        self, config: ModelConfig, index: int, emit_dim: int, token_null: bool = False
    ) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(
            dim=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_width,
            norm_eps=config.norm_eps if config.qk_norm else None,
            emit_dim=emit_dim,
            low_rank=config.low_rank,
            token_null=token_null,
        )
        self.mlp = SwiGLU(
            config.hidden_size, config.intermediate_size, emit_dim, low_rank=config.low_rank
        )
        self.input_layernorm = RMSNorm(config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.norm_eps)

    def forward(self, state: State, residual: ResidualScheme, context: AttentionContext) -> State:
        """Read, attend, write; read, transform, write."""
        site = 2 * self.index
        cache = None if context.cache is None else context.cache.layer(self.index)
        inputs, state = residual.read(state, site, self.input_layernorm)
        state = residual.write(state, site, self.self_attn(*inputs, context=context, cache=cache))
        inputs, state = residual.read(state, site + 1, self.post_attention_layernorm)
        return residual.write(state, site + 1, self.mlp(*inputs))


class Decoder(nn.Module):
    """Embedding, layers and final norm: tokens in, hidden states out.

    Args:
        config: Shape of the decoder.

    Attributes:
        compute_dtype: Dtype of the residual stream, set by the embedding and followed by every
            product; None is the dtype of the embedding's weight.
        checkpointing: What is recomputed in the backward pass: nothing, each layer, or each depth
            block of the residual scheme, at whose ends the least state is alive.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size must be >= 1, got {config.vocab_size}")
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.checkpointing: Checkpointing = "none"
        self.residual = config.build_residual()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, self.residual.emit_dim, self.residual.token_null)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.norm_eps)

    def forward(
        self,
        ids: Tensor,
        *,
        documents: Documents | None = None,
        cache: KVCache | None = None,
        residual: ResidualScheme | None = None,
    ) -> Tensor:
        """Return the normed hidden states `[B, T, D]`.

        Args:
            ids: Tokens `[B, T]`, integers.
            documents: Boundaries of packed documents; None for one document per row.
            cache: Past tokens, which this call continues and extends.
            residual: A scheme to use in place of the model's own, such as a probe around it.

        Raises:
            ValueError: `ids` of another shape or dtype, or a cache together with documents, or with
                layers that are to be recomputed.
        """
        if ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(f"ids must be integers [B, T], got {ids.dtype} {tuple(ids.shape)}")
        if cache is not None and self.checkpointing != "none" and torch.is_grad_enabled():
            raise ValueError("checkpointing recomputes layers: it cannot fill a cache")
        x = self.embed(ids)
        context = attention_context(
            x,
            head_dim=self.config.head_width,
            theta=self.config.rope_theta,
            documents=documents,
            cache=cache,
        )
        hidden = self.from_embeddings(x, context, residual=residual)
        if cache is not None:
            cache.advance(ids.shape[1])
        return hidden

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[B, T, D]` of tokens `[B, T]`, in the compute dtype."""
        x = self.embed_tokens(ids)
        return x.to(self.compute_dtype or x.dtype)

    def from_embeddings(
        self, x: Tensor, context: AttentionContext, *, residual: ResidualScheme | None = None
    ) -> Tensor:
        """Return the normed hidden states `[B, T, D]` of embeddings `[B, T, D]`.

        Args:
            x: Embeddings, in the dtype that every product is to have.
            context: Positions, and what attention needs to know.
            residual: A scheme to use in place of the model's own.
        """
        residual = residual or self.residual
        state = residual(x)
        for layers in self._groups():
            if self.checkpointing == "none" or not torch.is_grad_enabled():
                state = _run(layers, state, residual, context)
            else:
                state = checkpoint(
                    _run,
                    layers,
                    residual.settle(state),
                    residual,
                    context,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
        return residual.finish(state, self.norm)

    def _groups(self) -> Iterator[list[DecoderLayer]]:
        """Cut the layers into the groups that are recomputed together."""
        if self.checkpointing not in get_args(Checkpointing):
            raise ValueError(
                f"checkpointing must be one of {get_args(Checkpointing)}, "
                f"got {self.checkpointing!r}"
            )
        layers, start = list(self.layers), 0
        if self.checkpointing == "none":
            yield layers
            return
        sites = range(2, 2 * len(layers) + 1, 2)
        if self.checkpointing == "depth_block":
            sites = self.residual.depth_block_ends
        for end in dict.fromkeys((site + 1) // 2 for site in sites):
            yield layers[start:end]
            start = end


def _run(
    layers: list[DecoderLayer], state: State, residual: ResidualScheme, context: AttentionContext
) -> State:
    for layer in layers:
        state = layer(state, residual, context)
    return state


class CausalLM(nn.Module):
    """A decoder with a language-model head.

    Args:
        config: Shape of the model; `vocab_size` must be set.
        seed: Seed of the initial weights; see `init_weights`. None leaves them uninitialised, for
            a checkpoint to fill.

    Raises:
        ValueError: `vocab_size` is 0.
    """

    def __init__(self, config: ModelConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.chunk_sums = chunk_sums
        self.tie_weights()
        if seed is not None:
            self.init_weights(seed)

    def forward(
        self,
        ids: Tensor,
        *,
        documents: Documents | None = None,
        cache: KVCache | None = None,
        residual: ResidualScheme | None = None,
    ) -> Tensor:
        """Return the logits `[B, T, V]`; the arguments are those of `Decoder.forward`."""
        hidden = self.model(ids, documents=documents, cache=cache, residual=residual)
        return self.lm_head(hidden)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        documents: Documents | None = None,
        chunk_tokens: int = 4096,
    ) -> LossSums:
        """Sum the loss over a batch without building all its logits.

        Args:
            ids: Tokens `[B, T]`.
            targets: Next tokens `[B, T]`, or -100 where there is none.
            documents: Boundaries of packed documents.
            chunk_tokens: Tokens whose logits exist at a time.
        """
        hidden = self.model(ids, documents=documents)
        return linear_cross_entropy(
            hidden,
            self.lm_head.weight,
            targets,
            chunk_tokens=chunk_tokens,
            chunk=self.chunk_sums,
        )

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `batch` rows of at most `capacity` tokens."""
        weight = self.model.embed_tokens.weight
        return KVCache(
            self.config.num_hidden_layers,
            batch,
            self.config.kv_heads,
            capacity,
            self.config.head_width,
            dtype=self.model.compute_dtype or weight.dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every weight from `N(0, init_std^2)`, but for what the owner initialises itself.

        Owners are the residual scheme and low-rank maps.

        Each parameter's draw depends on the seed and its name alone. So models that differ in the
        residual scheme share the initial weights of everything else, whatever their order, device
        or sharding.
        """
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        residual = self.config.build_residual()  # whole, while our own may be sharded
        for name, parameter in residual.named_parameters():
            names[id(parameter)] = f"model.residual.{name}"

        def draw(parameter: nn.Parameter, std: float = self.config.init_std) -> None:
            source = torch.Generator().manual_seed(
                zlib.crc32(f"{seed}/{names[id(parameter)]}".encode())
            )
            values = torch.empty(parameter.shape, dtype=torch.float32)
            _fill(parameter, values.normal_(0.0, std, generator=source))

        low_rank = [m for m in self.modules() if isinstance(m, DuplicatedLatentLinear)]
        owned = {id(p) for m in (self.model.residual, *low_rank) for p in m.parameters()}
        for parameter in self.parameters():
            if id(parameter) not in owned:
                draw(parameter)
        for owner in (residual, *low_rank):
            owner.init_weights(draw)
        for parameter, values in zip(
            self.model.residual.parameters(), residual.parameters(), strict=True
        ):
            _fill(parameter, values)

    def to_empty(self, *, device: torch.device | str | None, recurse: bool = True) -> Self:
        """Move to a device without values; the head stays tied, which torch alone forgets."""
        super().to_empty(device=device, recurse=recurse)
        self.tie_weights()
        return self

    def tie_weights(self) -> None:
        """Make the head the embedding, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


def _fill(parameter: Tensor, values: Tensor) -> None:
    """Copy whole values into a parameter, or this rank's part of them if it is sharded."""
    if isinstance(parameter, DTensor):
        values = distribute_tensor(
            values.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,  # every rank has the values: no communication
        )
    parameter.copy_(values)
