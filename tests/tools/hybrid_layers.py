"""HybridModels of Megatron-Core's local layers, for which it has no specs: those of a GPTModel's
layers, cut in two."""

from contextlib import nullcontext
from copy import copy
from types import SimpleNamespace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from reshard.megatron.layers import mamba
from reshard.megatron.layers.gated_delta import ZeroCenteredNorm


def model(config, args, vp_stage, mtp_spec, layers, options):
    """A chunk; `layers` are specs of a GPTModel's layers, `options` the arguments that both classes take."""
    zero_centered = config.layernorm_zero_centered_gamma
    hybrid_block.TENorm = ZeroCenteredNorm if zero_centered else WrappedTorchNorm  # of which there is no spec
    dense, full = layers
    linear, attention = (
        _half(layer, "input_layernorm", "self_attention", "self_attn_bda") for layer in (full[0], full[-1])
    )
    mlps = [_half(of[-1], "pre_mlp_layernorm", "mlp", "mlp_bda") for of in (dense, full)]
    submodules = HybridStackSubmodules(
        attention_layer=attention,
        mla_layer=attention,
        dsa_layer=attention,
        gdn_layer=linear,
        mlp_layer=mlps[0],
        moe_layer=mlps[1],
        mtp_block_spec=mtp_spec,
        mamba_layer=mamba_layer(),
    )
    stack = ModuleSpec(module=HybridStack, submodules=submodules)
    return HybridModel(
        config, stack, hybrid_layer_pattern=args.hybrid_layer_pattern, vp_stage=vp_stage, **options
    )


def mamba_layer() -> ModuleSpec:
    """The spec of a Mamba layer, with what it lacks without a GPU put into Megatron's module."""
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, mamba.GroupNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = mamba.split_conv1d_scan
    mamba_mixer.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    keys = {"norm.": "mixer.in_proj.layer_norm_"}
    return ModuleSpec(
        MambaLayer, submodules=MambaLayerSubmodules(WrappedTorchNorm, mixer, get_bias_dropout_add, keys)
    )


def _half(layer: ModuleSpec, *names: str) -> ModuleSpec:
    """The spec of a layer that has these modules of another only."""
    modules = {name: getattr(layer.submodules, name) for name in names}
    keys = layer.submodules.sharded_state_dict_keys_map
    return ModuleSpec(
        TransformerLayer, submodules=TransformerLayerSubmodules(**modules, sharded_state_dict_keys_map=keys)
    )


def of_layers(config, pattern: str, experts: bool = True):
    """A config for the specs of a GPTModel's layers, of which the first has linear attention where any
    has."""
    config = copy(config)
    if not experts:
        config.num_moe_experts = None
    if "G" in pattern:
        config.experimental_attention_variant, config.linear_attention_freq = "gated_delta_net", 2
    return config
