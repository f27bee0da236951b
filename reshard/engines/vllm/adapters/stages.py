"""The memory in which an adapter's matrices arrive at a rank of vLLM, and the copies from there into its
slots: in one pass for all layers, since there are hundreds of small matrices."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.errors import ReshardError, listed
from reshard.device.memory import ALIGNMENT
from reshard.engines.vllm.adapters.compat import Buffers
from reshard.engines.vllm.adapters.targets import Target
from reshard.refit.copying.addresses import reading_destination
from reshard.refit.copying.copies import CopyTable
from reshard.refit.copying.digests import Digests
from reshard.refit.copying.tables import WIDTH, table_of, tiles_of


class Slice(NamedTuple):
    """One slice of a layer whose adapter arrives: the published weights in it with their targets, the rank of
    their adapters, and the factor of B."""

    layer: str
    buffers: Buffers
    targets: Mapping[str, Target]
    rank: int
    factor: float

    @property
    def kind(self) -> tuple[str, tuple[str, ...], int, float]:
        """The shape of what memory for the slice has to hold, and the factor by which it becomes a slot's."""
        return self.layer, tuple(self.targets), self.rank, self.factor

    @property
    def shape_of_a(self) -> tuple[int, int, int]:
        """The shape of A: ``[experts, rows of A that are here, in]``."""
        target = next(iter(self.targets.values()))
        return self.buffers.a.shape[1], target.rows_of_a(self.rank)[1], self.buffers.a.shape[3]

    @property
    def shape_of_b(self) -> tuple[int, int, int]:
        """The shape of B: ``[experts, out, rank]``."""
        return self.buffers.a.shape[1], self.buffers.b.shape[2], self.rank

    @property
    def parts(self) -> int:
        """The number of weights that have one A here."""
        return 1 + max(target.part for target in self.targets.values())


