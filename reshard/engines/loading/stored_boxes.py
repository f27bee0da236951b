"""The boxes of a stored checkpoint that each rank of an engine reads for itself, straight to where its own
loader would copy them."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.device.box_loader import BoxLoader
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.device.staging import ToDevice
from reshard.device.stored import published
from reshard.engines.loading.stored_weights import host_memory, tensor_from_bytes, threads
from reshard.engines.tracing.trace import Trace, TracedCopy
from reshard.engines.tracing.views import StoredViews
from reshard.storage.io.boxes import Rows
from reshard.storage.io.reading import TensorSlice, Weights


class Reading(NamedTuple):
    """The way a rank reads weights: the boxes of a `trace`, or without one whole tensors, for this
    `reason`."""

    trace: Trace | None
    reason: str = ""

    def __str__(self) -> str:
        return f"whole tensors ({self.reason})" if self.trace is None else "each rank its own boxes"


def check_boxes(
    model: torch.nn.Module, trace: Trace, views: StoredViews, besides: Collection[str] = ()
) -> None:
    """Raise ReshardError unless the copies of a trace of canonical tensors are plain rows of these, and fill all
    parameters of a model but those `besides`."""
    live = _tensors(model)
    filled = {name: 0 for name, _ in model.named_parameters() if name not in besides}
    for copy in trace.copies:
        filled[copy.parameter] = filled.get(copy.parameter, 0) + copy.box.volume
        if (
            len(copy.box.lengths) != len(views.matrices[copy.name])
            or not live[copy.parameter].is_contiguous()
        ):
            raise ReshardError(f"{copy.parameter} is not a plain matrix")
    for fill in trace.fills:
        filled[fill.parameter] = filled.get(fill.parameter, 0) + fill.elements
    partly = [name for name, n in filled.items() if n != live[name].numel()]
    if partly:
        raise ReshardError(f"not all of {listed(partly, 3)} is copied")


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
        boxes.append(LiveBox(copy.name, copy.box, region, Rows(0, rows, 0, columns), dtype.published))
    with torch.no_grad():
        for fill in trace.fills:
            live[fill.parameter].view(-1)[fill.offset : fill.offset + fill.elements].zero_()
        into = ToDevice(device)
        loader = BoxLoader(weights.reader, into)
        with ThreadPoolExecutor(threads(), "reshard-read") as pool:
            list(pool.map(loader.load, loader.batches(boxes)))
        into.close()
        cast_regions = (_slice_of(copy, weights) for copy in casts)
        for cast_region, raw in weights.read_ahead(cast_regions, host_memory, threads()):
            cast: TracedCopy = cast_region.key  # type: ignore[assignment]
            dtype = weights.tensors[cast.name].dtype
            values = published(tensor_from_bytes(raw, dtype.name), dtype)
            parameter = live[cast.parameter].data
            offset = parameter.storage_offset() + cast.offset
            parameter.as_strided(values.shape, (cast.pitch or cast_region.columns, 1), offset).copy_(values)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_buffers(), *model.named_parameters()])


def _slice_of(copy: TracedCopy, weights: Weights) -> TensorSlice:
    start, column = (*copy.box.offsets, 0)[:2]
    rows, columns = (*copy.box.lengths, 1)[:2]
    return TensorSlice(copy, copy.name, start, start + rows, column, columns)
