"""Copies between addresses, carried out by a kernel or by the host from a table
(`reshard.refit.copying.tables`)."""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

import numpy as np
import torch

from reshard.comm.background import in_background
from reshard.comm.client import LOOK_SECONDS
from reshard.comm.group import RefitGroup
from reshard.device.cuda import copy_rows, on_device
from reshard.refit.codecs import CODECS, PLAIN, bytes_in_source
from reshard.refit.copying.tables import (
    CODEC,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    bytes_of,
    empty_table,
    joined,
)

UNITS = (16, 8, 4, 2, 1)  # bytes of a word
SHORT_ROWS = 512  # bytes of a row of several below which a kernel is faster than a copy engine


class CopyTable:
    """Tiles ready to run, kept on the GPU: grouped by codec, and plain ones by the widest word that
    their addresses and lengths allow.

    `owners` numbers what each tile's source belongs to, for `shift`; `aside` says that `run` will
    be called with `programs`. With `host_memory` the tiles have their sources in pinned host memory, which begins
    at these addresses, and no owners; the GPU's copy engines carry most of them out, which reach the rate of PCIe
    also while kernels of another process have the multiprocessors.
    """

    def __init__(
        self,
        tiles: np.ndarray,
        device: torch.device,
        owners: np.ndarray | None = None,
        aside: bool = False,
        host_memory: np.ndarray | None = None,
    ) -> None:
        self.device, self.bytes = device, bytes_of(tiles)
        self.engine_copies = empty_table()
        # (codec, bytes of a word, tiles)
        self.groups: list[tuple[int, int, torch.Tensor | np.ndarray]] = []
        self.owners: list[torch.Tensor | np.ndarray] = []
        if owners is None:
            owners = np.zeros(len(tiles), np.int64)
        if device.type == "cpu":
            self.groups, self.owners = ([(PLAIN, 1, tiles)], [owners]) if len(tiles) else ([], [])
            return
        if host_memory is not None and len(host_memory):
            chosen = of_copy_engines(tiles)
            self.engine_copies = joined(tiles[chosen], host_memory)
            tiles, owners = tiles[~chosen], owners[~chosen]
        for codec in np.unique(tiles[:, CODEC]).tolist():
            if codec != PLAIN:
                self._keep(tiles, owners, tiles[:, CODEC] == codec, CODECS[codec].destination.size)
        bits = np.bitwise_or.reduce(tiles[:, [SRC, DST, WIDTH, SRC_PITCH, DST_PITCH]], axis=1)
        left = tiles[:, CODEC] == PLAIN
        for unit in UNITS:
            chosen = left & (bits % unit == 0)
            left &= ~chosen
            if chosen.any():
                self._keep(tiles, owners, chosen, unit)
        self.compile(aside)

    def _keep(self, tiles: np.ndarray, owners: np.ndarray, chosen: np.ndarray, unit: int) -> None:
        """Keep the chosen tiles, all of one codec, on the GPU, with lengths and pitches in words of
        `unit` bytes of the destination."""
        group, codec = tiles[chosen, :CODEC].copy(), int(tiles[chosen, CODEC][0])
        group[:, [WIDTH, DST_PITCH]] //= unit
        group[:, SRC_PITCH] //= bytes_in_source(unit, codec)
        self.groups.append((codec, unit, on_device(group, self.device)))
        self.owners.append(on_device(owners[chosen].astype(np.int32), self.device))

    def compile(self, aside: bool) -> None:
        """Compile now what `run` launches."""
        if self.device.type == "cuda":
            from reshard.refit.copying.kernels import compile_copy

            for codec, unit, _ in self.groups:
                compile_copy(unit, self.device, 1 if aside else None, codec)

    def shift(self, shifts: np.ndarray) -> bool:
        """Add `shifts` bytes, by owner, to the addresses of the sources; return False, and change
        nothing, where words would no longer be aligned."""
        if (shifts % UNITS[0]).any():
            return False
        for (*_, tiles), owners in zip(self.groups, self.owners, strict=True):
            if isinstance(tiles, torch.Tensor):
                tiles[:, SRC] += torch.from_numpy(shifts).to(tiles.device)[owners]
            else:
                tiles[:, SRC] += shifts[owners]
        return True

    def move(self, end: int, distance: int) -> None:
        """Add `distance` bytes, a multiple of 16, to the addresses of all sources (`end` is SRC) or destinations
        (DST)."""
        self.engine_copies[:, end] += distance
        for *_, tiles in self.groups:
            addresses = tiles[:, end]
            addresses += distance

    @property
    def launches(self) -> int:
        """Return how many kernels and copies `run` launches."""
        return len(self.groups) + len(self.engine_copies)

    @property
    def of_widest_words(self) -> torch.Tensor | None:
        """Return the plain tiles on the GPU whose words have 16 bytes, nearly all of most models, if there
        are any."""
        for codec, unit, tiles in self.groups:
            if (codec, unit) == (PLAIN, UNITS[0]) and isinstance(tiles, torch.Tensor):
                return tiles
        return None

    def run(self, programs: int | None = None, without: torch.Tensor | None = None) -> None:
        """Carry the copies out; on a GPU, enqueue them on the current stream, in no more than
        `programs` programs, `without` tiles that another kernel carries out (`of_widest_words`)."""
        if len(self.engine_copies):
            copy_rows(self.engine_copies[:, :CODEC], self.device)
        for codec, unit, tiles in self.groups:
            if tiles is without:
                continue
            if isinstance(tiles, torch.Tensor):
                from reshard.refit.copying.kernels import copy_tiles

                copy_tiles(tiles, unit, programs, codec)
            else:
                copy_on_host(tiles)


