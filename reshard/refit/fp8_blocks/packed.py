"""Blocks of fp8 that travel: made on the trainer's rank that has all of a block, for half the
bytes.

Both ends cut the pieces of a pair alike into blocks, in the order of the pieces: in a line of ranks at several layouts
(`reshard.refit.relays`) they lie in other places on each. A *packed block* is its codes, row after row,
and then its scale. The trainer's rank makes it in the bucket or slab, and the inference rank copies
it from there to where it serves from. The parts of a block that no piece reaches are padding, and
zero. Blocks of which several ranks hold parts travel otherwise: `split`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.device.cuda import on_device
from reshard.refit.codecs import SOURCE_SIZES
from reshard.refit.codecs.places import PITCH, PLACE
from reshard.refit.copying.flows import Placed
from reshard.refit.copying.tables import ALIGNMENT, DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, empty_table
from reshard.refit.fp8_blocks.items import (
    BlockItems,
    BlockTable,
    cut,
    digest_items_on_host,
    items_of,
    kernel_of,
    size_of,
)
from reshard.refit.fp8_blocks.tables import (
    CODES,
    CODES_PITCH,
    FIRST_FRAGMENT,
    FRAGMENT_COLUMNS,
    FRAGMENT_ROWS,
    FRAGMENTS,
    ITEM_COLUMNS,
    ITEM_ROWS,
    LEFT,
    SCALES,
    TOP,
    BlockKernel,
)

SCALE = 4  # bytes
FP8 = (8, 9)  # the compute capability from which on a GPU converts to fp8


def compile_block_kernels(codecs: np.ndarray, makes: bool, device: torch.device) -> None:
    """Compile now the kernels that the first refit would wait for where blocks of these codecs are
    packed (`makes`) or unpacked.

    Raises ReshardError where this GPU cannot make them.
    """
    if device.type != "cuda" or not len(codecs):
        return
    from reshard.refit.copying.kernels import compile_copy
    from reshard.refit.fp8_blocks.kernels import compile_quantize

    if not makes:
        compile_copy(SCALE, device, 1)
        return
    if torch.cuda.get_device_capability(device) < FP8:
        raise ReshardError(
            "this trainer's rank has to make the fp8 blocks that it sends, which "
            f"{torch.cuda.get_device_name(device)} cannot: put trainer and engine on one host, or serve in "
            "bf16"
        )
    compile_quantize(BlockKernel(True, 1, size_of(SOURCE_SIZES[codecs])), device)


def cut_into_blocks(pieces: Placed, places: np.ndarray) -> BlockItems:
    """Return the blocks that pieces make up, each an item, for the end that `pieces` and `places`
    know: source or destination. They are in the order of the first piece of each."""
    blocks = cut(pieces.table, pieces.destinations, np.arange(len(pieces.table)), places, 1)
    if not len(blocks.items):
        return blocks
    order = np.argsort(np.minimum.reduceat(blocks.owners, blocks.items[:, FIRST_FRAGMENT]), kind="stable")
    items = blocks.items[order]
    begins, counts = items[:, FIRST_FRAGMENT], items[:, FRAGMENTS]
    first = np.cumsum(counts) - counts
    fragment = np.arange(len(blocks.fragments)) + np.repeat(begins - first, counts)
    items[:, FIRST_FRAGMENT] = first
    return BlockItems(items, blocks.fragments[fragment], np.zeros_like(fragment), blocks.tensors[order])


def padding_outside(padding: Placed, sent: Iterable[Placed], places: np.ndarray) -> Placed:
    """Return the rows of padding that lie in no block of the pieces that are sent, since those bring their own."""
    brought = [cut_into_blocks(pieces, places).items[:, CODES] for pieces in sent if len(pieces.table)]
    if not brought:
        return padding
    blocks = cut(padding.table, padding.destinations, np.arange(len(padding.table)), places, 1)
    sent_codes = np.concatenate(brought)
    item = np.repeat(np.arange(len(blocks.items)), blocks.items[:, FRAGMENTS])
    kept = ~np.isin(blocks.items[:, CODES], sent_codes)[item]
    fragments, tensor, row = blocks.fragments[kept], blocks.tensors[item[kept]], blocks.owners[kept]
    at = blocks.items[item[kept], CODES] - places[tensor, PLACE.start]
    pitch = places[tensor, PITCH.start]
    table = padding.table[row].copy()
    table[:, ROWS], table[:, WIDTH] = fragments[:, FRAGMENT_ROWS], fragments[:, FRAGMENT_COLUMNS]
    destinations = np.stack([tensor, at // pitch + fragments[:, TOP], at % pitch + fragments[:, LEFT]], 1)
    return Placed(table, destinations)


def _elements(items: np.ndarray) -> np.ndarray:
    count: np.ndarray = items[:, ITEM_ROWS] * items[:, ITEM_COLUMNS]
    return count


def scale_at(items: np.ndarray) -> np.ndarray:
    """Return where the scale of each packed block is, in bytes from its begin."""
    elements = _elements(items)
    return elements + -elements % ALIGNMENT


def packed_bytes(items: np.ndarray) -> np.ndarray:
    """Return the bytes of each packed block."""
    return scale_at(items) + SCALE


def packed(items: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the items of blocks that are packed each from its address in `begins` on."""
    items = items.copy()
    items[:, CODES], items[:, CODES_PITCH] = begins, items[:, ITEM_COLUMNS]
    items[:, SCALES] = begins + scale_at(items)
    return items


