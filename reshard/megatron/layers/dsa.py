"""Layers with DeepSeek's sparse attention: an indexer chooses the tokens that latent attention attends to.

Megatron-Core has specs of them for Transformer Engine. Its local layers lack a linear layer that
every rank of TP holds whole, of which an indexer is made; they have it here.
"""

from copy import copy
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer import MegatronModule

from reshard.megatron import compat
from reshard.megatron.layers.specs import standard_specs


def specs(config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return the specs of the decoder layers of a virtual stage, and of the model's last layer."""
    try:
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_dsa_module_spec_for_backend,
            get_transformer_block_with_experimental_attention_variant_spec,
            get_transformer_layer_with_experimental_attention_variant_spec,
        )
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla  # noqa: F401
    except ImportError as error:
        raise compat.unknown("has not the sparse attention of this model") from error
    if transformer_impl == "transformer_engine":
        decoder = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
        return decoder, get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    standard = copy(config)
    standard.experimental_attention_variant = None
    decoder, last = standard_specs(standard, transformer_impl, vp_stage)
    for layer in (*decoder.layer_specs, last):
        attention = get_dsa_module_spec_for_backend(config, LocalBackend())
        column_parallel = attention.submodules.linear_q_up_proj
        attention.submodules.linear_q_down_proj = column_parallel
        attention.submodules.linear_kv_down_proj = column_parallel
        layer.submodules.self_attention = attention
    return decoder, last


class LocalBackend(LocalSpecProvider):
    """Megatron's local layers, and the linear layer that they lack."""

    def linear(self) -> type:
        """Return the layer that every rank holds whole."""
        return WholeLinear


class WholeLinear(MegatronModule):
    """A linear layer without bias that every rank of TP holds whole."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the output, and no bias."""
        return torch.nn.functional.linear(hidden, self.weight), None
