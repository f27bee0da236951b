"""Boxes cut into tiles for the kernel of digests (`reshard.device.digest_kernels`)."""

from collections.abc import Sequence

import numpy as np

from reshard.device.live_boxes import LiveBox
from reshard.digests.numbers import MASK
from reshard.storage.io.boxes import Rows

# A tile: its address, its box, rows, columns, elements from one row to the next, the counter of its first row's key,
# and its first column in the tensor.
TILE = 7
ADDRESS, BOX, TILE_ROWS, TILE_COLUMNS, PITCH, ROW_COUNTER, COLUMN = range(TILE)
BLOCK = 2048  # elements that a program of the kernel holds sums of
MOST_COLUMNS = 1024
TILE_ELEMENTS = 1 << 16


def block_columns(columns: int) -> int:
    """Return how many columns a program of the kernel has, a power of two.

    >>> [block_columns(columns) for columns in (1, 4, 33, 1536, 4096, 5000)]
    [1, 4, 64, 512, 1024, 1024]
    """
    largest = min(columns & -columns, MOST_COLUMNS)
    return largest if largest >= 128 else min(1 << (columns - 1).bit_length(), MOST_COLUMNS)


def tiles_of(boxes: Sequence[LiveBox], seeds: Sequence[int]) -> dict[tuple[str, str, int], np.ndarray]:
    """Cut boxes into tiles for the kernel; return them by held dtype, dtype that counts, and columns of a program."""
    tiles: dict[tuple[str, str, int], list[np.ndarray]] = {}
    for index, (box, seed) in enumerate(zip(boxes, seeds, strict=True)):
        rows, tensor = Rows.of(box.box), box.region.tensor
        n_rows, width = rows.stop - rows.start, rows.columns
        if not n_rows * width:
            continue
        block, size = block_columns(width), tensor.element_size()
        step = max(BLOCK // block, TILE_ELEMENTS // block)
        starts, columns = np.arange(0, n_rows, step), np.arange(0, width, block)
        first, column = (grid.reshape(-1) for grid in np.meshgrid(starts, columns, indexing="ij"))
        pitch = box.region.pitch
        begin = box.region.address + (box.local.start * pitch + box.local.column) * size
        of_box = np.empty((len(first), TILE), np.int64)
        of_box[:, ADDRESS], of_box[:, BOX] = begin + (first * pitch + column) * size, index
        of_box[:, TILE_ROWS] = np.minimum(step, n_rows - first)
        of_box[:, TILE_COLUMNS] = np.minimum(block, width - column)
        of_box[:, PITCH], of_box[:, COLUMN] = pitch, rows.column + column
        counters = first.astype(np.uint64) + np.uint64((seed + rows.start) & MASK)
        of_box[:, ROW_COUNTER] = counters.view(np.int64)
        kind = str(tensor.dtype).removeprefix("torch."), box.dtype.name, block
        tiles.setdefault(kind, []).append(of_box)
    return {kind: np.concatenate(of_kind) for kind, of_kind in tiles.items()}
