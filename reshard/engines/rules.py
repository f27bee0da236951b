"""The places of a rank's local tensors: by rules, which the trace of the engine's own loader must
confirm, or by the trace alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, Placement, as_matrix
from reshard.device.memory import Region
from reshard.engines.trace import Trace


class PlacedTensors(NamedTuple):
    """A placement, and the region of each of its local tensors, by id."""

    placement: Placement
    regions: dict[Any, Region]

    def joined(self, other: "PlacedTensors") -> "PlacedTensors":
        """Return both as one."""
        tensors = [*self.placement.tensors.values(), *other.placement.tensors.values()]
        shapes = {**self.placement.shapes, **other.placement.shapes}
        return PlacedTensors(Placement.of(shapes, tensors), self.regions | other.regions)


def place_by_rules(
    engine: str, placement: Placement, trace: Trace, tensors: Mapping[str, torch.Tensor], local_experts: int
) -> PlacedTensors:
    """Return a placement that rules gave, with the regions of its local tensors.

    The id of a local tensor is (parameter, local expert or None); an expert's is one matrix of
    ``[local_experts, rows, columns]``. `tensors` are those that the loader writes into, by
    parameter. Raises ReshardError if one has another shape than the rules say, and if the loader
    puts anything elsewhere.
    """
    regions: dict[Any, Region] = {}
    expected: set[_Write] = set()
    for local in placement.tensors.values():
        name, expert = local.id
        tensor = tensors.get(name)
        shape = local.shape if expert is None else (local_experts, *local.shape)
        has_shape = () if tensor is None else tuple(tensor.shape)
        if expert is None:
            has_shape = as_matrix(has_shape)
        if tensor is None or has_shape != shape or not tensor.is_contiguous():
            has = (
                "nothing of this name"
                if tensor is None
                else f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
            )
            raise ReshardError(f"{name} should have shape {list(shape)} in {engine}, which has {has}")
        width = local.shape[1] if len(local.shape) == 2 else 1
        start = (expert or 0) * local.shape[0] * width
        regions[local.id] = Region(tensor, start, width)
        for part in local.parts:
            offset = start + part.at[0] * width + (part.at[1] if len(part.at) == 2 else 0)
            expected.add(_Write(name, offset, part.name, part.box))
    _check_trace(engine, expected, trace, tensors)
    return PlacedTensors(placement, regions)


def place_by_trace(
    engine: str, trace: Trace, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
) -> PlacedTensors:
    """Return the traced copies themselves as a placement: one local tensor for each copy and fill.

    `shapes` are those of the canonical tensors; `tensors` are those that the loader writes into, by
    parameter. Raises ReshardError if the loader does not fill each of them exactly once.
    """
    local_tensors, regions = [], {}
    runs: dict[str, list[_Runs]] = {}
    for copy in trace.copies:
        identity = (copy.parameter, copy.offset, copy.name)
        origin = (0,) * len(copy.box.lengths)
        local_tensors.append(LocalTensor(identity, copy.box.lengths, (Part(copy.name, copy.box, origin),)))
        regions[identity] = Region(tensors[copy.parameter], copy.offset, copy.pitch or copy.box.lengths[-1])
        if not copy.box.volume:
            continue
        rows = copy.box.volume // copy.box.lengths[-1]
        written = _Runs(copy.offset, rows, copy.pitch, copy.box.lengths[-1])
        runs.setdefault(copy.parameter, []).append(written)
    for fill in trace.fills:
        identity = (fill.parameter, fill.offset, "")
        local_tensors.append(LocalTensor(identity, (fill.elements,), (), (whole((fill.elements,)),)))
        regions[identity] = Region(tensors[fill.parameter], fill.offset, fill.elements)
        runs.setdefault(fill.parameter, []).append(_Runs(fill.offset, 1, 0, fill.elements))
    wrong = [name for name, written in runs.items() if not _fill_once(written, tensors[name].numel())]
    if wrong:
        raise ReshardError(f"{engine}'s loader does not fill {listed(wrong, 3)} exactly once")
    return PlacedTensors(Placement.of(shapes, local_tensors), regions)


class _Runs(NamedTuple):
    """Elements that a copy writes: `rows` runs of `width`, from element `offset` on, `pitch`
    apart."""

    offset: int
    rows: int
    pitch: int
    width: int


def _fill_once(written: Sequence[_Runs], elements: int) -> bool:
    """Tell whether runs of one tensor fill each of its `elements` exactly once."""
    starts, widths = [], []
    for offset, rows, pitch, width in written:
        if rows == 1 or pitch == width:  # one run
            rows, width = 1, rows * width
        starts.append(offset + pitch * np.arange(rows))
        widths.append(np.full(rows, width))
    order = np.argsort(start := np.concatenate(starts))
    start, end = start[order], (start + np.concatenate(widths))[order]
    return bool(start[0] == 0 and end[-1] == elements and (start[1:] == end[:-1]).all())


class _Write(NamedTuple):
    """A box of a published tensor, and the parameter and offset of the first element where it
    goes."""

    parameter: str
    offset: int
    name: str
    box: Box


def _check_trace(
    engine: str, expected: set[_Write], trace: Trace, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise ReshardError if the trace has other copies than `expected`, or spreads rows."""
    traced = {_Write(copy.parameter, copy.offset, copy.name, copy.box) for copy in trace.copies}
    disputed = {write.parameter for write in expected ^ traced}
    widths = {name: tensor.shape[-1] for name, tensor in tensors.items() if tensor.ndim}
    spread = {copy.parameter for copy in trace.copies if copy.pitch not in (0, widths.get(copy.parameter))}
    wrong = sorted(disputed | spread)
    if not wrong:
        return
    by_loader, by_table = (
        sorted(str(tuple(write[1:])) for write in writes if write.parameter == wrong[0])[:2]
        for writes in (traced - expected, expected - traced)
    )
    raise ReshardError(
        f"{engine}'s loader and the mapping table disagree on {listed(wrong, 3)}: "
        f"{engine} puts {by_loader or 'nothing'}, the table {by_table or 'nothing'}"
    )
