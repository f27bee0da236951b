"""Unquantized experts of which vLLM exchanges gate and up once they are loaded, for FlashInfer's CUTLASS
kernels: a refit writes each where it is served from."""

from collections.abc import Collection

from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Placement
from reshard.device.memory import Region
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.vllm.layers import exchanges_gate_and_up
from reshard.engines.vllm.weights.served import Served

MATRIX = "w13_weight"  # [experts, gate and up, inputs]


def exchanged_layers(model: Served) -> frozenset[str]:
    """Return the names of the layers that serve from up and gate, and are loaded as gate and up."""
    return frozenset(name for name, module in model.named_modules if exchanges_gate_and_up(module))


def exchange(placed: PlacedTensors, layers: Collection[str]) -> PlacedTensors:
    """Return the tensors with gate and up of these layers where they are served from, which are `placed` where vLLM
    loads them.

    Raises ReshardError if something of both is loaded as one.
    """
    if not layers:
        return placed
    tensors, regions, turned = [], dict(placed.regions), dict(placed.turned)
    for local in placed.placement.tensors.values():
        layer, _, key = str(local.id[0]).partition("[")[0].rpartition(".")
        if layer in layers and key == MATRIX and local.id in turned:
            turned[local.id] = _exchanged_turned(local, turned[local.id])
        elif layer in layers and key == MATRIX:
            local, regions[local.id] = _exchanged(local, regions[local.id])
        tensors.append(local)
    return PlacedTensors(Placement.of(placed.placement.shapes, tensors), regions, turned)


def _exchanged(local: LocalTensor, region: Region) -> tuple[LocalTensor, Region]:
    """Return one expert's gate and up, or rows of either, each in the other's place."""
    _, rows, width = region.tensor.shape
    half, first = rows // 2, region.offset // width % rows
    if local.fills or region.pitch != width or region.offset % width or len(local.shape) != 2:
        raise _as_one(local)
    for part in local.parts:
        start, end = first + part.at[0], first + part.at[0] + part.box.lengths[0]
        if end > rows or start // half != (end - 1) // half:
            raise _as_one(local)
    if local.shape[0] == rows:
        parts = (part._replace(at=((part.at[0] + half) % rows, *part.at[1:])) for part in local.parts)
        return local._replace(parts=tuple(parts)), region
    distance = half * width if first < half else -half * width
    return local, region._replace(offset=region.offset + distance)


def _exchanged_turned(local: LocalTensor, region: Region) -> Region:
    """Return the region of one expert's gate or up, which is served turned, in the other's place."""
    _, rows, width = region.tensor.shape
    half, first = rows // 2, region.offset // width % rows
    end = first + local.shape[1]
    if region.pitch != width or region.offset % width or end > rows or first // half != (end - 1) // half:
        raise _as_one(local)
    distance = half * width if first < half else -half * width
    return region._replace(offset=region.offset + distance)


def _as_one(local: LocalTensor) -> ReshardError:
    return ReshardError(
        f"{local.id[0]} is loaded with rows of gate and up together, which vLLM then exchanges for FLASHINFER_CUTLASS, "
        "and a refit does not follow that: pass moe_backend='triton'"
    )
