"""The tables by which blocks of fp8 are made, as int64 matrices with a row for each record, and their columns: what
hosts and kernels share, as `reshard.refit.copying.tables` has it of copies."""

from typing import NamedTuple

# An item, which is a strip of blocks of fp8 beside each other: address and pitch in bytes of its
# codes, address of its first scale, rows, columns, its first fragment and how many there are, and the
# index of its rounding in `reshard.quantization.fp8_blocks.ROUNDINGS`.
ITEM = 8
CODES, CODES_PITCH, SCALES, ITEM_ROWS, ITEM_COLUMNS, FIRST_FRAGMENT, FRAGMENTS, ROUNDING = range(ITEM)
ITEM_BLOCKS = 8  # blocks of an item


class BlockKernel(NamedTuple):
    """The variant of the kernel that makes blocks of fp8 of items.

    `aligned` says that all addresses and pitches are multiples of 16 bytes, and all columns of 16 elements; an
    item has at most `blocks` blocks. `size` is the bytes of an element of the source: 2 (bf16), 4 (fp32), or 0
    where fragments differ.
    """

    aligned: bool
    blocks: int = ITEM_BLOCKS
    size: int = 2


# A fragment of an item: address and pitch in elements of the source, first row and column within
# the item, rows, columns, and the bytes of an element of the source.
FRAGMENT = 7
SOURCE, SOURCE_PITCH, TOP, LEFT, FRAGMENT_ROWS, FRAGMENT_COLUMNS, ELEMENT_BYTES = range(FRAGMENT)

# Where a fragment lies in the piece that it is of, for the piece's digest: the piece's number (`NO_PIECE`: it is
# padding), the index of the fragment's first word in the piece, and words in a row of the piece.
NO_PIECE = -1
SPAN = 3
SPAN_PIECE, SPAN_WORD, SPAN_ROW_WORDS = range(SPAN)
SPAN_ELEMENTS = 4  # bf16 of a word
