"""Layers that vLLM serves from fp8 blocks of 128x128, and the scales of their local tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from reshard.engines.placing import blocks
from reshard.engines.placing.blocks import Blocks
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.vllm.quantized.fp8 import check_blocks
from reshard.engines.vllm.quantized.layers import blocks_of
from reshard.engines.vllm.weights.served import Served
from reshard.refit.codecs.makers import FP8_BLOCKS
from reshard.refit.fp8_blocks.items import BF16
from reshard.refit.served import Scales


def layers_in_blocks(model: Served) -> dict[str, Blocks]:
    """Return the layers that serve from fp8 blocks, by name."""
    layers = {}
    for name, module in model.named_modules:
        of_layer = blocks_of(module, getattr(module, "quant_method", None))
        if of_layer is not None:
            layers[name] = of_layer
    return layers


def begin_compiling(layers: Mapping[str, Blocks], device: torch.device) -> None:
    """Begin to compile, in a thread, the kernels that a refit of bf16 launches, and makes the blocks of these
    layers with, since `find_scales` and connect would wait for them; nothing on a CPU."""
    if device.type != "cuda":
        return
    from reshard.refit.copying.compiling import compile_ahead

    compile_blocks = partial(FP8_BLOCKS.compile_pull, BF16.size, device)
    compile_ahead(device, {BF16.size}, compile_blocks if layers else None)


def find_scales(
    placed: PlacedTensors,
    layers: Mapping[str, Blocks],
    tensors: Mapping[str, torch.Tensor],
    match_vllm_rounding: bool,
) -> dict[Any, Scales]:
    """Return the scales of local tensors in fp8, by id; see `reshard.engines.placing.blocks.find_scales`.

    Raises ReshardError if our quantization of blocks differs from vLLM's.
    """
    scales = blocks.find_scales(placed, layers, tensors, _power_of_two(match_vllm_rounding))
    for rounding in {entry.rounding for entry in scales.values()}:
        check_blocks(rounding, next(iter(tensors.values())).device, match_vllm_rounding)
    return scales


def _power_of_two(match_vllm_rounding: bool) -> str:
    # vLLM quantizes to fp32 scales first, and then once more to powers of two.
    return "twice" if match_vllm_rounding else "ue8m0"
