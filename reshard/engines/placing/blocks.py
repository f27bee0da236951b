"""Layers that an engine serves from fp8 blocks of 128x128: where the scales of each local tensor lie,
and how a refit rounds them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region
from reshard.engines.placing.rules import PlacedTensors
from reshard.quantization.fp8_blocks import BLOCK, ROUNDINGS
from reshard.refit.served import Scales


class Blocks(NamedTuple):
    """A layer that serves from fp8 blocks: `scales` are the names of scales by those of parameters,
    `kernel` multiplies with them, `powers_of_two` tells whether the engine makes the scales
    powers of two after loading, and `rounding` how they are rounded where it does not."""

    scales: dict[str, str]
    kernel: str
    powers_of_two: bool
    rounding: str = "fp32"


def scale_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the names of a layer's scales of blocks by those of its matrices; none if a matrix has
    no scales."""
    names = [name for name in ("weight", "w13_weight", "w2_weight") if hasattr(module, name)]
    scales = {name: f"{name}_scale_inv" for name in names if hasattr(module, f"{name}_scale_inv")}
    return scales if len(scales) == len(names) else {}


def find_scales(
    placed: PlacedTensors,
    blocks: Mapping[str, Blocks],
    tensors: Mapping[str, torch.Tensor],
    power_of_two: str = "ue8m0",
) -> dict[Any, Scales]:
    """Return the scales of local tensors in fp8, by id; `blocks` are layers, `tensors` a model's
    tensors, both by name. `power_of_two` is how scales are rounded that are powers of two.

    Raises ReshardError if scales have another shape than their blocks.
    """
    scales: dict[Any, Scales] = {}
    for identity, region in placed.regions.items() if blocks else ():
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
        rounding = power_of_two if blocks[layer].powers_of_two else blocks[layer].rounding
        scales[identity] = Scales(Region(tensor, (expert or 0) * rows * columns, columns), rounding)
    return scales


def served_in_blocks(
    scales: Mapping[Any, Scales], blocks: Mapping[str, Blocks]
) -> dict[str, tuple[str, str]]:
    """Return, for logs, how each layer that serves from blocks is quantized, and its kernel, by the layer's
    name."""
    layers = {}
    for (name, *_), entry in scales.items():
        layer = name.rpartition(".")[0]
        how = f"blocks of 128x128 in fp8, {ROUNDINGS[entry.rounding]}, while they are copied"
        layers[layer] = how, blocks[layer].kernel
    return layers


def counted(layers: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """Return, for logs, how many layers are quantized in the same way and served by the same kernel;
    `layers` has both by name."""
    counts = Counter(layers.values())
    return [{"how": how, "kernel": kernel, "layers": n} for (how, kernel), n in sorted(counts.items())]
