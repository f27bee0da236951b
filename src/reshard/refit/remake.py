"""What was quantised, made once more for a check: gathered by plain copies, digested as the trainer has it,
quantised from there, and compared with what the engine serves.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from reshard.live.engine import Engine
from reshard.refit.addresses import COUNT, ELEMENTS, ENCODED, Pieces, from_source
from reshard.refit.blocks import BF16, BLOCK, BlockTable, Quantised, strips_of
from reshard.refit.codecs import BLOCKWISE, PLAIN, codec_between
from reshard.refit.copies import CopyTable
from reshard.refit.digests import Digests
from reshard.refit.tables import CODEC, DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, empty_table, tiles_of

BATCH = 128 << 20  # elements at a time, or one local tensor


class Remade(NamedTuple):
    """By trainer's rank the digests of the pieces that were quantised, as the trainer has them; and the indices of
    the local tensors that hold other codes or scales than come of them."""

    digests: dict[int, np.ndarray]
    unlike: list[int]


def remade(
    engine: Engine, pieces: Mapping[int, Pieces], shards: Mapping[int, np.ndarray], device: torch.device
) -> Remade:
    """Make it of `shards`, the (address, pitch in bytes) of each trainer's rank, which must be mapped."""
    split = {rank: BLOCKWISE[some.asked[:, ENCODED]] for rank, some in pieces.items()}
    found = Remade({rank: np.zeros(chosen.sum(), np.int64) for rank, chosen in split.items()}, [])
    identities = list(engine.regions)
    shapes = [engine.placement.tensors[identity].shape for identity in identities]
    wanted = [index for index, identity in enumerate(identities) if identity in engine.scales]
    for batch in _batches(wanted, [rows * columns for rows, columns in (shapes[index] for index in wanted)]):
        elements = [shapes[index][0] * shapes[index][1] for index in batch]
        starts = dict(zip(batch, np.cumsum([0, *elements]).tolist(), strict=False))
        held = torch.zeros(sum(elements), dtype=torch.bfloat16, device=device)
        for rank, some in pieces.items():
            here = np.flatnonzero(split[rank] & np.isin(some.into[:, 0], batch))
            if not len(here):
                continue
            asked, (index, row, column) = some.asked[here].copy(), some.into[here].T
            columns = np.array([shapes[i][1] for i in index])
            table = empty_table(len(here))
            asked[:, ENCODED] = PLAIN
            at = np.array([starts[i] for i in index]) + row * columns + column
            table[:, DST], table[:, DST_PITCH] = held.data_ptr() + at * BF16.size, columns * BF16.size
            table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS] * BF16.size
            table = from_source(table, asked, shards[rank])
            CopyTable(tiles_of(table)[0], device).run()
            table[:, SRC], table[:, SRC_PITCH] = table[:, DST], table[:, DST_PITCH]
            digests = Digests(table, asked[:, ELEMENTS], device).result()
            found.digests[rank][np.searchsorted(np.flatnonzero(split[rank]), here)] = digests
        found.unlike.extend(_unlike(engine, [identities[index] for index in batch], batch, held, device))
    return found


def _batches(indices: list[int], sizes: list[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    total = 0
    for index, size in zip(indices, sizes, strict=True):
        if batch and total + size > BATCH:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch


def _unlike(
    engine: Engine, identities: list, indices: list[int], held: torch.Tensor, device: torch.device
) -> list[int]:
    """Quantise what is held of these local tensors, one after the other; the indices of those that differ from the
    engine's."""
    shapes = np.array([engine.placement.tensors[identity].shape for identity in identities], np.int64)
    blocks = -(-shapes // BLOCK)
    elements, scales = shapes.prod(1), blocks.prod(1)
    codes = torch.zeros(int(elements.sum()), dtype=torch.uint8, device=device)
    factors = torch.zeros(int(scales.sum()), dtype=torch.float32, device=device)
    first, first_scale = np.cumsum(elements) - elements, np.cumsum(scales) - scales
    here = np.stack(
        [codes.data_ptr() + first, shapes[:, 1], factors.data_ptr() + first_scale * 4, blocks[:, 1]], 1
    )
    numbers = [
        codec_between("bfloat16", "float8_e4m3fn", engine.scales[identity].rounding)
        for identity in identities
    ]
    table, into = empty_table(len(indices)), np.zeros((len(indices), 3), np.int64)
    table[:, SRC], table[:, SRC_PITCH] = held.data_ptr() + first * BF16.size, shapes[:, 1] * BF16.size
    table[:, ROWS], table[:, WIDTH] = shapes.T
    table[:, CODEC], into[:, 0] = numbers, np.arange(len(indices))
    for codec in set(numbers):
        chosen = table[:, CODEC] == codec
        nobody = np.zeros(chosen.sum(), np.int64)
        strips = strips_of(table[chosen], into[chosen], nobody, Quantised(np.concatenate([here, shapes], 1)))
        BlockTable(strips, int(codec or 0), device, np.arange(len(strips.items))).run()
    there = Quantised.of(engine).matrix[indices]
    wrong = np.zeros(len(indices), bool)
    for place, pitch, extent, size in ((0, 1, shapes, 1), (2, 3, blocks, 4)):
        both = []
        for matrix in (here, there):
            held_there = empty_table(len(indices))
            held_there[:, SRC], held_there[:, SRC_PITCH] = matrix[:, place], matrix[:, pitch] * size
            held_there[:, ROWS], held_there[:, WIDTH] = extent[:, 0], extent[:, 1] * size
            both.append(Digests(held_there, extent[:, 1], device).result())
        wrong |= both[0] != both[1]
    return [index for index, differs in zip(indices, wrong, strict=True) if differs]
