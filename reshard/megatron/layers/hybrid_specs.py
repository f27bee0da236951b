"""The spec of a HybridModel: of one that computes what a GPTModel does each layer is one half of a
GPTModel's; of one with Mamba layers they are Megatron's own, or local ones."""

from copy import copy
from typing import Any

from megatron.core.models.hybrid import hybrid_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from reshard.megatron.hybrid import MTP, STAGE, pairs
from reshard.megatron.layers.gated_delta import ZeroCenteredNorm
from reshard.megatron.layers.specs import layer_specs, standard_specs
from reshard.models.family import Family

# Letters of a pattern, and where a stack has the spec of their layers.
SUBMODULES = {
    "*": "attention_layer",
    "+": "mla_layer",
    "D": "dsa_layer",
    "G": "gdn_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
}
ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


def stack_spec(family: Family, config: Any, pattern: str, transformer_impl: str) -> ModuleSpec:
    """Return the spec of a HybridModel's stack of layers.

    `config` is that of the whole GPTModel, without pipeline stages; `pattern` is the HybridModel's.
    """
    if family.layer_letters:
        return _single_layers(family, config, transformer_impl)
    decoder, mtp = layer_specs(family, config, transformer_impl, None)
    layers = pairs(pattern.split(MTP)[0].replace(STAGE, ""), "the model")
    submodules: dict[str, Any] = {}
    for pair, layer in zip(layers, decoder.layer_specs, strict=True):
        submodules[SUBMODULES[pair[0]]] = _half(layer, TransformerLayer, ATTENTION)
        submodules[SUBMODULES[pair[1]]] = _half(layer, layer.module, MLP)
    stack = hybrid_block.HybridStack if transformer_impl == "transformer_engine" else LocalHybridStack
    return ModuleSpec(
        module=stack, submodules=hybrid_block.HybridStackSubmodules(**submodules, mtp_block_spec=mtp)
    )


def _single_layers(family: Family, config: Any, transformer_impl: str) -> ModuleSpec:
    """Return the spec of a stack of layers in which each layer has its own letter in the pattern."""
    if transformer_impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    from reshard.megatron.layers.mamba import local_mamba_layer

    dense, experts = copy(config), copy(config)
    dense.num_moe_experts, experts.moe_layer_freq = None, 1
    layers = {
        name: standard_specs(of_kind, "local", None)[1]
        for name, of_kind in (("mlp_layer", dense), ("moe_layer", experts))
    }
    submodules = {name: _half(layer, layer.module, MLP) for name, layer in layers.items()}
    submodules["attention_layer"] = _half(layers["mlp_layer"], TransformerLayer, ATTENTION)
    submodules["mamba_layer"] = local_mamba_layer()
    submodules["mtp_block_spec"] = layer_specs(family, experts, "local", None)[1]
    return ModuleSpec(LocalHybridStack, submodules=hybrid_block.HybridStackSubmodules(**submodules))


def _half(layer: ModuleSpec, module: Any, names: tuple[str, ...]) -> ModuleSpec:
    """Return the spec of a layer with these modules of another one."""
    modules = {name: getattr(layer.submodules, name) for name in names}
    keys = layer.submodules.sharded_state_dict_keys_map
    return ModuleSpec(
        module=module, submodules=TransformerLayerSubmodules(**modules, sharded_state_dict_keys_map=keys)
    )


class LocalHybridStack(hybrid_block.HybridStack):
    """A stack of local layers, whose final norm Megatron-Core would take from Transformer Engine."""

    def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **options: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **options)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            norm: Any = ZeroCenteredNorm if config.layernorm_zero_centered_gamma else WrappedTorchNorm
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
