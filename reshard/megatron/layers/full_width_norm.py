"""RMS norms over all heads of queries, or of keys, together. Megatron-Core's normalize each head by
itself."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from reshard.megatron.layers.specs import standard_specs


class FullWidthNorm(torch.nn.Module):
    """RMS norm of ``[sequence, batch, local heads, head dim]`` over the heads of all tensor-parallel ranks.

    Every rank has the whole weight ``[heads * head dim]``: Megatron sums the gradients of ``q_layernorm`` and
    ``k_layernorm`` over those ranks, where each has some of its own heads' only.
    """

    heads: str  # the field of Megatron's config with their number

    def __init__(self, hidden_size: int, config: Any, eps: float, **_: Any) -> None:
        super().__init__()
        self.total, self.eps = getattr(config, self.heads), eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        ones = torch.ones(self.total * hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, dim = x.shape[2:]
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        repeats = ranks * heads // self.total  # ranks that have the same keys, where they exceed them
        first = parallel_state.get_tensor_model_parallel_rank() // repeats * heads
        wide = x.float()
        squares = wide.pow(2).sum((2, 3), keepdim=True)
        if ranks > 1:
            squares = reduce_from_tensor_model_parallel_region(squares)
            squares = copy_to_tensor_model_parallel_region(squares) / repeats
        normed = wide * torch.rsqrt(squares / (self.total * dim) + self.eps)
        weight = self.weight.view(self.total, dim)[first : first + heads]
        return weight * normed.to(x.dtype)


class QueryNorm(FullWidthNorm):
    """The norm of queries."""

    heads = "num_attention_heads"


class KeyNorm(FullWidthNorm):
    """The norm of keys."""

    heads = "num_query_groups"


def specs(config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return the specs of the decoder layers of a virtual stage, and of the model's last layer."""
    decoder, last = standard_specs(config, transformer_impl, vp_stage)
    for layer in (*decoder.layer_specs, last):
        with_full_width_norms(layer)
    return decoder, last


def with_full_width_norms(layer: Any) -> Any:
    """Put these norms into a spec of a layer, and return it."""
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    return layer