class Fp8PackedBlocks:
    """The blocks that the pieces of a pair make up, and the bytes of each while it travels."""

    def __init__(self, pieces: Placed, places: np.ndarray) -> None:
        self.blocks = cut_into_blocks(pieces, places)
        self.sizes = packed_bytes(self.blocks.items)

    @property
    def facts(self) -> Sequence[np.ndarray]:
        """The items and fragments that the blocks are made of."""
        return self.blocks.items, self.blocks.fragments

    def making(self, first: int, last: int, begins: np.ndarray, device: torch.device) -> BlockTable:
        """Return the table that makes the blocks from number `first` up to `last`, each packed from its address in
        `begins` on."""
        blocks = slice_blocks(self.blocks, first, last)
        items = packed(blocks.items, begins)
        return BlockTable(blocks._replace(items=items), device, np.arange(len(items)))

    def copies(self, first: int, last: int, begins: np.ndarray) -> np.ndarray:
        """Return the plain copies that put these blocks, packed from `begins` on, where they are served from."""
        items = slice_blocks(self.blocks, first, last).items
        codes, scales = empty_table(len(items)), empty_table(len(items))
        codes[:, SRC], codes[:, DST] = begins, items[:, CODES]
        codes[:, ROWS], codes[:, WIDTH] = items[:, ITEM_ROWS], items[:, ITEM_COLUMNS]
        codes[:, SRC_PITCH], codes[:, DST_PITCH] = items[:, ITEM_COLUMNS], items[:, CODES_PITCH]
        scales[:, SRC], scales[:, DST] = begins + scale_at(items), items[:, SCALES]
        scales[:, ROWS], scales[:, WIDTH] = 1, SCALE
        return np.concatenate([codes, scales])


def slice_blocks(blocks: BlockItems, first: int, last: int) -> BlockItems:
    """Return the blocks from number `first` up to `last`."""
    items = blocks.items[first:last].copy()
    if not len(items):
        return BlockItems(items, blocks.fragments[:0], blocks.owners[:0], blocks.tensors[:0])
    start, end = items[0, FIRST_FRAGMENT], items[-1, FIRST_FRAGMENT] + items[-1, FRAGMENTS]
    items[:, FIRST_FRAGMENT] -= start
    return BlockItems(
        items, blocks.fragments[start:end], blocks.owners[start:end], blocks.tensors[first:last]
    )


class Fp8BlockDigests:
    """A digest of each item of the blocks that pieces make up, at one end: of their codes and scales as a trainer's
    rank makes them anew, or, with `served`, as they lie where an inference rank serves from. `tensors` are the
    indices of the items' local tensors.

    The tables stay on the GPU, for who takes the same digests again.
    """

    def __init__(self, pieces: Placed, places: np.ndarray, served: bool, device: torch.device) -> None:
        blocks = items_of(pieces.table, pieces.destinations, np.zeros(len(pieces.table), np.int64), places)
        self.tensors, self.served = blocks.tensors, served
        self.kernel = kernel_of(blocks)
        self.items: torch.Tensor | np.ndarray = blocks.items
        self.fragments: torch.Tensor | np.ndarray = blocks.fragments
        if device.type == "cuda":
            self.items, self.fragments = on_device(blocks.items, device), on_device(blocks.fragments, device)
        self.sums: torch.Tensor | np.ndarray | None = None  # of what was begun, and not asked for yet

    def begin(self) -> None:
        """Take the digests; on a GPU, enqueue it on the current stream."""
        if isinstance(self.items, torch.Tensor) and isinstance(self.fragments, torch.Tensor):
            from reshard.refit.fp8_blocks.kernels import digest_items

            self.sums = digest_items(self.items, self.fragments, self.kernel, self.served)
        elif isinstance(self.items, np.ndarray) and isinstance(self.fragments, np.ndarray):
            self.sums = digest_items_on_host(self.items, self.fragments, self.served)

    def result(self) -> np.ndarray:
        """Return the digests that were begun, int64 ``[items]``."""
        sums, self.sums = self.sums, None
        assert sums is not None
        return sums.cpu().numpy() if isinstance(sums, torch.Tensor) else sums
