"""CUDA IPC: an inference rank reads the trainer's memory where it lies, in its own process or
mapped from another one's.

All copies are one launch. What the engine serves in blocks is made on the way, in the
same launch; what it makes of plain weights itself comes in rounds. Rows of padding are filled with
zeros along the way.
"""

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch

from reshard.core.errors import ReshardError, rewrite_message
from reshard.refit.codecs import IN_BLOCKS
from reshard.refit.codecs.blocks import BlocksToMake
from reshard.refit.codecs.makers import maker_for
from reshard.refit.codecs.places import places_of
from reshard.refit.copying.addresses import SHARD, UNSTAGED, fills_of, staged_rounds_of, with_sources
from reshard.refit.copying.copies import CopyTable
from reshard.refit.copying.flows import PADDING, Incoming, Outgoing, OwnedCopies, Placed
from reshard.refit.copying.tables import CODEC, bytes_read_by, interleaved, tiles_of
from reshard.refit.engine import Engine
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.routes import CUDA_IPC, LOCAL, Pair, Reach
from reshard.refit.transports.base import Transport, Work
from reshard.refit.transports.context import Context
from reshard.refit.transports.mapped import HINT, MappedMemory

PROGRAMS_BESIDE_NCCL = 32


def reaches(pair: Pair) -> bool:
    """Within a process, and between GPUs of a host where the trainer's memory can be mapped."""
    mapped = pair.on_gpus and pair.may_share_memory and pair.mappable and pair.exported
    return pair.same_process or mapped


def automatic(pair: Pair) -> bool:
    """Where no others want the same: they would all read from one GPU."""
    return pair.same_process or not pair.shared


