"""Megatron's specs of the layers of a model: its own, or those that a family names."""

from importlib import import_module
from typing import Any

from reshard.models.family import Family


def layer_specs(family: Family, config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return the specs of the decoder layers and of the MTP layers (None if there are none) of a
    virtual stage, for a model of this family with Megatron's config `config`."""
    if family.specs:
        module, _, function = family.specs.partition(":")
        specs = getattr(import_module(module), function)
    else:
        specs = standard_specs
    decoder, last = specs(config, transformer_impl, vp_stage)
    if not config.mtp_num_layers:
        return decoder, None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    engine = transformer_impl == "transformer_engine"
    mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=engine, vp_stage=vp_stage)
    if mtp is not None and config.layernorm_zero_centered_gamma and not engine:
        from reshard.megatron.layers.gated_delta import local_mtp

        mtp = local_mtp(mtp)
    return decoder, mtp


def standard_specs(config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return Megatron's own spec of the decoder layers of a virtual stage, and that of the model's
    last layer, which an MTP layer has in it."""
    from reshard.megatron import compat

    try:
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_decoder_layer_specs,
        )
    except ImportError as error:
        raise compat.unknown("has not the layer specs that its models are built from") from error

    engine = transformer_impl == "transformer_engine"
    decoder = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    # The stage's own may lack a layer of the kind that MTP follows.
    last = get_gpt_decoder_layer_specs(config, use_transformer_engine=engine, normalization="RMSNorm")[-1]
    return decoder, last
