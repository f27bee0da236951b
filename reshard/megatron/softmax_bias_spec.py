"""The spec of a layer for ``pretrain_gpt.py --spec reshard.megatron.softmax_bias_spec layer``: experts that
are chosen by softmax scores and a bias, or an MLP, as ``--moe-layer-freq`` says of the layer's number."""

from importlib.util import find_spec
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from reshard.megatron.layers.softmax_bias import with_softmax_bias
from reshard.models.numerics_args import moe_pattern


class LayerByNumber(TransformerLayer):
    """A layer with the modules that its number has in ``moe_layer_freq``: Megatron builds all layers of a
    ``--spec`` alike."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int = 1, dense: Any = None, **options: Any
    ) -> None:
        number = layer_number + get_transformer_layer_offset(config, options.get("vp_stage"))
        has_experts = moe_pattern(config.moe_layer_freq, config.num_layers)[number - 1]
        super().__init__(config, submodules if has_experts else dense, layer_number, **options)


# How many experts there are does not matter to the spec, but that there are some.
if find_spec("transformer_engine") is not None:
    experts = get_gpt_layer_with_transformer_engine_spec(num_experts=2, moe_grouped_gemm=True)
    mlp = get_gpt_layer_with_transformer_engine_spec()
else:
    experts = get_gpt_layer_local_spec(num_experts=2, normalization="RMSNorm")
    mlp = get_gpt_layer_local_spec(normalization="RMSNorm")
layer = ModuleSpec(
    LayerByNumber, params={"dense": mlp.submodules}, submodules=with_softmax_bias(experts).submodules
)
