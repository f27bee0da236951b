"""Matrices that an engine serves turned: its loader writes their transposes, as vLLM's does of Llama 4's experts.

A refit copies rows. So such a matrix arrives in a slab, in rows as it is published, and its transpose is written into
the parameter from there. The matrices take turns in the slab: a *round* is one matrix, or as many as fit.
"""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region, aligned, same_bits
from reshard.engines.placing.rules import PlacedTensors
from reshard.refit.copying.transposes import Transpose, Transposes

# The most that a round has, unless one matrix alone is larger. In half of that launches take longer than the bytes.
ROUND_BYTES = 128 << 20


class TurnedMatrix(NamedTuple):
    """A matrix that arrives as `staged`, in the slab, in `round`, and is served from the region `served`, which has a
    row for each of its columns. `rows` and `columns` are those of the published matrix."""

    staged: Region
    served: Region
    round: int
    rows: int
    columns: int

    def transpose(self) -> Transpose:
        """Return where both are now."""
        return Transpose(
            self.staged.address, self.served.address, self.rows, self.columns, self.staged.pitch, self.served.pitch,
            self.served.tensor.element_size(),
        )  # fmt: skip

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is served and what has arrived, as ``[columns, rows]`` both."""
        sizes = self.columns, self.rows
        return _strided(self.served, sizes, (self.served.pitch, 1)), _strided(
            self.staged, sizes, (1, self.staged.pitch)
        )


class TurnedMatrices:
    """The matrices of an engine's rank that it serves turned, by the ids of their local tensors, and the slab through
    which they come; no memory without any."""

    def __init__(self, matrices: Mapping[Any, TurnedMatrix]) -> None:
        self.matrices = matrices
        self._by_round: dict[int, list[tuple[Any, TurnedMatrix]]] = {}
        for identity, matrix in matrices.items():
            self._by_round.setdefault(matrix.round, []).append((identity, matrix))
        self._on_gpu: dict[int, Transposes] = {}  # by round

    @staticmethod
    def of(placed: PlacedTensors, first_round: int = 0) -> "TurnedMatrices":
        """Return those among placed tensors. Their rounds are numbered from `first_round` on."""
        matrices: dict[Any, TurnedMatrix] = {}
        if not placed.turned:
            return TurnedMatrices(matrices)
        shapes = {identity: placed.placement.tensors[identity].shape for identity in placed.turned}
        sizes = {
            identity: aligned(prod(shape) * placed.turned[identity].tensor.element_size())
            for identity, shape in shapes.items()
        }
        limit = max(ROUND_BYTES, *sizes.values())
        starts, number, end = {}, first_round, 0
        for identity, size in sizes.items():
            if end + size > limit:
                number, end = number + 1, 0
            starts[identity] = number, end
            end += size
        device = next(iter(placed.turned.values())).tensor.device
        length = max(start + sizes[identity] for identity, (_, start) in starts.items())
        slab = torch.zeros(aligned(length), dtype=torch.uint8, device=device)
        of_dtype: dict[torch.dtype, torch.Tensor] = {}
        if device.type == "cuda":
            from reshard.refit.copying.transpose_kernels import compile_transposes

            for size in {served.tensor.element_size() for served in placed.turned.values()}:
                compile_transposes(size, device)
        for identity, served in placed.turned.items():
            (number, start), (rows, columns) = starts[identity], shapes[identity]
            dtype = served.tensor.dtype
            flat = of_dtype.setdefault(dtype, slab.view(dtype))
            staged = Region(flat, start // dtype.itemsize, columns)
            matrices[identity] = TurnedMatrix(staged, served, number, rows, columns)
        return TurnedMatrices(matrices)

    @property
    def staged(self) -> dict[Any, Region]:
        """The regions in the slab."""
        return {identity: matrix.staged for identity, matrix in self.matrices.items()}

    @property
    def rounds(self) -> dict[Any, int]:
        """The round of each."""
        return {identity: matrix.round for identity, matrix in self.matrices.items()}

    def served_tensors(self) -> set[int]:
        """Return the identities of the tensors that they are served from."""
        return {id(matrix.served.tensor) for matrix in self.matrices.values()}

    def replaced(self, before: torch.Tensor, current: torch.Tensor) -> "TurnedMatrices":
        """Return the same, served from another tensor in the place of one."""
        if id(before) not in self.served_tensors():
            return self
        return TurnedMatrices(
            {
                identity: matrix._replace(served=matrix.served._replace(tensor=current))
                if matrix.served.tensor is before
                else matrix
                for identity, matrix in self.matrices.items()
            }
        )

    def write(self, number: int) -> None:
        """Write the transposes of what lies in the slab to where a round's matrices are served from; on a GPU, on the
        current stream."""
        if (on_gpu := self._transposes(number)) is not None:
            on_gpu.write()
            return
        for _, matrix in self._by_round[number]:
            served, arrived = matrix.views()
            served.copy_(arrived)

    def _transposes(self, number: int) -> Transposes | None:
        """Return those of a round, from and to where they are now; None on a CPU."""
        matrices = [matrix for _, matrix in self._by_round[number]]
        device = matrices[0].served.tensor.device
        if device.type != "cuda":
            return None
        now, known = tuple(matrix.transpose() for matrix in matrices), self._on_gpu.get(number)
        if known is None or known.matrices != now:
            known = self._on_gpu[number] = Transposes(now, device)
        return known

    def mismatches(self, number: int) -> list[Any]:
        """Return the ids of a round's matrices that are served as something else than the transposes of what lies in
        the slab."""
        if (on_gpu := self._transposes(number)) is not None:
            return [self._by_round[number][index][0] for index in on_gpu.mismatches()]
        return [identity for identity, matrix in self._by_round[number] if not same_bits(*matrix.views())]

    def check_as_loaded(self, layers: Collection[str], how: str, instead: str) -> None:
        """Raise ReshardError for a matrix of `layers` that are not served as their loader leaves them: `how` says what
        the first of these is, `instead` what a user may do."""
        for name, *_ in self.matrices:
            if name.rpartition(".")[0] in layers:
                raise ReshardError(
                    f"{how}, and its loader turns what it writes into {name}, which a refit does not support together: "
                    f"{instead}"
                )


def no_moved_turned(engine: str, placed: PlacedTensors) -> ReshardError:
    """Return the error for an engine that moves experts, and serves some matrices turned."""
    name = next(iter(placed.turned))[0]
    return ReshardError(
        f"{engine}'s loader turns what it writes into {name}, and a refit does not follow such experts where they move "
        f"by their load (EPLB): start it without EPLB"
    )


def _strided(region: Region, sizes: tuple[int, int], strides: tuple[int, int]) -> torch.Tensor:
    tensor = region.tensor.detach()
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + region.offset)