class CudaIpc(Transport):
    """The reads of one inference rank; a trainer's rank does nothing."""

    reach = Reach(CUDA_IPC, reaches, frozenset({LOCAL, CUDA_IPC}), automatic, sends=False)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.rank, self.names = context.group.rank, context.group.names
        self.mapped = MappedMemory(self.device)
        self.shards: dict[int, np.ndarray] = {}
        self.first_owner: dict[int, int] = {}  # by trainer's rank: its first shard's number among all
        self.shares_gpu = False
        self.lane: torch.cuda.Stream | None = None
        self.followed: dict[int, TrainerMemory] | None = None  # the memory that the tables are of, all mapped
        self.once: CopyTable | None = None
        self.blocks: BlocksToMake | None = None
        self.rounds: dict[int, CopyTable] = {}

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Make the tables of copies, mapping the memory that they read."""
        engine = self.context.engine
        if engine is None:
            return
        self.followed = None
        self.shards = {rank: self._shards(rank, flow.memory) for rank, flow in incoming.items()}
        self.first_owner, next_owner = {}, 1  # owner 0: rows of padding
        received_bytes = {LOCAL: 0, CUDA_IPC: 0}
        parts: list[OwnedCopies] = []
        for rank, flow in incoming.items():
            self.first_owner[rank] = next_owner
            table = with_sources(flow.table, flow.requests, self.shards[rank])
            ranks = np.full(len(table), rank)
            parts.append(OwnedCopies(table, flow.destinations, next_owner + flow.requests[:, SHARD], ranks))
            next_owner += len(self.shards[rank])
            received_bytes[LOCAL if rank == self.rank else CUDA_IPC] += bytes_read_by(flow.table)
        self.fills = fills_of(engine, self.device)
        padding = self._padding(engine, elsewhere)
        count = len(padding.table)
        parts.append(
            OwnedCopies(
                padding.table, padding.destinations, np.zeros(count, np.int64), np.full(count, PADDING)
            )
        )
        copies = OwnedCopies(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        rounds = np.concatenate(
            [
                *(flow.rounds for flow in incoming.values()),
                staged_rounds_of(engine)[padding.destinations[:, 0]],
            ]
        )
        in_blocks = IN_BLOCKS[copies.table[:, CODEC]]
        self.once = self._copy_table(copies.where(~in_blocks & (rounds == UNSTAGED)))
        self.blocks = None
        if in_blocks.any():
            blocks = copies.where(in_blocks)
            self.blocks = maker_for(engine).pull(blocks, places_of(engine), self.device)
        # Also rounds in which all that is not padding comes by another transport.
        numbers = {*engine.staged_rounds.values(), *np.unique(rounds).tolist()} - {UNSTAGED}
        self.rounds = {number: self._copy_table(copies.where(rounds == number)) for number in sorted(numbers)}
        of_blocks = self.blocks is not None and self._between_blocks(None) is None
        launches = sum(table.launches for table in self._copy_tables) + of_blocks
        self.work = Work(received_bytes, numbers, shards=self.shards, launches=launches)

    @property
    def _copy_tables(self) -> list[CopyTable]:
        return [*([self.once] if self.once is not None else []), *self.rounds.values()]

    def _padding(self, engine: Engine, elsewhere: Iterable[Incoming]) -> Placed:
        """Return copies of zeros into rows of padding, but for blocks that other transports bring
        whole. In blocks that are put together of several ranks' parts zeros are written twice."""
        padding = Placed(self.fills.table, self.fills.destinations)
        in_blocks = IN_BLOCKS[padding.table[:, CODEC]]
        if not in_blocks.any():
            return padding
        brought = [
            Placed(flow.table, flow.destinations).where(IN_BLOCKS[flow.table[:, CODEC]]) for flow in elsewhere
        ]
        left = maker_for(engine).padding_outside(padding.where(in_blocks), brought, places_of(engine))
        return Placed(*map(np.concatenate, zip(padding.where(~in_blocks), left, strict=True)))

    def _copy_table(self, copies: OwnedCopies) -> CopyTable:
        """Return the copies in an order in which the links to all peers are busy at once."""
        tiles, origin = tiles_of(copies.table)
        order = interleaved(copies.ranks[origin])
        return CopyTable(tiles[order], self.device, copies.owners[origin][order], self.shares_gpu)

    def update_addresses(self, memory: Mapping[int, TrainerMemory]) -> bool:
        """Shift the tables where shards have only moved; return False where they have to be made anew."""
        if self.context.engine is None:
            return True
        before = self.followed
        if before is not None and [*map(id, memory.values())] == [*map(id, before.values())]:
            return True
        if memory.keys() != self.shards.keys():
            return False
        now = {rank: self._shards(rank, of_rank) for rank, of_rank in memory.items()}
        if all(np.array_equal(shards, self.shards[rank]) for rank, shards in now.items()):
            self.followed = dict(memory)
            return True
        shifts = np.zeros(1 + sum(map(len, now.values())), np.int64)
        for rank, shards in now.items():
            if not np.array_equal(shards[:, 1], self.shards[rank][:, 1]):
                return False
            first = self.first_owner[rank]
            shifts[first : first + len(shards)] = shards[:, 0] - self.shards[rank][:, 0]
        if not all(table.shift(shifts) for table in self._copy_tables):
            return False
        if self.blocks is not None:
            self.blocks.shift(shifts)
        self.shards, self.followed = now, dict(memory)
        self.work.shards = now
        return True

    def _shards(self, rank: int, memory: TrainerMemory) -> np.ndarray:
        """Return (address here, pitch in bytes) of the shards of a trainer's rank, mapping the
        memory of another process."""
        if rank == self.rank:
            return memory.regions
        with rewrite_message(HINT):
            return mapped_shards(memory, self.mapped, self.names[rank])

    def unmappable(self, memory: Mapping[int, TrainerMemory]) -> list[tuple[int, str]]:
        failures = []
        for rank, of_rank in memory.items():
            try:
                mapped_shards(of_rank, self.mapped, self.names[rank])
            except ReshardError as error:
                failures.append((rank, str(error)))
        return failures

    def share_gpu(self) -> None:
        self.shares_gpu = True
        for table in self._copy_tables:
            table.compile(aside=True)

    def run(self, number: int) -> None:
        """Enqueue the copies of a round: where room is left, in a stream of their own until `join`."""
        if self.once is None or (number != UNSTAGED and number not in self.rounds):
            return
        if not self.shares_gpu or self.device.type == "cpu":
            self._enqueue(number, None)
            return
        self.lane = torch.cuda.Stream(self.device)
        self.lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.lane):
            self._enqueue(number, PROGRAMS_BESIDE_NCCL)

    def _enqueue(self, number: int, programs: int | None) -> None:
        if number != UNSTAGED:
            self.rounds[number].run(programs)
            return
        assert self.once is not None
        between = self._between_blocks(programs)
        self.once.run(programs, between)
        if self.blocks is not None:
            self.blocks.run(between)

    def _between_blocks(self, programs: int | None) -> torch.Tensor | None:
        """Return the tiles that are copied between blocks. Much of what is not quantized lies on the rank's own GPU
        (embeddings): by itself it would be copied while the links are idle."""
        if self.once is None or self.blocks is None or programs is not None:
            return None
        return self.once.of_widest_words

    def join(self) -> None:
        if self.lane is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.lane)
            self.lane = None

    def release(self, but: Mapping[int, TrainerMemory] | None = None) -> None:
        if but is None:
            self.followed = None
        self.mapped.close(
            but={handle for memory in (but or {}).values() for *_, handle in memory.allocations}
        )


def mapped_shards(memory: TrainerMemory, mapped: MappedMemory, who: str) -> np.ndarray:
    """Return (address here, pitch in bytes) of the shards of another process, mapping its allocations.

    Shards outside of them, which are not read (`protocol.memory.check_regions`), get address 0.
    """
    table = memory.regions.copy()
    if memory.allocations:
        bases, sizes, handles = zip(*memory.allocations, strict=True)
        first, size = np.array(bases, np.int64), np.array(sizes, np.int64)
        addresses = np.array(
            [mapped.address(handle, length, who) for handle, length in zip(handles, sizes, strict=True)],
            np.int64,
        )
        around = np.maximum(np.searchsorted(first, table[:, 0], "right") - 1, 0)
        inside = (table[:, 0] >= first[around]) & (table[:, 0] < first[around] + size[around])
        table[:, 0] = np.where(inside, table[:, 0] + addresses[around] - first[around], 0)
    return table
