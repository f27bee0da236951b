"""Copies between addresses, carried out by one table-driven kernel, or by the host. `reshard.refit.tables`
says what a table is."""

import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from reshard.comm.client import LOOK_SECONDS
from reshard.refit.codecs import CODECS, PLAIN, bytes_in_source
from reshard.refit.tables import CODEC, DST, DST_PITCH, SRC, SRC_PITCH, WIDTH, bytes_of

UNITS = (16, 8, 4, 2, 1)  # bytes of a word


class CopyTable:
    """Tiles ready to run, grouped by codec, and plain ones by the widest word that all their addresses and
    lengths allow; kept on the GPU.

    `owners` numbers what each tile's source belongs to, for `shift`; `aside` says that it will be run with
    `programs`.
    """

    def __init__(
        self,
        tiles: np.ndarray,
        device: torch.device,
        owners: np.ndarray | None = None,
        aside: bool = False,
    ) -> None:
        self.device, self.bytes = device, bytes_of(tiles)
        # (codec, bytes of a word, tiles)
        self.groups: list[tuple[int, int, torch.Tensor | np.ndarray]] = []
        self.owners: list[torch.Tensor | np.ndarray] = []
        if owners is None:
            owners = np.zeros(len(tiles), np.int64)
        if device.type == "cpu":
            self.groups, self.owners = ([(PLAIN, 1, tiles)], [owners]) if len(tiles) else ([], [])
            return
        for number in np.unique(tiles[:, CODEC]).tolist():
            if number != PLAIN:
                self._keep(tiles, owners, tiles[:, CODEC] == number, CODECS[number].destination.size)
        bits = np.bitwise_or.reduce(tiles[:, [SRC, DST, WIDTH, SRC_PITCH, DST_PITCH]], axis=1)
        left = tiles[:, CODEC] == PLAIN
        for unit in UNITS:
            chosen = left & (bits % unit == 0)
            left &= ~chosen
            if chosen.any():
                self._keep(tiles, owners, chosen, unit)
        self.compile(aside)

    def _keep(self, tiles: np.ndarray, owners: np.ndarray, chosen: np.ndarray, unit: int) -> None:
        """Keep these tiles on the GPU, all of one codec, lengths and pitches counted in words of so many bytes
        of the destination."""
        some, number = tiles[chosen, :CODEC].copy(), int(tiles[chosen, CODEC][0])
        some[:, [WIDTH, DST_PITCH]] //= unit
        some[:, SRC_PITCH] //= bytes_in_source(unit, number)
        self.groups.append((number, unit, torch.from_numpy(some).to(self.device)))
        self.owners.append(torch.from_numpy(owners[chosen].astype(np.int32)).to(self.device))

    def compile(self, aside: bool) -> None:
        """Compile what `run` launches, now."""
        if self.device.type == "cuda":
            from reshard.refit.kernels import compile_copy

            for codec, unit, _ in self.groups:
                compile_copy(unit, self.device, 1 if aside else None, codec)

    def shift(self, deltas: np.ndarray) -> bool:
        """Add `deltas` bytes, by owner, to where the sources are; False, and nothing is changed, where words
        would not be aligned."""
        if (deltas % UNITS[0]).any():
            return False
        for (*_, tiles), owners in zip(self.groups, self.owners, strict=True):
            if isinstance(tiles, torch.Tensor):
                tiles[:, SRC] += torch.from_numpy(deltas).to(tiles.device)[owners]
            else:
                tiles[:, SRC] += deltas[owners]
        return True

    @property
    def launches(self) -> int:
        """Kernels that `run` launches."""
        return len(self.groups)

    def run(self, programs: int | None = None) -> None:
        """Carry the copies out; on a GPU, enqueue them on the current stream, using no more of the GPU than
        `programs` take (`kernels.copy_tiles`)."""
        for codec, unit, tiles in self.groups:
            if isinstance(tiles, torch.Tensor):
                from reshard.refit.kernels import copy_tiles

                copy_tiles(tiles, unit, programs, codec)
            else:
                copy_on_host(tiles)


def wait_for_device(
    device: torch.device, seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> bool:
    """Wait for what is enqueued on this device's current stream; False where it takes longer. Calls `meanwhile` several
    times a second.

    A stream that waits for a dead peer would block a plain synchronize.
    """
    if device.type != "cuda":
        return True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    told = time.monotonic()
    deadline = told + seconds
    while not event.query():
        now = time.monotonic()
        if now > deadline:
            return False
        if now - told > LOOK_SECONDS:
            told = now
            meanwhile()
        time.sleep(20e-6)
    return True


def host_bytes(address: int, rows: int, width: int, pitch: int) -> np.ndarray:
    """The bytes ``[rows, width]`` at an address of this process's memory."""
    if rows == 0 or width == 0:
        return np.zeros((rows, width), np.uint8)
    extent = (rows - 1) * pitch + width
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, (rows, width), (pitch, 1))


def copy_on_host(table: np.ndarray) -> None:
    """Carry out a table whose addresses are this process's memory."""
    for src, dst, rows, width, src_pitch, dst_pitch, codec in table.tolist():
        held = host_bytes(src, rows, bytes_in_source(width, codec), src_pitch)
        host_bytes(dst, rows, width, dst_pitch)[...] = held if codec == PLAIN else CODECS[codec].encode(held)