class StagedSlice(NamedTuple):
    """Memory for one slice of a layer as it arrives, before it is written into a slot: A and B. Several weights
    with one A in vLLM bring one each, which have to be equal: those after the first are `others`."""

    slice: Slice
    a: torch.Tensor
    b: torch.Tensor
    others: list[torch.Tensor]

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.slice.layer

    def slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where A and B are in a slot, without the rows and columns of higher ranks."""
        buffers = self.slice.buffers
        return buffers.a[slot, :, : self.a.shape[1]], buffers.b[slot, :, :, : self.slice.rank]


class Stages:
    """The memory for all slices of a rank, one tensor of `dtype` for A and B of all of them; those whose B have
    one factor lie together, so that one multiplication scales them."""

    def __init__(self, slices: Sequence[Slice], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        ordered = sorted(slices, key=lambda one: one.factor)
        shapes = [one.shape_of_a for one in ordered] + [one.shape_of_b for one in ordered]
        align = ALIGNMENT // dtype.itemsize
        ends = list(accumulate(prod(shape) + -prod(shape) % align for shape in shapes))
        self.memory = torch.zeros(ends[-1] if ends else 0, dtype=dtype, device=device)
        views = [
            self.memory[start : start + prod(shape)].view(shape)
            for start, shape in zip([0, *ends], shapes, strict=False)
        ]
        self.all = [
            StagedSlice(one, a, b, [torch.zeros_like(a) for _ in range(1, one.parts)])
            for one, a, b in zip(ordered, views[: len(ordered)], views[len(ordered) :], strict=True)
        ]
        # By the factor, all B that have it.
        self._scaled: list[tuple[torch.Tensor, float]] = []
        bounds = zip(ordered, ends[len(ordered) - 1 :], ends[len(ordered) :], strict=False)
        for factor, of_factor in groupby(bounds, key=lambda bound: bound[0].factor):
            entries = list(of_factor)
            if factor != 1:
                self._scaled.append((self.memory[entries[0][1] : entries[-1][2]], factor))
        self._one = torch.ones(1, dtype=torch.int32, device=device)  # what says that experts have one
        # By slot and address of the memory, the copies, and the digests of both ends of these.
        self._tables: dict[tuple[int, int], CopyTable] = {}
        self._digests: dict[int, tuple[Digests, Digests]] = {}
        self._buffers = self._find_buffers()

    @property
    def kinds(self) -> list[Any]:
        """The shapes of all slices, which say what of a slot is written."""
        return sorted(stage.slice.kind for stage in self.all)

    def _find_buffers(self) -> list[int]:
        """Return where vLLM has its buffers now."""
        buffers = (stage.slice.buffers for stage in self.all)
        return [tensor.data_ptr() for one in buffers for tensor in (one.a, one.b)]

    def prepare(self) -> None:
        """Make the tables of copies again if vLLM has its buffers elsewhere now."""
        buffers = self._find_buffers()
        if buffers != self._buffers:
            self._buffers, self._tables, self._digests = buffers, {}, {}

    def _table(self, slot: int, shift: int = 0) -> np.ndarray:
        return table_of([copy for _, copy in self._copies(slot, shift)])

    def _copies(self, slot: int, shift: int = 0) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """Yield the matrices with their copies into a slot, as `table_of` takes these, from so many bytes behind
        the memory."""
        for stage in self.all:
            yield from self._copies_of(stage, slot, shift)

    def _copies_of(
        self, stage: StagedSlice, slot: int, shift: int
    ) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        size = stage.a.element_size()
        a, b = stage.slot(slot)
        experts, rows_of_a, columns = stage.a.shape
        if not a[0].is_contiguous() or (b.stride(0), b.stride(2)) != (b.shape[1] * b.stride(1), 1):
            raise ReshardError(f"vLLM's adapters of {stage.layer} have rows that do not follow each other")
        if rows_of_a:
            width = rows_of_a * columns * size
            yield (
                stage.a,
                (stage.a.data_ptr() + shift, a.data_ptr(), experts, width, width, a.stride(0) * size),
            )
        width = stage.slice.rank * size
        rows = experts * b.shape[1]
        yield stage.b, (stage.b.data_ptr() + shift, b.data_ptr(), rows, width, width, b.stride(1) * size)
        enabled = stage.slice.buffers.enabled
        if enabled is not None:
            four = self._one.element_size()
            yield stage.b, (self._one.data_ptr(), enabled[slot].data_ptr(), 1, four, four, four)

    def finish(self) -> None:
        """Make of what has arrived what a slot has: B times its scale, rounded as vLLM rounds it.

        Raises ReshardError if weights have several A for which vLLM has one.
        """
        self._check_common()
        self.scale()

    def write(self, slot: int, memory: torch.Tensor | None = None) -> None:
        """Write what is in the memory into a slot; or what was copied from there into other `memory`."""
        source = self.memory if memory is None else memory
        key = slot, source.data_ptr()
        if key not in self._tables:
            own = {(one, self.memory.data_ptr()) for one, _ in self._tables} | {key}
            self._tables = {one: table for one, table in self._tables.items() if one in own}
            shift = source.data_ptr() - self.memory.data_ptr()
            self._tables[key] = CopyTable(tiles_of(self._table(slot, shift))[0], self.device)
        self._tables[key].run()

    def differing(self, slot: int) -> list[torch.Tensor]:
        """Return the matrices whose bits in a slot differ from those in memory."""
        if slot not in self._digests:
            table = self._table(slot)
            columns = table[:, WIDTH] // self.memory.element_size()  # of what says that experts have one, two
            self._digests[slot] = (
                Digests(table, columns, self.device), Digests(reading_destination(table), columns, self.device)
            )  # fmt: skip
        ends = self._digests[slot]
        for digests in ends:
            digests.begin()
        of_memory, of_slot = (digests.result() for digests in ends)
        matrices = [matrix for matrix, _ in self._copies(slot)]
        return [matrix for matrix, differs in zip(matrices, of_memory != of_slot, strict=True) if differs]

    def _check_common(self) -> None:
        """Raise ReshardError if weights that have one A in vLLM have brought different ones."""
        pairs = [(stage, other) for stage in self.all for other in stage.others]
        if not pairs:
            return
        # One wait for all.
        differ = torch.stack([(stage.a != other).any() for stage, other in pairs]).tolist()
        layers = [stage.layer for (stage, _), differs in zip(pairs, differ, strict=True) if differs]
        if layers:
            raise ReshardError(
                f"the trainer's adapters of gate and up have different A in {len(layers)} layers "
                f"({listed(layers, 2)}), for which this vLLM has one: train one A for both"
            )

    def scale(self) -> None:
        """Multiply every B that has arrived by its factor."""
        for memory, factor in self._scaled:
            memory.mul_(factor)
