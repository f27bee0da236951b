"""The check of blocks that an inference rank makes itself: of the trainer's memory, as it is mapped here,
the bf16 is digested as the trainer digests it, and the blocks are made once more and compared with what
the engine serves."""

from collections.abc import Mapping

import numpy as np
import torch

from reshard.refit.codecs import BEFORE_BLOCKS, IN_BLOCKS
from reshard.refit.codecs.places import places_of
from reshard.refit.copying.addresses import (
    Pieces,
    destination_table,
    fills_of,
    region_addresses,
    with_sources,
)
from reshard.refit.copying.digests import Digests
from reshard.refit.copying.tables import CODEC, WIDTH, interleaved
from reshard.refit.engine import Engine
from reshard.refit.fp8_blocks.items import (
    BF16,
    BlockTable,
    is_aligned,
    items_of,
    spans_of,
    take_kernel_of_pieces,
)
from reshard.refit.fp8_blocks.tables import FIRST_FRAGMENT, NO_PIECE, SPAN_ELEMENTS


class Fp8BlockCheck:
    """The check of an engine's blocks that are made of `pieces`, by trainer's rank.

    `shards` are the (address, pitch in bytes) of the shards of each trainer's rank, which must be
    mapped while the check runs. Of the local tensors in `sent` some blocks come another way: only what these
    pieces reach is compared.

    Blocks are compared and pieces digested by the same reads of the trainer's memory, where the rows of all
    pieces are whole words at aligned addresses, as in nearly every model; else by one after the other.
    """

    def __init__(
        self,
        engine: Engine,
        pieces: Mapping[int, Pieces],
        shards: Mapping[int, np.ndarray],
        sent: np.ndarray,
        device: torch.device,
    ) -> None:
        self.device = device
        self.sums: torch.Tensor | None = None  # of the check that was begun
        self.fills = fills_of(engine, device)  # has the zeros that are read
        padding = IN_BLOCKS[self.fills.table[:, CODEC]] & ~np.isin(self.fills.destinations[:, 0], sent)
        memory = region_addresses(engine.regions.values())
        tables = [
            with_sources(destination_table(memory, of_rank), of_rank.requests, shards[rank])
            for rank, of_rank in pieces.items()
        ]
        destinations = [of_rank.destinations for of_rank in pieces.values()]
        ends = np.cumsum([0, *map(len, tables)]).tolist()
        self.rows = {  # of the digests, by trainer's rank
            rank: slice(*ends[index : index + 2]) for index, rank in enumerate(pieces)
        }
        self.count = ends[-1]
        table = np.concatenate([*tables, self.fills.table[padding]])
        places = np.concatenate([*destinations, self.fills.destinations[padding]])
        self.blocks = self._block_table(table, places, places_of(engine)) if len(table) else None
        together = self.blocks is None or self.blocks.spans is not None
        self.digests = None if together else self._digests(table[: self.count])

    def _block_table(self, table: np.ndarray, destinations: np.ndarray, places: np.ndarray) -> BlockTable:
        """Return what compares the blocks; the rows after `count` are padding."""
        owners = np.arange(len(table))
        owners[self.count :] = NO_PIECE
        ranks = np.repeat(
            [*self.rows, NO_PIECE], [*(r.stop - r.start for r in self.rows.values()), len(table) - self.count]
        )
        table = table.copy()
        take_kernel_of_pieces(table, owners == NO_PIECE)
        blocks = items_of(table, destinations, owners, places)
        in_words = (table[: self.count, WIDTH] % SPAN_ELEMENTS == 0).all()
        spans = spans_of(blocks, table) if in_words and is_aligned(blocks) else None
        order = interleaved(ranks[blocks.owners[blocks.items[:, FIRST_FRAGMENT]]])
        return BlockTable(blocks, self.device, order, spans)

    def _digests(self, table: np.ndarray) -> Digests:
        """Return the digests of the bf16 of pieces."""
        columns, plain = table[:, WIDTH], table.copy()
        plain[:, CODEC], plain[:, WIDTH] = BEFORE_BLOCKS[table[:, CODEC]], columns * BF16.size
        return Digests(plain, columns, self.device)

    def begin(self) -> None:
        """Begin the check; on a GPU, enqueue it on the current stream."""
        self.sums = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        if self.blocks is not None:
            self.blocks.begin_check(self.sums)
        if self.digests is not None:
            self.digests.begin()

    def result(self) -> tuple[list[int], dict[int, np.ndarray]]:
        """Return, of the check that was begun, the indices of the local tensors whose codes or scales are
        not what these pieces make, and the digests of the pieces by trainer's rank."""
        assert self.sums is not None
        digests = self.sums.cpu().numpy() if self.digests is None else self.digests.result()
        self.sums = None
        mismatches = self.blocks.mismatches() if self.blocks is not None else []
        return mismatches, {rank: digests[rows] for rank, rows in self.rows.items()}
