"""Layers that vLLM serves from fp8 blocks of 128x128: where the scales of each local tensor lie,
and how a refit rounds them."""

from collections.abc import Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region
from reshard.engines.base import Scales
from reshard.engines.rules import PlacedTensors
from reshard.engines.vllm.quantized.fp8 import check_blocks
from reshard.engines.vllm.quantized.layers import Blocks, blocks_of
from reshard.engines.vllm.weights.served import Served
from reshard.quantization.fp8_blocks import BLOCK


def layers_in_blocks(model: Served) -> dict[str, Blocks]:
    """Return the layers that serve from fp8 blocks, by name."""
    layers = {}
    for name, module in model.named_modules:
        blocks = blocks_of(module, getattr(module, "quant_method", None))
        if blocks is not None:
            layers[name] = blocks
    return layers


def find_scales(
    placed: PlacedTensors,
    blocks: Mapping[str, Blocks],
    tensors: Mapping[str, torch.Tensor],
    match_vllm_rounding: bool,
) -> dict[Any, Scales]:
    """Return the scales of local tensors in fp8, by id; `blocks` are layers, `tensors` a model's
    tensors, both by name.

    Raises ReshardError if scales have another shape than their blocks, and if our quantization of
    blocks differs from vLLM's.
    """
    if not blocks:
        return {}
    scales: dict[Any, Scales] = {}
    for identity, region in placed.regions.items():
        if region.tensor.dtype != torch.float8_e4m3fn:
            continue
        name = identity[0]
        layer, _, parameter = name.rpartition(".")
        shape = placed.placement.tensors[identity].shape
        if layer not in blocks or len(identity) != 2 or len(shape) != 2:
            raise ReshardError(f"{name} is in fp8 in an order that a refit does not know: serve in bf16")
        scales_name = f"{layer}.{blocks[layer].scales[parameter]}"
        tensor, (rows, columns) = tensors[scales_name], (-(-length // BLOCK) for length in shape)
        expert = identity[1]
        experts = [] if expert is None else [region.tensor.shape[0]]
        if (
            tensor.dtype != torch.float32
            or [*tensor.shape] != [*experts, rows, columns]
            or not tensor.is_contiguous()
        ):
            raise ReshardError(
                f"{scales_name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}, "
                f"where {[*experts, rows, columns]} in float32 are known to a refit: serve in bf16"
            )
        # vLLM quantizes to fp32 scales first, and then once more to powers of two.
        power_of_two = "twice" if match_vllm_rounding else "ue8m0"
        rounding = power_of_two if blocks[layer].powers_of_two else "fp32"
        scales[identity] = Scales(Region(tensor, (expert or 0) * rows * columns, columns), rounding)
    for rounding in {entry.rounding for entry in scales.values()}:
        check_blocks(rounding, next(iter(tensors.values())).device, match_vllm_rounding)
    return scales
