"""Layers with linear attention (gated delta nets) in Megatron-Core, and what its local layers lack for
them."""

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from reshard.models.numerics_args import linear_pattern


class ZeroCenteredNorm(torch.nn.Module):
    """RMSNorm over the last dim with weights around 0, as Transformer Engine's with ``zero_centered_gamma``.

    Megatron's local layers have torch's norms, whose weights are around 1.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=self.eps)
        return (normed * (1 + self.weight.float())).to(hidden.dtype)


def layer_specs(config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return Megatron's spec of the decoder layers of a virtual stage, and the spec of the model's
    last layer, which its MTP layers follow."""
    if transformer_impl == "transformer_engine":
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec as block_spec,
        )
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_layer_with_experimental_attention_variant_spec as all_layers,
        )

        return block_spec(config, vp_stage), all_layers(config)[-1]
    plain = copy.copy(config)  # these specs are made for full attention only
    plain.experimental_attention_variant = None
    layers = get_gpt_decoder_layer_specs(plain, use_transformer_engine=False, normalization="RMSNorm")
    pattern = linear_pattern(config.linear_attention_freq, config.num_layers)
    layers = [_local_layer(layer, linear) for layer, linear in zip(layers, pattern, strict=True)]
    ids = _layers_of_stage(config, vp_stage)
    return TransformerBlockSubmodules([layers[i] for i in ids], ZeroCenteredNorm), layers[-1]


def _layers_of_stage(config: Any, vp_stage: int | None) -> list[int]:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _local_layer(layer: Any, linear: int) -> Any:
    """Return a local layer's spec with norms around 0, and with linear attention in place of its own."""
    modules = layer.submodules
    attention, keys = modules.self_attention, dict(modules.sharded_state_dict_keys_map)
    if linear:
        attention = ModuleSpec(
            module=GatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(ColumnParallelLinear, ZeroCenteredNorm, RowParallelLinear),
        )
        keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    else:
        attention = replace(attention, submodules=_with_norms(attention.submodules))
    modules = replace(_with_norms(modules), self_attention=attention, sharded_state_dict_keys_map=keys)
    return replace(layer, submodules=modules)


def local_mtp(spec: Any) -> Any:
    """Return the spec of local MTP layers with norms around 0."""
    layers = [replace(layer, submodules=_with_norms(layer.submodules)) for layer in spec.layer_specs]
    return replace(spec, layer_specs=layers)


def _with_norms(submodules: Any) -> Any:
    norms = {
        name: ZeroCenteredNorm for name, module in vars(submodules).items() if module is WrappedTorchNorm
    }
    return replace(submodules, **norms)
