"""The check of blocks that an inference rank made itself: their bf16 is gathered once more by plain
copies, digested as the trainer digests it, encoded from there, and compared with what the engine
serves."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from reshard.engines.base import Engine
from reshard.quantization.fp8_blocks import BLOCK
from reshard.refit.addresses import (
    COLUMN_COUNT,
    REQUEST_CODEC,
    ROW_COUNT,
    Pieces,
    reading_destination,
    with_sources,
)
from reshard.refit.codecs import BEFORE_BLOCKS, PLAIN, by_rounding
from reshard.refit.copies import CopyTable
from reshard.refit.digests import Digests
from reshard.refit.fp8_blocks.items import (
    BF16,
    ENCODING,
    PITCH,
    PLACE,
    SHAPE,
    BlockTable,
    items_of,
    places_of,
)
from reshard.refit.tables import CODEC, DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, empty_table, tiles_of

BATCH = 128 << 20  # elements at a time, or one local tensor


class Requantized(NamedTuple):
    """By trainer's rank a digest of the bf16 of each piece in blocks, 0 for other pieces; and the
    indices of the local tensors whose codes or scales are not what these pieces make."""

    digests: dict[int, np.ndarray]
    unlike: list[int]


def requantized(
    engine: Engine,
    pieces: Mapping[int, Pieces],
    shards: Mapping[int, np.ndarray],
    sent: np.ndarray,
    device: torch.device,
) -> Requantized:
    """Make the blocks of `pieces` once more and compare them.

    `shards` are the (address, pitch in bytes) of the shards of each trainer's rank, which must be
    mapped. Of the local tensors in `sent`, some blocks came another way: only what these pieces
    reach is compared.
    """
    digests = {rank: np.zeros(len(of_rank.destinations), np.int64) for rank, of_rank in pieces.items()}
    outcome = Requantized(digests, [])
    served = places_of(engine)
    boxes = _boxes(pieces, served, sent)
    wanted = np.unique(boxes[:, 0])
    elements = served[:, SHAPE].prod(1)
    number = np.cumsum(elements[wanted]) // BATCH
    for batch in (wanted[number == n] for n in np.unique(number)):
        first = np.full(len(served), -1, np.int64)  # of each local tensor, among what is held
        first[batch] = np.cumsum(elements[batch]) - elements[batch]
        held = torch.zeros(int(elements[batch].sum()), dtype=torch.bfloat16, device=device)
        for rank, chosen, chosen_pieces in _pieces_of(pieces, first >= 0):
            outcome.digests[rank][chosen] = _gather(chosen_pieces, shards[rank], served, first, held, device)
        batch_boxes = boxes[first[boxes[:, 0]] >= 0]
        outcome.unlike.extend(_differing(batch_boxes, served, first, held, device))
    return outcome


def _boxes(pieces: Mapping[int, Pieces], served: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """Return what this rank makes in blocks, as local tensor, first row and column, rows and
    columns: whole local tensors with their padding, or the pieces of those that others sent blocks
    of."""
    quantized = served[:, ENCODING] != PLAIN
    whole = np.flatnonzero(quantized & ~np.isin(np.arange(len(served)), sent))
    boxes = [np.concatenate([whole[:, None], np.zeros((len(whole), 2), np.int64), served[whole, SHAPE]], 1)]
    for of_rank in pieces.values():
        chosen = np.isin(of_rank.destinations[:, 0], sent)
        boxes.append(
            np.concatenate([of_rank.destinations, of_rank.requests[:, [ROW_COUNT, COLUMN_COUNT]]], 1)[chosen]
        )
    return np.concatenate(boxes)


def _pieces_of(pieces: Mapping[int, Pieces], tensors: np.ndarray) -> Iterator[tuple[int, np.ndarray, Pieces]]:
    """Yield the trainer's ranks that have pieces of these local tensors, with the indices of those
    pieces, and the pieces."""
    for rank, of_rank in pieces.items():
        chosen = np.flatnonzero(tensors[of_rank.destinations[:, 0]])
        if len(chosen):
            yield rank, chosen, of_rank.where(chosen)


def _gather(
    pieces: Pieces,
    shards: np.ndarray,
    served: np.ndarray,
    first: np.ndarray,
    held: torch.Tensor,
    device: torch.device,
) -> np.ndarray:
    """Copy pieces to where they belong in local tensors that begin at `first` elements of `held`,
    and return their digests."""
    requests, (index, row, column) = pieces.requests.copy(), pieces.destinations.T
    requests[:, REQUEST_CODEC] = BEFORE_BLOCKS[requests[:, REQUEST_CODEC]]
    pitch = served[index, SHAPE][:, 1] * BF16.size
    table = empty_table(len(requests))
    table[:, DST_PITCH] = pitch
    table[:, DST] = held.data_ptr() + (first[index] + column) * BF16.size + row * pitch
    table[:, ROWS], table[:, WIDTH] = requests[:, ROW_COUNT], requests[:, COLUMN_COUNT] * BF16.size
    table[:, CODEC] = requests[:, REQUEST_CODEC]
    table = with_sources(table, requests, shards)
    CopyTable(tiles_of(table)[0], device).run()
    return Digests(reading_destination(table), requests[:, COLUMN_COUNT], device).result()


def _differing(
    boxes: np.ndarray, served: np.ndarray, first: np.ndarray, held: torch.Tensor, device: torch.device
) -> list[int]:
    """Encode boxes of the local tensors in `held`, and return the indices of the tensors whose
    codes or scales differ from the engine's."""
    batch, inverse = np.unique(boxes[:, 0], return_inverse=True)
    shapes = served[batch, SHAPE]
    blocks = -(-shapes // BLOCK)
    elements, scales = shapes.prod(1), blocks.prod(1)
    first_code, first_scale = np.cumsum(elements) - elements, np.cumsum(scales) - scales
    codes = torch.zeros(int(elements.sum()), dtype=torch.uint8, device=device)
    factors = torch.zeros(int(scales.sum()), dtype=torch.float32, device=device)
    engine_places = served[batch]
    own_places = engine_places.copy()
    own_places[:, PLACE] = np.stack([codes.data_ptr() + first_code, factors.data_ptr() + first_scale * 4], 1)
    own_places[:, PITCH] = np.stack([shapes[:, 1], blocks[:, 1]], 1)
    row, column, rows, columns = boxes[:, 1:].T
    table, destinations = empty_table(len(boxes)), np.stack([inverse, row, column], 1)
    width = shapes[inverse, 1]
    table[:, SRC] = held.data_ptr() + (first[boxes[:, 0]] + row * width + column) * BF16.size
    table[:, SRC_PITCH], table[:, ROWS], table[:, WIDTH] = width * BF16.size, rows, columns
    table[:, CODEC] = engine_places[inverse, ENCODING]
    for rounding, mask in by_rounding(table[:, CODEC]):
        blocks_made = items_of(table[mask], destinations[mask], np.zeros(mask.sum(), np.int64), own_places)
        BlockTable(blocks_made, rounding, device, np.arange(len(blocks_made.items))).run()
    at = np.stack([row, column], 1)
    of_scales = at // BLOCK, -(-(at + boxes[:, 3:]) // BLOCK) - at // BLOCK
    wrong = np.zeros(len(boxes), bool)
    for which, ((begin, extent), size) in enumerate((((at, boxes[:, 3:]), 1), (of_scales, 4))):
        digests = []
        for matrix in (own_places, engine_places):
            place, pitch = matrix[inverse, PLACE][:, which], matrix[inverse, PITCH][:, which]
            table = empty_table(len(boxes))
            table[:, SRC] = place + (begin[:, 0] * pitch + begin[:, 1]) * size
            table[:, SRC_PITCH], table[:, ROWS], table[:, WIDTH] = (
                pitch * size,
                extent[:, 0],
                extent[:, 1] * size,
            )
            digests.append(Digests(table, extent[:, 1], device).result())
        wrong |= digests[0] != digests[1]
    return [int(index) for index in np.unique(boxes[wrong, 0])]
