"""The spec of a layer for ``pretrain_gpt.py --spec reshard.megatron.full_width_norm_spec layer``:
experts, and norms over all heads of queries and of keys together."""

from importlib.util import find_spec

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)

from reshard.megatron.layers.full_width_norm import with_full_width_norms

# How many experts there are does not matter to the spec, but that there are some.
if find_spec("transformer_engine") is not None:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=2, moe_grouped_gemm=True, qk_layernorm=True
    )
else:
    layer = get_gpt_layer_local_spec(
        num_experts=2, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
layer = with_full_width_norms(layer)
