"""Write a rank's share of a live model into the files of a checkpoint, and hash the tensors."""

import os
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from reshard.comm.team import Team
from reshard.device.live_boxes import LiveBox, Slab, batches, slabs_of
from reshard.device.staging import PINNED_BYTES, FromDevice, slab_bytes
from reshard.live.inventory import Inventory
from reshard.storage.destinations.base import Destination
from reshard.storage.io.boxes import BoxReader, Rows, box_bytes, place_of, write_boxes
from reshard.storage.io.casts import cast
from reshard.storage.io.files import OpenFiles, write_error
from reshard.storage.io.streams import Strip, StripWriter
from reshard.storage.io.sync import EarlySync, NoSync
from reshard.storage.run.workers import run_jobs
from reshard.storage.sources.verify import checksum_of


class ShareWriter:
    """Writes the boxes of one rank, and computes checksums.

    `share` are the boxes, `host` their copies in host memory by index in the share, where a
    background save made some. The files of `destination` lie under `root` at their full length.
    `checksums` has the tensors that this rank hashed.
    """

    def __init__(
        self,
        team: Team,
        share: list[LiveBox],
        host: dict[int, torch.Tensor],
        inventory: Inventory,
        destination: Destination,
        root: Path,
        device: torch.device,
        sync: bool,
        workers: int | None,
    ) -> None:
        self.team, self.share, self.host, self.inventory = team, share, host, inventory
        self.destination, self.root, self.device = destination, root, device
        self.sync, self.workers = sync, workers
        self.checksums: dict[str, str] = {}

    def write(self, frames: set[str]) -> None:
        """Write the share, and the frames (headers and padding) of some files. A tensor that the
        rank holds whole is hashed on the way."""
        strips = {name: self._strips(name) for name in {live.name for live in self.share}}
        paths = {strip.path for of_name in strips.values() for strip in of_name}
        paths |= {self.root / name for name in frames}
        files = OpenFiles(os.O_RDWR | os.O_NOFOLLOW)
        try:
            self.destination.write_frames(self.root, frames, files)
            jobs = dict(enumerate(self._jobs(strips)))
            write = partial(self._write_job, files=files, strips=strips, device=FromDevice(self.device))
            with (EarlySync if self.sync else NoSync)(files, sorted(paths)) as sync:

                def check() -> None:
                    self.team.check()
                    sync.check()

                results = run_jobs(
                    {str(i): sum(self._size(index) for index in job) for i, job in jobs.items()},
                    lambda i: write(jobs[int(i)]),
                    self.workers,
                    check=check,
                    files_of=lambda i: {
                        str(strip.path) for index in jobs[int(i)] for strip in strips[self.share[index].name]
                    },
                )
        finally:
            errors = files.close()
        for path, error in errors.items():  # some servers report an error only when a file is closed
            raise write_error(path, error)
        self.checksums = {name: checksum for of_job in results.values() for name, checksum in of_job.items()}

    def _strips(self, name: str) -> list[Strip]:
        """Return where a tensor and its copies go."""
        copies = [copy for copy, primary in self.inventory.copies.items() if primary == name]
        return [
            strip._replace(path=self.root / strip.path)
            for each in (name, *copies)
            for strip in self.destination.strips.get(each, ())
        ]

    def _jobs(self, strips: dict[str, list[Strip]]) -> list[list[int]]:
        """Return what is written at a time: indices into the share of boxes that follow one another
        in the same files."""
        places = []
        for index, live in enumerate(self.share):
            paths = tuple(sorted({str(strip.path) for strip in strips[live.name]}))
            places.append((paths, place_of(strips[live.name], Rows.of(live.box), live.dtype.size), index))
        jobs = []
        for _, same_files in groupby(sorted(places), itemgetter(0)):
            # The columns of one transposed matrix are at one place, and stay together.
            units = [[index for *_, index in unit] for _, unit in groupby(same_files, itemgetter(1))]
            sizes = ((unit, sum(map(self._size, unit)), PINNED_BYTES) for unit in units)
            jobs += [[index for unit in batch for index in unit] for batch in batches(sizes)]
        return jobs

    def _size(self, index: int) -> int:
        return box_bytes(self.share[index].box, self.share[index].dtype.size)

    def _write_job(
        self, job: list[int], files: OpenFiles, strips: dict[str, list[Strip]], device: FromDevice
    ) -> dict[str, str]:
        """Write some boxes; return the checksums of the tensors that consist of one box."""
        boxes = {index: self.share[index] for index in job}
        most = slab_bytes(self.device)
        slabs = [(i, slab) for i, live in boxes.items() for slab in slabs_of(live, live.dtype.size, most)]
        slab_batches = list(batches(((i, slab), slab.size_bytes, most) for i, slab in slabs))
        digests = {
            index: xxhash.xxh3_128()
            for index, live in boxes.items()
            if live.box.lengths == self.inventory.tensors[live.name].shape
        }
        memory = [[self._bytes(index, slab) for index, slab in batch] for batch in slab_batches]
        writer = StripWriter(strips, files)
        with writer.whole_matrices():
            for batch, arrays in zip(slab_batches, device.read(memory)):
                held = zip(batch, map(np.ascontiguousarray, arrays), strict=True)
                self._write_slabs(((index, slab, data) for (index, slab), data in held), writer, digests)
        return {boxes[index].name: digest.hexdigest() for index, digest in digests.items()}

    def _write_slabs(
        self, slabs: Iterable[tuple[int, Slab, np.ndarray]], writer: StripWriter, digests: dict[int, Any]
    ) -> None:
        """Write slabs of boxes, by index, with the bytes that the model holds; hash those of some
        in `digests`."""
        writes = []
        for index, slab, held in slabs:
            live = slab.live_box
            numbers = held.view(live.dtype.numpy())
            if index in digests:
                published = cast(numbers, live.dtype, live.dtype.published)
                digests[index].update(memoryview(published.view(np.uint8).reshape(-1)))
            stored = self.destination.stored[live.name].dtype
            data = cast(numbers, live.dtype, stored, live.name).view(np.uint8)
            strips = writer.strips[live.name]
            if any(strip.transposed for strip in strips):
                writer.write_rows(live.name, slab.rows.start, data.view(f"u{live.dtype.size}"))
            else:
                writes.append((strips, slab.rows, data))
        write_boxes(writer.files, writes)

    def _bytes(self, index: int, slab: Slab) -> torch.Tensor:
        """Return the bytes of a slab, of the copy in host memory where there is one."""
        if index not in self.host:
            return slab.bytes
        first = slab.live_box.box.offsets[0]
        return self.host[index][slab.rows.start - first : slab.rows.stop - first]

    def names_to_read_back(self, checksums: list[dict[str, str]]) -> list[list[str]]:
        """Return for each rank the tensors that it hashes from the files: those that several ranks wrote.

        `checksums` are those of all ranks, which only the first process has.
        """
        hashed = {name for of_rank in checksums for name in of_rank}
        names: list[list[str]] = [[] for _ in checksums]
        load = [0] * len(checksums)
        for name, info in self.inventory.tensors.items() if checksums else ():
            if name not in hashed and name not in self.inventory.copies:
                least = load.index(min(load))
                load[least] += info.size_bytes
                names[least].append(name)
        return names

    def read_back(self, names: list[str]) -> None:
        """Hash these tensors as the files have them."""
        sizes = {name: self.inventory.tensors[name].size_bytes for name in names}
        strips = {
            name: [strip._replace(path=self.root / strip.path) for strip in self.destination.strips[name]]
            for name in names
        }
        with OpenFiles(os.O_RDONLY | os.O_NOFOLLOW) as files:
            reader = BoxReader(self.destination.stored, files, strips.__getitem__)

            def checksum(name: str) -> str:
                return checksum_of(name, self.inventory.tensors[name], reader.published)

            self.checksums |= run_jobs(sizes, checksum, self.workers, check=self.team.check)
