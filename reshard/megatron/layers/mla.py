"""Layers with multi-head latent attention as it is published: without a second norm before plain
queries, and in Megatron-Core's local layers, which lack it."""

from typing import Any

import torch
from megatron.core.transformer import MegatronModule

from reshard.megatron import compat
from reshard.megatron.layers.specs import standard_specs


def specs(config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return the specs of the decoder layers of a virtual stage, and of the model's last layer."""
    decoder, last = standard_specs(config, transformer_impl, vp_stage)
    for layer in (*decoder.layer_specs, last):
        attention = layer.submodules.self_attention
        if config.q_lora_rank is None:
            attention.module = compat.MLAWithPlainQueries
        if transformer_impl != "transformer_engine":
            attention.submodules.core_attention = PlainCoreAttention
    return decoder, last


class PlainCoreAttention(MegatronModule):
    """Causal softmax attention over ``[sequence, batch, heads, dim]`` with value heads of a size of their
    own, for local layers.

    Megatron's local core attention takes no such heads. Scores are computed whole, in the weights' dtype.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
        n = scores.shape[-1]
        future = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhst,tbhd->sbhd", weights, value)
        return mixed.reshape(*mixed.shape[:2], -1)
