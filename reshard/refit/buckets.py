"""Transfers between members that cannot read each other's memory: packed into buckets, exchanged, unpacked.

Both ends of a pair know the same list of pieces and cut it alike, so a bucket needs no header. One all-to-all a round, whatever
the backend (NCCL, Gloo); while one bucket travels, the next is packed and the one before is unpacked.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard.refit.copies import DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, CopyTable, tiles_of
from reshard.refit.members import Members

ALIGNMENT = 16


def group_of(members: Members, device: torch.device) -> Any:
    """A communicator of all members: on GPUs torch's own where they are its ranks, since another takes memory of its own."""
    if members.process_group is not None and device.type == "cuda":
        with suppress(RuntimeError):
            return members.process_group._get_backend(device)
    store, timeout = dist.PrefixStore("buckets", members.store), timedelta(seconds=members.timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, members.rank, members.size, options)
    gloo: Any = dist.ProcessGroupGloo
    if members.local_address is None:
        return gloo(store, members.rank, members.size, timeout)
    # Of several networks the one on which the members met; by itself Gloo takes the one that the host's name stands for.
    settings = gloo._Options()
    settings._timeout, settings._devices = timeout, [gloo.create_device(hostname=members.local_address)]
    return gloo(store, members.rank, members.size, settings)


def rounds_of(sizes: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces of these sizes in order into rounds of at most `limit` bytes: each one's round, and its offset in it."""
    padded = sizes + -sizes % ALIGNMENT
    rounds, offsets = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    current = used = 0
    for i, size in enumerate(padded.tolist()):
        if used + size > limit and used:
            current, used = current + 1, 0
        rounds[i], offsets[i] = current, used
        used += size
    return rounds, offsets


class Buckets:
    """This member's part of the exchange.

    `outgoing` and `incoming` are tables by partner; the address of the other end is left 0. Rows are cut into tiles the same way
    on both ends, which only depends on rows and widths. `limit` is the bytes of one pair in one round.
    """

    def __init__(self, members: Members, group: Any, device: torch.device, outgoing: Mapping[int, np.ndarray],
                 incoming: Mapping[int, np.ndarray], limit: int) -> None:  # fmt: skip
        self.members, self.group, self.device = members, group, device
        self.sends = {peer: _Side(table, SRC, SRC_PITCH, limit) for peer, table in outgoing.items()}
        self.receives = {peer: _Side(table, DST, DST_PITCH, limit) for peer, table in incoming.items()}
        self.limit = limit
        if device.type == "cuda":
            from reshard.refit.kernels import compile_copy

            compile_copy(ALIGNMENT, device)  # the tables are made at the first exchange, nearly all of this word
        self.addresses: list[tuple[int, int]] = []
        self.steps: list[tuple[list[int], list[int], CopyTable, CopyTable]] = []

    @property
    def rounds(self) -> int:
        """Rounds that this member's pairs need."""
        return max((side.rounds for side in (*self.sends.values(), *self.receives.values())), default=0)

    def peak_bytes(self) -> int:
        """Bytes of the buffers, of which there are two in each direction."""
        return 2 * self.limit * (len(self.sends) + len(self.receives))

    def run(self, rounds: int) -> None:
        """Exchange everything in `rounds` rounds, which all members must agree on."""
        slots = [(self._buffer(self.sends), self._buffer(self.receives)) for _ in range(min(2, rounds))]
        addresses = [(send.data_ptr(), receive.data_ptr()) for send, receive in slots]
        if addresses != self.addresses:
            # The caching allocator usually gives the same memory again, so that this happens once.
            self.steps = [self._step(index, *addresses[index % 2]) for index in range(rounds)]
            self.addresses = addresses
        pending: tuple[Any, CopyTable] | None = None
        for index, (splits_in, splits_out, pack, unpack) in enumerate(self.steps):
            send, receive = slots[index % 2]
            pack.run()
            work = self.group.alltoall_base(receive[: sum(splits_in)], send[: sum(splits_out)], splits_in, splits_out)
            if pending is not None:
                self._unpack(*pending)
            pending = (work, unpack)
        if pending is not None:
            self._unpack(*pending)

    def _buffer(self, sides: Mapping[int, "_Side"]) -> torch.Tensor:
        return torch.empty(self.limit * len(sides), dtype=torch.uint8, device=self.device)

    def _unpack(self, work: Any, table: CopyTable) -> None:
        work.wait()
        table.run()

    def _step(self, index: int, send: int, receive: int) -> tuple[list[int], list[int], CopyTable, CopyTable]:
        """A round with its buffers at these addresses: bytes from and to each member, and the copies before and after."""
        splits_out, packed = self._layout(self.sends, index, send, DST, DST_PITCH)
        splits_in, unpacked = self._layout(self.receives, index, receive, SRC, SRC_PITCH)
        return splits_in, splits_out, CopyTable(packed, self.device), CopyTable(unpacked, self.device)

    def _layout(self, sides: Mapping[int, "_Side"], index: int, start: int, end: int, pitch: int) -> tuple[list[int], np.ndarray]:
        """Bytes by member, and the copies with their ends in the buffer filled in."""
        splits, tables = [0] * self.members.size, [np.zeros((0, 6), np.int64)]
        for peer in sorted(sides):
            tiles, offsets, splits[peer] = sides[peer].round(index)
            table = tiles.copy()
            table[:, end] = start + offsets
            table[:, pitch] = table[:, WIDTH]
            tables.append(table)
            start += splits[peer]
        return splits, np.concatenate(tables)


class _Side:
    """One direction of one pair: its tiles, and the round and offset of each."""

    def __init__(self, table: np.ndarray, end: int, pitch: int, limit: int) -> None:
        # Cut at both ends alike: pitches are only known here, so they must not decide.
        plain = table.copy()
        plain[:, [SRC, DST]] = 0
        plain[:, SRC_PITCH] = plain[:, DST_PITCH] = plain[:, WIDTH] + 1
        cut, origin = tiles_of(plain)
        row, byte = np.divmod(cut[:, SRC], plain[origin, SRC_PITCH])
        cut[:, end] = table[origin, end] + row * table[origin, pitch] + byte
        cut[:, pitch] = table[origin, pitch]
        self.tiles = cut
        self.round_of, self.offset = rounds_of(cut[:, ROWS] * cut[:, WIDTH], limit)
        self.rounds = int(self.round_of.max()) + 1 if len(cut) else 0

    def round(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Tiles of a round, their offsets in the bucket, and its bytes."""
        chosen = self.round_of == index
        tiles, offsets = self.tiles[chosen], self.offset[chosen]
        sizes = tiles[:, ROWS] * tiles[:, WIDTH]
        total = int((offsets + sizes + -sizes % ALIGNMENT).max()) if len(tiles) else 0
        return tiles, offsets, total
