"""One decoding step in buffers that stay where they are, recorded in a CUDA graph."""

import torch
from torch import Tensor

from depthroute.models.decoder import CausalLM
from depthroute.nn import CacheAt, JoinedWeights, KVCache
from depthroute.nn.context import step_context

# steps before the one that is recorded: libraries set themselves up, kernels are loaded
_WARM_UP = 2


def next_logits(model: CausalLM, ids: Tensor, cache: CacheAt) -> Tensor:
    """Store one token per row in a cache and return the logits of the tokens after them.

    Args:
        model: The model.
        ids: Tokens `[B, 1]`.
        cache: Where they go.

    Returns:
        `[B, V]`, float32.
    """
    decoder = model.model
    x = decoder.embed(ids)
    config = decoder.config
    context = step_context(x, cache, head_dim=config.head_width, theta=config.rope_theta)
    return model.lm_head(decoder.from_embeddings(x, context)[:, -1]).float()


class DecodeStep:
    """Continue a cache by one token per row and call.

    On a CUDA device the third call records the step in a CUDA graph, which it and all later calls
    replay: the launches of a step, hundreds of small kernels, then cost one. Between calls nothing
    changes but the entries of the cache.

    Args:
        model: The model; its weights must stay what and where they are.
        cache: Holds the prompts; each call extends it.
        cuda_graph: Record; without effect on other devices.

    Attributes:
        joined: Output projections with what they emit, in one piece, for the pass over the
            prompts as well; steps use them by themselves.
    """

    def __init__(self, model: CausalLM, cache: KVCache, *, cuda_graph: bool = True) -> None:
        entries = cache.entries
        self.model, self.cache, self.joined = model, cache, JoinedWeights(model)
        self.records = cuda_graph and entries.is_cuda
        self.graph: torch.cuda.CUDAGraph | None = None
        self._num_calls = 0
        self._ids = torch.zeros(entries.shape[2], 1, dtype=torch.int64, device=entries.device)
        self._at = CacheAt(entries, torch.zeros(1, dtype=torch.int64, device=entries.device))
        self._logits: Tensor

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits `[B, V]`, float32, after tokens `[B, 1]`; the next call changes them.

        Raises:
            ValueError: The cache is full.
        """
        if self.cache.length == self.cache.capacity:
            raise ValueError(f"the cache is full: it holds {self.cache.capacity} tokens a row")
        self._ids.copy_(ids)
        self._at.position.fill_(self.cache.length)
        if self.records and self.graph is None and self._num_calls == _WARM_UP:
            self._record()
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        self._num_calls += 1
        self.cache.advance(1)
        return self._logits

    def _record(self) -> None:
        """Record the step, which does not run it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self.graph = graph

    def _run(self) -> None:
        with self.joined:
            self._logits = next_logits(self.model, self._ids, self._at)
