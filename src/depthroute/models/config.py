"""Settings of a decoder."""

import torch

from depthroute.config import config_dataclass
from depthroute.nn.low_rank import LowRankConfig, Projection
from depthroute.residual import PreNormConfig, ResidualConfig, ResidualScheme, build_residual


@config_dataclass
class ModelConfig:
    """Shape of a decoder; the names are those of Llama-style Hugging Face configs.

    Args:
        vocab_size: Rows of the embedding; 0 takes the tokenizer's when a run is set up.
        hidden_size: Width D of the residual stream.
        intermediate_size: Width of the SwiGLU hidden layer.
        num_hidden_layers: L layers, each an attention and an MLP sublayer.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; None for as many as query heads.
        head_dim: Width of a head; None for `hidden_size / num_attention_heads`.
        rope_theta: RoPE base.
        qk_norm: Normalise queries and keys per head before RoPE.
        norm_eps: The one epsilon of every norm, key norms included.
        init_std: Standard deviation of every weight at the start.
        tie_word_embeddings: Let the head use the embedding's matrix.
        residual: The residual scheme.
        low_rank: Low-rank maps in place of matrices of the sublayers; None leaves all full.
    """

    vocab_size: int = 0
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 500_000.0
    qk_norm: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    tie_word_embeddings: bool = False
    residual: ResidualConfig = PreNormConfig()
    low_rank: LowRankConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.vocab_size < 0:
            raise ValueError(f"vocab_size must be >= 0, got {self.vocab_size}")
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta must be > 1, got {self.rope_theta}")
        if self.kv_heads < 1 or self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, "
                f"got {self.kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size={self.hidden_size} unless head_dim "
                f"is given, got {self.num_attention_heads}"
            )
        if self.head_width < 2 or self.head_width % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_width}")
        if self.low_rank is not None:
            self.low_rank.check(self.projections)
        with torch.device("meta"):  # a scheme checks itself against width and depth
            self.build_residual()

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return (
            self.num_attention_heads
            if self.num_key_value_heads is None
            else self.num_key_value_heads
        )

    @property
    def head_width(self) -> int:
        """Return the width of a head."""
        return (
            self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim
        )

    @property
    def projections(self) -> dict[Projection, tuple[int, int]]:
        """Return the (input, output) widths of the matrices of a layer, emitted rows left out."""
        dim, hidden = self.hidden_size, self.intermediate_size
        query, key = (n * self.head_width for n in (self.num_attention_heads, self.kv_heads))
        return {
            "q": (dim, query),
            "k": (dim, key),
            "v": (dim, key),
            "o": (query, dim),
            "gate": (dim, hidden),
            "up": (dim, hidden),
            "down": (hidden, dim),
        }

    def build_residual(self) -> ResidualScheme:
        """Build the residual scheme for this width and depth."""
        kinds = ("attention", "mlp") * self.num_hidden_layers
        return build_residual(self.residual, dim=self.hidden_size, kinds=kinds, eps=self.norm_eps)
