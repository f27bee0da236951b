"""What was quantised, made once more for a check: gathered by plain copies, digested as the trainer has it,
quantised from there, by us or by the engine, and compared with what the engine serves.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from reshard.live.engine import Engine
from reshard.refit.addresses import (
    AT_ONCE,
    COUNT,
    ELEMENTS,
    ENCODED,
    Pieces,
    as_read,
    destination_table,
    fills_of,
    from_source,
    located,
    rounds_of,
)
from reshard.refit.blocks import (
    BF16,
    BLOCK,
    ENCODING,
    PITCH,
    PLACE,
    SHAPE,
    BlockTable,
    places_of,
    strips_of,
)
from reshard.refit.codecs import PLAIN
from reshard.refit.copies import CopyTable
from reshard.refit.digests import Digests
from reshard.refit.tables import CODEC, DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, empty_table, tiles_of

BATCH = 128 << 20  # elements at a time, or one local tensor


class Remade(NamedTuple):
    """By trainer's rank a digest for each piece: of those that were quantised as the trainer has them, 0 for the
    others; and the indices of the local tensors that hold other codes or scales than come of them."""

    digests: dict[int, np.ndarray]
    unlike: list[int]


def remade(
    engine: Engine, pieces: Mapping[int, Pieces], shards: Mapping[int, np.ndarray], device: torch.device
) -> Remade:
    """Make it of `shards`, the (address, pitch in bytes) of each trainer's rank, which must be mapped."""
    found = Remade({rank: np.zeros(len(some.into), np.int64) for rank, some in pieces.items()}, [])
    _in_blocks(engine, pieces, shards, device, found)
    if engine.passing:
        _in_rounds(engine, pieces, shards, device, found)
    return found


def _in_blocks(
    engine: Engine,
    pieces: Mapping[int, Pieces],
    shards: Mapping[int, np.ndarray],
    device: torch.device,
    found: Remade,
) -> None:
    """What the refit makes, of blocks."""
    served = places_of(engine)
    wanted = np.flatnonzero(served[:, ENCODING] != PLAIN)
    elements = served[:, SHAPE].prod(1)
    number = np.cumsum(elements[wanted]) // BATCH
    for batch in (wanted[number == n] for n in np.unique(number)):
        first = np.full(len(served), -1, np.int64)  # of each local tensor, among what is held
        first[batch] = np.cumsum(elements[batch]) - elements[batch]
        held = torch.zeros(int(elements[batch].sum()), dtype=torch.bfloat16, device=device)
        for rank, here, part in _of(pieces, first >= 0):
            found.digests[rank][here] = _gathered(part, shards[rank], served, first, held, device)
        found.unlike.extend(_unlike(served[batch], batch, held, device))


def _in_rounds(
    engine: Engine,
    pieces: Mapping[int, Pieces],
    shards: Mapping[int, np.ndarray],
    device: torch.device,
    found: Remade,
) -> None:
    """What the engine makes itself, of local tensors that pass through their regions."""
    rounds, places = rounds_of(engine), {identity: index for index, identity in enumerate(engine.regions)}
    memory, fills = located(engine.regions.values()), fills_of(engine, device)
    for number in np.unique(rounds[rounds != AT_ONCE]).tolist():
        CopyTable(tiles_of(fills.table[rounds[fills.into[:, 0]] == number])[0], device).run()
        for rank, here, part in _of(pieces, rounds == number):
            table = destination_table(memory, part)
            CopyTable(tiles_of(from_source(table, part.asked, shards[rank]))[0], device).run()
            digests = Digests(as_read(table), part.asked[:, ELEMENTS], device)
            found.digests[rank][here] = digests.result()
        found.unlike.extend(places[identity] for identity in engine.unlike(number))


def _of(pieces: Mapping[int, Pieces], tensors: np.ndarray) -> Iterator[tuple[int, np.ndarray, Pieces]]:
    """The trainers' ranks that have pieces of these local tensors, the indices of those, and them."""
    for rank, some in pieces.items():
        here = np.flatnonzero(tensors[some.into[:, 0]])
        if len(here):
            yield rank, here, Pieces([], some.asked[here], some.into[here])


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
    asked[:, ENCODED] = PLAIN
    pitch = served[index, SHAPE][:, 1] * BF16.size
    table = empty_table(len(asked))
    table[:, DST_PITCH] = pitch
    table[:, DST] = held.data_ptr() + (first[index] + column) * BF16.size + row * pitch
    table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS] * BF16.size
    table = from_source(table, asked, shards)
    CopyTable(tiles_of(table)[0], device).run()
    table[:, SRC], table[:, SRC_PITCH] = table[:, DST], table[:, DST_PITCH]
    return Digests(table, asked[:, ELEMENTS], device).result()


def _unlike(served: np.ndarray, indices: np.ndarray, held: torch.Tensor, device: torch.device) -> list[int]:
    """Quantise what is held of these local tensors, one after the other; the indices of those that differ from the
    engine's."""
    shapes = served[:, SHAPE]
    blocks = -(-shapes // BLOCK)
    elements, scales = shapes.prod(1), blocks.prod(1)
    first, first_scale = np.cumsum(elements) - elements, np.cumsum(scales) - scales
    codes = torch.zeros(int(elements.sum()), dtype=torch.uint8, device=device)
    factors = torch.zeros(int(scales.sum()), dtype=torch.float32, device=device)
    here = served.copy()
    here[:, PLACE] = np.stack([codes.data_ptr() + first, factors.data_ptr() + first_scale * 4], 1)
    here[:, PITCH] = np.stack([shapes[:, 1], blocks[:, 1]], 1)
    table, into = empty_table(len(here)), np.zeros((len(here), 3), np.int64)
    table[:, SRC], table[:, SRC_PITCH] = held.data_ptr() + first * BF16.size, shapes[:, 1] * BF16.size
    table[:, ROWS], table[:, WIDTH] = shapes.T
    table[:, CODEC], into[:, 0] = served[:, ENCODING], np.arange(len(here))
    for codec in np.unique(served[:, ENCODING]).tolist():
        these = table[:, CODEC] == codec
        strips = strips_of(table[these], into[these], np.zeros(these.sum(), np.int64), here)
        BlockTable(strips, codec, device, np.arange(len(strips.items))).run()
    wrong = np.zeros(len(here), bool)
    for which, (extent, size) in enumerate(((shapes, 1), (blocks, 4))):
        both = []
        for matrix in (here, served):
            table = empty_table(len(here))
            table[:, SRC], table[:, SRC_PITCH] = matrix[:, PLACE][:, which], matrix[:, PITCH][:, which] * size
            table[:, ROWS], table[:, WIDTH] = extent[:, 0], extent[:, 1] * size
            both.append(Digests(table, extent[:, 1], device).result())
        wrong |= both[0] != both[1]
    return [int(index) for index in indices[wrong]]
