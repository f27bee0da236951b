"""The transposes of many matrices, written or compared on a GPU by one launch for all of them.

Torch copies into a transposed view by elements in the order of one side: of experts in bf16 an H200 gets 0.24 TB/s so.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from reshard.device.cuda import on_device
from reshard.refit.copying.tables import ALIGNMENT


class Transpose(NamedTuple):
    """A matrix at an address, ``[rows, columns]`` of elements of `size` bytes in rows of `pitch` elements, and the
    place of its transpose."""

    source: int
    destination: int
    rows: int
    columns: int
    source_pitch: int
    destination_pitch: int
    size: int

    @property
    def is_aligned(self) -> bool:
        """True if all rows of both begin at multiples of `ALIGNMENT` bytes, and so many bytes fill them."""
        addresses, elements = self[:2], (self.rows, self.columns, self.source_pitch, self.destination_pitch)
        return not any(each % ALIGNMENT for each in (*addresses, *(n * self.size for n in elements)))


class Transposes:
    """Transposes by a GPU's kernel, in an order; `matrices` have memory there."""

    def __init__(self, matrices: Iterable[Transpose], device: torch.device) -> None:
        from reshard.refit.copying.transpose_kernels import tiles_of_matrix

        self.matrices, self.device = tuple(matrices), device
        kinds: dict[tuple[int, bool], list[int]] = {}
        for index, one in enumerate(self.matrices):
            kinds.setdefault((one.size, one.is_aligned), []).append(index)
        # By bytes of an element and whether all is aligned: the indices, the tiles of the largest, and their table
        # on the GPU.
        self._groups = [
            (
                *kind,
                indices,
                max(tiles_of_matrix(self.matrices[i].rows, self.matrices[i].columns) for i in indices),
                on_device(np.array([self.matrices[i][:-1] for i in indices], np.int64), device),
            )
            for kind, indices in kinds.items()
        ]

    def write(self) -> None:
        """Write the transposes, on the current stream."""
        from reshard.refit.copying.transpose_kernels import transpose

        for size, aligned, _, tiles, table in self._groups:
            transpose(table, size, aligned, tiles, None)

    def mismatches(self) -> list[int]:
        """Return the indices of the matrices whose transposes have other bits than what is at their place. Waits for
        the GPU."""
        from reshard.refit.copying.transpose_kernels import transpose

        found: list[int] = []
        for size, aligned, indices, tiles, table in self._groups:
            differing = torch.zeros(len(indices), dtype=torch.int32, device=self.device)
            transpose(table, size, aligned, tiles, differing)
            found.extend(indices[at] for at in torch.nonzero(differing).flatten().tolist())
        return sorted(found)
