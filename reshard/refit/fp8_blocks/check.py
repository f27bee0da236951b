"""What was made of blocks here, made once more for a check: gathered by plain copies, digested as the trainer has it,
quantized from there, and compared with what the engine serves.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from reshard.engines.base import Engine
from reshard.quantization.fp8_blocks import BLOCK
from reshard.refit.addresses import (
    COUNT,
    ELEMENTS,
    ENCODED,
    Pieces,
    as_read,
    from_source,
)
from reshard.refit.codecs import BEFORE_BLOCKS, PLAIN, by_rounding
from reshard.refit.copies import CopyTable
from reshard.refit.digests import Digests
from reshard.refit.fp8_blocks.strips import (
    BF16,
    ENCODING,
    PITCH,
    PLACE,
    SHAPE,
    BlockTable,
    places_of,
    strips_of,
)
from reshard.refit.tables import CODEC, DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, empty_table, tiles_of

BATCH = 128 << 20  # elements at a time, or one local tensor


class Requantized(NamedTuple):
    """By trainer's rank a digest for each piece: of those that were quantized as the trainer has them, 0 for the
    others; and the indices of the local tensors that hold other codes or scales than come of them."""

    digests: dict[int, np.ndarray]
    unlike: list[int]


def requantized(
    engine: Engine,
    pieces: Mapping[int, Pieces],
    shards: Mapping[int, np.ndarray],
    sent: np.ndarray,
    device: torch.device,
) -> Requantized:
    """Make it of `shards`, the (address, pitch in bytes) of each trainer's rank that is read, which must be
    mapped; of local tensors in `sent`, of which blocks came in another way, only what these pieces are."""
    found = Requantized({rank: np.zeros(len(some.into), np.int64) for rank, some in pieces.items()}, [])
    served = places_of(engine)
    boxes = _boxes(pieces, served, sent)
    wanted = np.unique(boxes[:, 0])
    elements = served[:, SHAPE].prod(1)
    number = np.cumsum(elements[wanted]) // BATCH
    for batch in (wanted[number == n] for n in np.unique(number)):
        first = np.full(len(served), -1, np.int64)  # of each local tensor, among what is held
        first[batch] = np.cumsum(elements[batch]) - elements[batch]
        held = torch.zeros(int(elements[batch].sum()), dtype=torch.bfloat16, device=device)
        for rank, here, part in _of(pieces, first >= 0):
            found.digests[rank][here] = _gathered(part, shards[rank], served, first, held, device)
        here = boxes[first[boxes[:, 0]] >= 0]
        found.unlike.extend(_unlike(here, served, first, held, device))
    return found


def _boxes(pieces: Mapping[int, Pieces], served: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """What is made of blocks here, as local tensor, first row and column, rows and columns: whole local tensors
    with their padding, or the pieces of those that others sent blocks of."""
    quantized = served[:, ENCODING] != PLAIN
    whole = np.flatnonzero(quantized & ~np.isin(np.arange(len(served)), sent))
    found = [np.concatenate([whole[:, None], np.zeros((len(whole), 2), np.int64), served[whole, SHAPE]], 1)]
    for some in pieces.values():
        here = np.isin(some.into[:, 0], sent)
        found.append(np.concatenate([some.into, some.asked[:, [COUNT, ELEMENTS]]], 1)[here])
    return np.concatenate(found)


def _of(pieces: Mapping[int, Pieces], tensors: np.ndarray) -> Iterator[tuple[int, np.ndarray, Pieces]]:
    """The trainers' ranks that have pieces of these local tensors, the indices of those, and them."""
    for rank, some in pieces.items():
        here = np.flatnonzero(tensors[some.into[:, 0]])
        if len(here):
            yield rank, here, some.where(here)


def _gathered(
    pieces: Pieces,
    shards: np.ndarray,
    served: np.ndarray,
    first: np.ndarray,
    held: torch.Tensor,
    device: torch.device,
) -> np.ndarray:
    """Copy pieces to where they belong in local tensors that begin at `first` elements of `held`; their digests."""
    asked, (index, row, column) = pieces.asked.copy(), pieces.into.T
    asked[:, ENCODED] = BEFORE_BLOCKS[asked[:, ENCODED]]
    pitch = served[index, SHAPE][:, 1] * BF16.size
    table = empty_table(len(asked))
    table[:, DST_PITCH] = pitch
    table[:, DST] = held.data_ptr() + (first[index] + column) * BF16.size + row * pitch
    table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS] * BF16.size
    table[:, CODEC] = asked[:, ENCODED]
    table = from_source(table, asked, shards)
    CopyTable(tiles_of(table)[0], device).run()
    return Digests(as_read(table), asked[:, ELEMENTS], device).result()


def _unlike(
    boxes: np.ndarray, served: np.ndarray, first: np.ndarray, held: torch.Tensor, device: torch.device
) -> list[int]:
    """Quantize boxes of what is held of these local tensors, one after the other; the indices of those whose codes
    or scales differ from the engine's there."""
    batch, inverse = np.unique(boxes[:, 0], return_inverse=True)
    shapes = served[batch, SHAPE]
    blocks = -(-shapes // BLOCK)
    elements, scales = shapes.prod(1), blocks.prod(1)
    first_code, first_scale = np.cumsum(elements) - elements, np.cumsum(scales) - scales
    codes = torch.zeros(int(elements.sum()), dtype=torch.uint8, device=device)
    factors = torch.zeros(int(scales.sum()), dtype=torch.float32, device=device)
    there = served[batch]
    here = there.copy()
    here[:, PLACE] = np.stack([codes.data_ptr() + first_code, factors.data_ptr() + first_scale * 4], 1)
    here[:, PITCH] = np.stack([shapes[:, 1], blocks[:, 1]], 1)
    row, column, rows, columns = boxes[:, 1:].T
    table, into = empty_table(len(boxes)), np.stack([inverse, row, column], 1)
    width = shapes[inverse, 1]
    table[:, SRC] = held.data_ptr() + (first[boxes[:, 0]] + row * width + column) * BF16.size
    table[:, SRC_PITCH], table[:, ROWS], table[:, WIDTH] = width * BF16.size, rows, columns
    table[:, CODEC] = there[inverse, ENCODING]
    for rounding, these in by_rounding(table[:, CODEC]):
        strips = strips_of(table[these], into[these], np.zeros(these.sum(), np.int64), here)
        BlockTable(strips, rounding, device, np.arange(len(strips.items))).run()
    at = np.stack([row, column], 1)
    of_scales = at // BLOCK, -(-(at + boxes[:, 3:]) // BLOCK) - at // BLOCK
    wrong = np.zeros(len(boxes), bool)
    for which, ((begin, extent), size) in enumerate((((at, boxes[:, 3:]), 1), (of_scales, 4))):
        both = []
        for matrix in (here, there):
            place, pitch = matrix[inverse, PLACE][:, which], matrix[inverse, PITCH][:, which]
            table = empty_table(len(boxes))
            table[:, SRC] = place + (begin[:, 0] * pitch + begin[:, 1]) * size
            table[:, SRC_PITCH], table[:, ROWS], table[:, WIDTH] = (
                pitch * size,
                extent[:, 0],
                extent[:, 1] * size,
            )
            both.append(Digests(table, extent[:, 1], device).result())
        wrong |= both[0] != both[1]
    return [int(index) for index in np.unique(boxes[wrong, 0])]
