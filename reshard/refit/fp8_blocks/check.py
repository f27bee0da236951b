"""The check of blocks that an inference rank makes itself: of the trainer's memory, as it is mapped here,
the bf16 is digested as the trainer digests it, and the blocks are made once more and compared with what
the engine serves."""

from collections.abc import Mapping

import numpy as np
import torch

from reshard.engines.base import Engine
from reshard.refit.addresses import (
    COLUMN_COUNT,
    REQUEST_CODEC,
    Pieces,
    destination_table,
    fills_of,
    region_addresses,
    with_sources,
)
from reshard.refit.codecs import BEFORE_BLOCKS, BLOCKWISE, by_rounding
from reshard.refit.digests import Digests
from reshard.refit.fp8_blocks.items import BF16, BlockTable, items_of, places_of, take_kernel_of_pieces
from reshard.refit.tables import CODEC, WIDTH


class BlockCheck:
    """The check of an engine's blocks that are made of `pieces`, by trainer's rank.

    `shards` are the (address, pitch in bytes) of the shards of each trainer's rank, which must be
    mapped while the check runs. Of the local tensors in `sent` some blocks come another way: only what these
    pieces reach is compared. `digests` are those of the bf16 of each piece.
    """

    def __init__(
        self,
        engine: Engine,
        pieces: Mapping[int, Pieces],
        shards: Mapping[int, np.ndarray],
        sent: np.ndarray,
        device: torch.device,
    ) -> None:
        self.digests: dict[int, Digests] = {}
        memory, places = region_addresses(engine.regions.values()), places_of(engine)
        self.fills = fills_of(engine, device)  # has the zeros that are read
        padding = BLOCKWISE[self.fills.table[:, CODEC]] & ~np.isin(self.fills.destinations[:, 0], sent)
        tables, destinations = [self.fills.table[padding]], [self.fills.destinations[padding]]
        for rank, of_rank in pieces.items():
            requests = of_rank.requests
            table = with_sources(destination_table(memory, of_rank), requests, shards[rank])
            tables.append(table)
            destinations.append(of_rank.destinations)
            plain = table.copy()
            plain[:, CODEC] = BEFORE_BLOCKS[requests[:, REQUEST_CODEC]]
            plain[:, WIDTH] = requests[:, COLUMN_COUNT] * BF16.size
            self.digests[rank] = Digests(plain, requests[:, COLUMN_COUNT], device)
        table, to = np.concatenate(tables), np.concatenate(destinations)
        is_padding = np.arange(len(table)) < len(tables[0])
        self.blocks: list[BlockTable] = []
        for rounding, mask in by_rounding(table[:, CODEC]):
            chosen = table[mask]
            take_kernel_of_pieces(chosen, is_padding[mask], rounding)
            blocks = items_of(chosen, to[mask], np.zeros(len(chosen), np.int64), places)
            self.blocks.append(BlockTable(blocks, rounding, device, np.arange(len(blocks.items))))

    def run(self) -> list[int]:
        """Take the digests, and return the indices of the local tensors whose codes or scales are not what
        these pieces make."""
        for digests in self.digests.values():
            digests.begin()
        return [index for table in self.blocks for index in table.mismatches()]
