"""The boxes that each rank reads for itself, where vLLM's own loader only copies."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from reshard.core.extras import importing

with importing("vllm"):
    import torch
    from vllm.config import ModelConfig


from reshard.core.errors import ReshardError, listed
from reshard.device.box_loader import BoxLoader
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.device.staging import ToDevice
from reshard.device.stored import plus_one
from reshard.engines.stored_weights import host_memory, tensor_from_bytes, threads
from reshard.engines.tracing.trace import Trace, TracedCopy
from reshard.engines.vllm.load_format.opened import OpenedWeights
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import PLAIN_METHODS
from reshard.models.family import families
from reshard.storage.io.boxes import Rows
from reshard.storage.io.reading import TensorSlice, Weights


class Reading(NamedTuple):
    """The way a rank reads weights: the boxes of a `trace`, or without one whole tensors, for this
    `reason`."""

    trace: Trace | None
    reason: str = ""

    def __str__(self) -> str:
        return f"whole tensors ({self.reason})" if self.trace is None else "each rank its own boxes"


def plan_reading(
    model: torch.nn.Module, model_config: ModelConfig, opened: OpenedWeights, whole_tensors: bool
) -> Reading:
    """Return how to read the weights; `whole_tensors` if the user asks for them."""
    if whole_tensors:
        return Reading(None, "model_loader_extra_config asks for it")
    try:
        return Reading(_trace_boxes(model, model_config, opened))
    except ReshardError as error:
        return Reading(None, str(error))


def _trace_boxes(model: torch.nn.Module, model_config: ModelConfig, opened: OpenedWeights) -> Trace:
    """Return what vLLM's loader would copy where. Raises ReshardError if it would do anything
    else."""
    architectures = set(getattr(model_config.hf_config, "architectures", None) or ())
    known = {name for family in families().values() for name in (family.architecture, family.wrapped_in[0])}
    if not architectures <= known:
        raise ReshardError(f"{listed(sorted(architectures - known))} has no table")
    for name, module in model.named_modules():
        kind = type(getattr(module, "quant_method", None)).__name__
        if kind not in ("NoneType", *PLAIN_METHODS) and not kind.endswith("KVCacheMethod"):
            raise ReshardError(f"{name} is loaded by {kind}")
    if opened.quantized:
        raise ReshardError("the config wants fp8 blocks")
    views = opened.views()
    trace = views.of_trace(trace_model(model, opened.stored(views)))
    live = _tensors(model)
    filled = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    for copy in trace.copies:
        filled[copy.parameter] = filled.get(copy.parameter, 0) + copy.box.volume
        if (
            len(copy.box.lengths) != len(views.matrices[copy.name])
            or not live[copy.parameter].is_contiguous()
        ):
            raise ReshardError(f"{copy.parameter} is no plain matrix")
    for fill in trace.fills:
        filled[fill.parameter] = filled.get(fill.parameter, 0) + fill.elements
    partly = [name for name, n in filled.items() if n != live[name].numel()]
    if partly:
        raise ReshardError(f"not all of {listed(partly, 3)} is copied")
    return trace


def read_boxes(model: torch.nn.Module, trace: Trace, weights: Weights) -> None:
    """Carry out the copies of a trace."""
    live = _tensors(model)
    device = next(iter(live.values())).device
    boxes, casts = [], []
    for copy in trace.copies:
        dtype = weights.tensors[copy.name].dtype
        if getattr(torch, dtype.name) != live[copy.parameter].dtype:
            casts.append(copy)
            continue
        rows, columns = (*copy.box.lengths, 1)[:2]
        region = Region(live[copy.parameter].data, copy.offset, copy.pitch or columns)
        boxes.append(LiveBox(copy.name, copy.box, region, Rows(0, rows, 0, columns), dtype))
    with torch.no_grad():
        for fill in trace.fills:
            live[fill.parameter].view(-1)[fill.offset : fill.offset + fill.elements].zero_()
        into = ToDevice(device)
        loader = BoxLoader(weights.tensors, weights.reader, into, less_one=weights.less_one)
        with ThreadPoolExecutor(threads(), "reshard-read") as pool:
            list(pool.map(loader.load, loader.batches(boxes)))
        into.close()
        cast_regions = (_slice_of(copy, weights) for copy in casts)
        for cast_region, raw in weights.read_ahead(cast_regions, host_memory, threads()):
            cast: TracedCopy = cast_region.key  # type: ignore[assignment]
            values = tensor_from_bytes(raw, weights.tensors[cast.name].dtype.name)
            if cast.name in weights.less_one:
                values = plus_one(values)
            parameter = live[cast.parameter].data
            offset = parameter.storage_offset() + cast.offset
            parameter.as_strided(values.shape, (cast.pitch or cast_region.columns, 1), offset).copy_(values)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_buffers(), *model.named_parameters()])


def _slice_of(copy: TracedCopy, weights: Weights) -> TensorSlice:
    start, column = (*copy.box.offsets, 0)[:2]
    rows, columns = (*copy.box.lengths, 1)[:2]
    return TensorSlice(copy, copy.name, start, start + rows, column, columns)