def of_copy_engines(tiles: np.ndarray) -> np.ndarray:
    """Return a mask of the tiles that copy engines carry out well: plain ones, but for short rows."""
    plain: np.ndarray = tiles[:, CODEC] == PLAIN
    return plain & ((tiles[:, ROWS] == 1) | (tiles[:, WIDTH] >= SHORT_ROWS))


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all that was given to the device's current stream; None of a CPU, which has done
    it."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_device(
    device: torch.device,
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
    event: torch.cuda.Event | None = None,
) -> bool:
    """Wait until the device's current stream is done, or has come to an `event`; return False if it takes
    longer than `seconds`.

    Calls `meanwhile` several times a second. A plain synchronize would block forever where a stream
    waits for a dead peer.
    """
    event = event or event_now(device)
    if event is None:
        return True
    called = time.monotonic()
    deadline = called + seconds
    while not event.query():
        now = time.monotonic()
        if now > deadline:
            return False
        if now - called > LOOK_SECONDS:
            called = now
            meanwhile()
        time.sleep(20e-6)
    return True


def wait_for_partners(device: torch.device, group: RefitGroup, event: torch.cuda.Event | None = None) -> None:
    """Wait until the device's current stream is done, or has come to an `event`, where it may wait for other members'
    bytes. Raises RuntimeError where these are late, ReshardError where a member fails."""
    if not wait_for_device(device, group.timeout, group.attend, event):
        raise RuntimeError(f"nothing arrived within {group.timeout:g} s")


def wait_for_exchange(work: Any, device: torch.device, group: RefitGroup) -> None:
    """Have the device's current stream wait for an exchange that was begun. On a CPU this waits for it, and raises
    ReshardError as soon as a member fails: Gloo by itself would wait for its bytes until the time limit."""
    looked = time.monotonic()
    while device.type == "cpu" and not work.is_completed():
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            group.attend()
        time.sleep(20e-6)
    work.wait()


def wait_for_all_streams(device: torch.device, seconds: float | None) -> bool:
    """Wait until a GPU has done all that it was given, on whatever stream; return False if it takes
    longer than `seconds`, where they are given: a kernel that waits for a lost partner never ends."""
    if device.type != "cuda":
        return True
    if seconds is None:
        torch.cuda.synchronize(device)
        return True
    try:
        in_background(partial(torch.cuda.synchronize, device)).result(seconds)
    except FutureTimeoutError:
        return False
    return True


def host_bytes(address: int, rows: int, width: int, pitch: int) -> np.ndarray:
    """Return the bytes ``[rows, width]`` at an address of this process's memory, as a view."""
    if rows == 0 or width == 0:
        return np.zeros((rows, width), np.uint8)
    extent = (rows - 1) * pitch + width
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, (rows, width), (pitch, 1))


def copy_on_host(table: np.ndarray) -> None:
    """Carry out a table of copies within this process's memory."""
    for src, dst, rows, width, src_pitch, dst_pitch, codec in table.tolist():
        source = host_bytes(src, rows, bytes_in_source(width, codec), src_pitch)
        encoded = source if codec == PLAIN else CODECS[codec].encode(source)
        host_bytes(dst, rows, width, dst_pitch)[...] = encoded
