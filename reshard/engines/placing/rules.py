"""The places of a rank's local tensors: by rules, which the trace of the engine's own loader must
confirm, or by the trace alone."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, Placement, as_matrix
from reshard.core.views import View
from reshard.device.memory import Region
from reshard.engines.tracing.trace import Trace

_NONE: Mapping[Any, Region] = MappingProxyType({})


class PlacedTensors(NamedTuple):
    """A placement, and the region of each of its local tensors, by id. Of a matrix that is `turned` it is that of its
    transpose, with a row for each of its columns, and not among the others."""

    placement: Placement
    regions: dict[Any, Region]
    turned: Mapping[Any, Region] = _NONE

    def joined(self, other: "PlacedTensors") -> "PlacedTensors":
        """Return both as one."""
        tensors = [*self.placement.tensors.values(), *other.placement.tensors.values()]
        shapes = {**self.placement.shapes, **other.placement.shapes}
        regions, turned = self.regions | other.regions, {**self.turned, **other.turned}
        return PlacedTensors(Placement.of(shapes, tensors), regions, turned)


def place_by_rules(
    engine: str, placement: Placement, trace: Trace, tensors: Mapping[str, torch.Tensor], local_experts: int
) -> PlacedTensors:
    """Return a placement that rules gave, with the regions of its local tensors.

    The id of a local tensor is (parameter, local expert or None); an expert's is one matrix of
    ``[local_experts, rows, columns]``. Brackets after the parameter say which rows of it these are:
    ``w13_weight[0:1 in 2]`` every second one. `tensors` are those that the loader writes into, by
    parameter. Raises ReshardError if one has another shape than the rules say, and if the loader
    puts anything elsewhere.
    """
    regions: dict[Any, Region] = {}
    expected: set[_Write] = set()
    for local in placement.tensors.values():
        view, expert = View.parse(local.id[0]), local.id[1]
        name, (turn, turns) = view.tensor, _turn_of(view)
        tensor = tensors.get(name)
        rows, *row = local.shape
        shape = (rows * turns, *row) if expert is None else (local_experts, rows * turns, *row)
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
        width = prod(row)
        region = Region(tensor, ((expert or 0) * rows * turns + turn) * width, turns * width)
        regions[local.id] = region
        for part in local.parts:
            offset = region.offset + part.at[0] * region.pitch + sum(part.at[1:])
            several = part.box.lengths[0] > 1 and (row or turns > 1)
            expected.add(_Write(name, offset, region.pitch if several else 0, part.name, part.box))
    _check_trace(engine, expected, trace)
    return PlacedTensors(placement, regions)


def place_by_trace(
    engine: str, trace: Trace, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
) -> PlacedTensors:
    """Return the traced copies themselves as a placement: one local tensor for each copy and fill.

    Copies with `strides` are of matrices that the engine turns. `shapes` are those of the canonical tensors; `tensors`
    are those that the loader writes into, by parameter. Raises ReshardError if the loader does not fill each of them
    exactly once.
    """
    local_tensors: list[LocalTensor] = []
    regions: dict[Any, Region] = {}
    turned: dict[Any, Region] = {}
    runs: dict[str, list[_Runs]] = {}
    for copy in trace.copies:
        if not copy.box.volume:  # of an embedding, of which this rank has padding alone
            continue
        identity = (copy.parameter, copy.offset, copy.name)
        origin = (0,) * len(copy.box.lengths)
        local_tensors.append(LocalTensor(identity, copy.box.lengths, (Part(copy.name, copy.box, origin),)))
        rows, width = (*copy.box.lengths, 1)[:2]
        pitch = copy.pitch or width
        if copy.strides:
            (width, rows), pitch = copy.box.lengths, copy.strides[1]
        of_kind = turned if copy.strides else regions
        of_kind[identity] = Region(tensors[copy.parameter], copy.offset, pitch)
        written = _Runs(copy.offset, rows, pitch, width)
        runs.setdefault(copy.parameter, []).append(written)
    for fill in trace.fills:
        identity = (fill.parameter, fill.offset, "")
        local_tensors.append(LocalTensor(identity, (fill.elements,), (), (whole((fill.elements,)),)))
        regions[identity] = Region(tensors[fill.parameter], fill.offset, 1)
        runs.setdefault(fill.parameter, []).append(_Runs(fill.offset, 1, 0, fill.elements))
    wrong = [name for name, written in runs.items() if not _fill_once(written, tensors[name].numel())]
    if wrong:
        raise ReshardError(f"{engine}'s loader does not fill {listed(wrong, 3)} exactly once")
    return PlacedTensors(Placement.of(shapes, local_tensors), regions, turned)


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


def _turn_of(view: View) -> tuple[int, int]:
    """Return which of how many rows a view takes, in turns: (0, 1) where it is the whole tensor."""
    if not view.selections:
        return 0, 1
    [(start, _, period, _)] = view.selections
    return start, period


class _Write(NamedTuple):
    """A box of a published tensor, the parameter and offset of the first element where it goes, and
    the pitch of its rows there (`TracedCopy`)."""

    parameter: str
    offset: int
    pitch: int
    name: str
    box: Box


def _check_trace(engine: str, expected: set[_Write], trace: Trace) -> None:
    """Raise ReshardError if the trace has other copies than `expected`."""
    traced = {_Write(*copy[:5]) for copy in trace.copies}
    wrong = sorted({write.parameter for write in expected ^ traced})
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
