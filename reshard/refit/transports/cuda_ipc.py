"""Pulls: an inference rank reads the trainer's memory where it lies, in its own process or mapped from
another one's, in one launch; what the engine serves in blocks of fp8 is made of it on the way, in another; and what it
makes of plain weights itself comes in rounds."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.core.errors import ReshardError, rewrite_message
from reshard.engines.base import Engine
from reshard.refit.addresses import AT_ONCE, SHARD, fills_of, from_source, rounds_of, shards_here
from reshard.refit.codecs import BLOCKWISE, block_codec, by_rounding
from reshard.refit.copies import CopyTable
from reshard.refit.fp8_blocks import packed
from reshard.refit.fp8_blocks.items import BlockTable, items_of, places_of
from reshard.refit.tables import CODEC, FIRST_FRAGMENT, bytes_read_by, interleaved, tiles_of
from reshard.refit.transports.base import Incoming, Outgoing, Transport
from reshard.refit.transports.mapped import HINT, Mappings

PROGRAMS_ASIDE = 32
PADDING = -1  # in place of a trainer's rank, for rows that none has


class Rows(NamedTuple):
    """Copies with both ends filled in, where each goes (`Pieces.into`), the owner of its source, and the trainer's
    rank."""

    table: np.ndarray
    into: np.ndarray
    owners: np.ndarray
    ranks: np.ndarray

    def where(self, chosen: np.ndarray) -> "Rows":
        """Some of them."""
        return Rows(*(some[chosen] for some in self))


class Pull(Transport):
    """The pulls of one inference rank, `rank`; rows of padding are filled with zeros along the way."""

    def __init__(self, engine: Engine, rank: int, names: Mapping[int, str], device: torch.device) -> None:
        self.engine, self.rank, self.names, self.device = engine, rank, names, device
        self.mappings = Mappings(device)
        # By trainer's rank: (address here, pitch in bytes) of its shards, and the number of the first among
        # all shards.
        self.at: dict[int, np.ndarray] = {}
        self.first_owner: dict[int, int] = {}
        self.local_bytes = self.peer_bytes = 0
        self.aside = False
        self.lane: torch.cuda.Stream | None = None
        # What was last followed, with everything mapped.
        self.followed: dict[int, Mapping[str, Any]] | None = None

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        sent: Iterable[Incoming] = (),
    ) -> None:
        """Make the tables of copies; trainers' ranks do nothing in a pull. What is `sent` comes by other ways."""
        self.followed = None
        found: list[Rows] = []
        self.local_bytes = self.peer_bytes = 0
        self.at, self.first_owner = (
            {rank: self._shards(rank, some.memory) for rank, some in incoming.items()},
            {},
        )
        known = 1  # owner 0: rows of padding
        for rank, some in incoming.items():
            self.first_owner[rank] = known
            table, owner = from_source(some.table, some.asked, self.at[rank]), known + some.asked[:, SHARD]
            found.append(Rows(table, some.into, owner, np.full(len(table), rank)))
            known += len(self.at[rank])
            if rank == self.rank:
                self.local_bytes += bytes_read_by(some.table)
            else:
                self.peer_bytes += bytes_read_by(some.table)
        rounds = [some.rounds for some in incoming.values()]
        self.fills = fills_of(self.engine, self.device)
        padding = self._padding(sent)
        nobody, no_rank = np.zeros(len(padding.table), np.int64), np.full(len(padding.table), PADDING)
        found.append(Rows(padding.table, padding.into, nobody, no_rank))
        rows = Rows(*(np.concatenate(some) for some in zip(*found, strict=True)))
        blockwise = BLOCKWISE[rows.table[:, CODEC]]
        rounds_in_turn = np.concatenate([*rounds, rounds_of(self.engine)[padding.into[:, 0]]])
        self.table = self._copies(rows.where(~blockwise & (rounds_in_turn == AT_ONCE)))
        self.blocks = self._blocks(rows.where(blockwise))
        # Also of rounds in which all that is not padding comes by another way.
        self.numbers = {*self.engine.staged_rounds.values(), *np.unique(rounds_in_turn).tolist()} - {AT_ONCE}
        self.rounds = {
            number: self._copies(rows.where(rounds_in_turn == number)) for number in sorted(self.numbers)
        }
        self.received_bytes = self.local_bytes + self.peer_bytes

    @property
    def launches(self) -> int:
        """Kernels that a refit launches."""
        return sum(table.launches for table in (self.table, *self.rounds.values())) + len(self.blocks)

    def _padding(self, sent: Iterable[Incoming]) -> packed.Placed:
        """Rows of padding, but what lies in blocks that are sent. In blocks that are put together of parts it is written,
        and written again with them."""
        table, into = self.fills.table, self.fills.into
        blockwise = BLOCKWISE[table[:, CODEC]]
        if not blockwise.any():
            return packed.Placed(table, into)
        found = []
        for some in sent:
            here = BLOCKWISE[some.table[:, CODEC]]
            found.append(packed.cut_into_blocks(some.table[here], some.into[here], some.places))
        if not any(len(some.items) for some in found):
            return packed.Placed(table, into)
        kept = packed.padding_outside(
            packed.Placed(table[blockwise], into[blockwise]), found, places_of(self.engine)
        )
        both = (table[~blockwise], kept.table), (into[~blockwise], kept.into)
        return packed.Placed(*map(np.concatenate, both))

    def _copies(self, rows: "Rows") -> CopyTable:
        """A table in the order in which all peers' links are busy at once."""
        tiles, origin = tiles_of(rows.table)
        order = interleaved(rows.ranks[origin])
        return CopyTable(tiles[order], self.device, rows.owners[origin][order], self.aside)

    def _blocks(self, rows: "Rows") -> list[BlockTable]:
        """What is quantized, by rounding."""
        if not len(rows.table):
            return []
        places = places_of(self.engine)
        found = []
        for rounding, these in by_rounding(rows.table[:, CODEC]):
            some = rows.where(these)
            padding = some.ranks == PADDING
            # as wide as all else, for which there is a kernel of its own
            some.table[padding, CODEC] = some.table[~padding, CODEC].max(initial=block_codec(rounding))
            strips = items_of(some.table, some.into, np.stack([some.owners, some.ranks], 1), places)
            order = interleaved(strips.owners[strips.items[:, FIRST_FRAGMENT], 1])
            found.append(
                BlockTable(strips._replace(owners=strips.owners[:, 0]), rounding, self.device, order)
            )
        return found

    def follow(self, memory: Mapping[int, Mapping[str, Any]]) -> bool:
        """Read the shards where these trainers' ranks now say that they are; False where the table has to be
        made again for that."""
        before = self.followed
        if before is not None and [*map(id, memory.values())] == [*map(id, before.values())]:
            return True
        if memory.keys() != self.at.keys():
            return False
        now = {rank: self._shards(rank, said) for rank, said in memory.items()}
        if all(np.array_equal(shards, self.at[rank]) for rank, shards in now.items()):
            self.followed = dict(memory)
            return True
        deltas = np.zeros(1 + sum(map(len, now.values())), np.int64)
        for rank, shards in now.items():
            if not np.array_equal(shards[:, 1], self.at[rank][:, 1]):
                return False
            first = self.first_owner[rank]
            deltas[first : first + len(shards)] = shards[:, 0] - self.at[rank][:, 0]
        if not all(table.shift(deltas) for table in (self.table, *self.rounds.values())):
            return False
        for blocks in self.blocks:
            blocks.shift(deltas)
        self.at, self.followed = now, dict(memory)
        return True

    def _shards(self, rank: int, memory: Mapping[str, Any]) -> np.ndarray:
        """(address here, pitch in bytes) of the shards of a trainer's rank, mapping its memory where it is
        another process."""
        if rank == self.rank:
            regions: np.ndarray = memory["regions"]
            return regions
        with rewrite_message(HINT):
            return shards_here(memory, self.mappings, self.names[rank])

    def unmappable(self, memory: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, str]]:
        """Which of these trainers' ranks have memory that cannot be mapped here, and why."""
        failed = []
        for rank, said in memory.items():
            try:
                shards_here(said, self.mappings, self.names[rank])
            except ReshardError as error:
                failed.append((rank, str(error)))
        return failed

    def go_aside(self) -> None:
        """From now on leave room on the GPU for buckets."""
        self.aside = True
        for table in (self.table, *self.rounds.values()):
            table.compile(aside=True)

    def run(self, number: int) -> None:
        """Enqueue the copies of a round: aside, where buckets are to go on at the same time, until `join`."""
        if number != AT_ONCE and number not in self.rounds:
            return
        if not self.aside or self.device.type == "cpu":
            self._enqueue(number, None)
            return
        here = torch.cuda.current_stream(self.device)
        self.lane = torch.cuda.Stream(self.device)
        self.lane.wait_stream(here)
        with torch.cuda.stream(self.lane):
            self._enqueue(number, PROGRAMS_ASIDE)

    def _enqueue(self, number: int, programs: int | None) -> None:
        if number != AT_ONCE:
            self.rounds[number].run(programs)
            return
        self.table.run(programs)
        for blocks in self.blocks:
            blocks.run()

    def join(self) -> None:
        """Let the current stream wait for what was enqueued aside."""
        if self.lane is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.lane)
            self.lane = None

    def keep_only(self, memory: Mapping[int, Mapping[str, Any]]) -> None:
        """Unmap what the trainers' ranks no longer use."""
        self.mappings.close(but={entry[2] for said in memory.values() for entry in said["allocations"]})

    def release(self) -> None:
        """Unmap the trainers' memory."""
        self.followed = None
        self.mappings.close()

    def close(self) -> None:
        """Unmap the trainers' memory."""
        self.release()
