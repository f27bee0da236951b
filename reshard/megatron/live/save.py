"""A live Megatron to disk: every rank writes its own boxes into the common files, which appear whole or not at
all."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.gc import gc_paused
from reshard.core.limits import MAX_ITERATION, check_number, check_switch
from reshard.megatron.arguments import version_of
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.live.agreement import agree
from reshard.megatron.live.config import Published, implementation_of, layout_of
from reshard.megatron.live.memory import PINNED_BYTES, FromDevice, bytes_of, on_host, slab_bytes
from reshard.megatron.live.pieces import Part, Piece, bundles, parts_of
from reshard.megatron.live.ranks import Models, Rank, check_alike, decide, keyword_style_errors, meet
from reshard.megatron.parameters import TRANSFORMER_IMPLS
from reshard.storage.destinations.base import Destination
from reshard.storage.destinations.huggingface import HuggingFaceFiles, parse_size
from reshard.storage.destinations.megatron import MegatronFiles
from reshard.storage.fp8 import Fp8Blocks
from reshard.storage.io.boxes import Rows, box_bytes, place_of, write_boxes
from reshard.storage.io.files import OpenFiles, allow_many_files, write_error
from reshard.storage.io.streams import Strip, StripReader
from reshard.storage.io.sync import EarlySync, NoSync
from reshard.storage.run.added_iteration import AddedIteration
from reshard.storage.run.partial import SAVE
from reshard.storage.run.workdir import Workdir
from reshard.storage.run.workers import run_jobs, worker_count
from reshard.storage.sources.paths import iterations_in
from reshard.storage.sources.verify import checksum_of

log = logging.getLogger("reshard")
FORMATS = ("torch_dist", "hf")
# What a manifest says of where the weights came from.
LIVE = "a live Megatron-Core model"


@dataclass
class SaveReport:
    """What a save did. Sizes in bytes: `written_bytes` and `host_bytes` (the copy that a background save made)
    are this rank's, `files` and `size_bytes` of all files with weights."""

    destination: str
    format: str
    family: str
    layout: str
    rank: int
    ranks: int
    tensors: int
    files: int
    size_bytes: int
    written_bytes: int
    host_bytes: int
    seconds: float
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return asdict(self)


class Saving:
    """A save that goes on in a thread of its own."""

    def __init__(self, job: "_Save") -> None:
        self.destination = job.destination
        self.error: BaseException | None = None
        self.report: SaveReport | None = None
        # No daemon: a program that ends waits for its last checkpoint.
        self.thread = threading.Thread(target=self._run, args=(job,), name="reshard-save")
        self.thread.start()

    def _run(self, job: "_Save") -> None:
        try:
            with keyword_style_errors():
                self.report = job.write()
        except BaseException as error:
            self.error = error
            log.error("the save to %s failed: %s", self.destination, first_line(error))

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self.thread.is_alive()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save to end; its report. Raises what it failed with, and TimeoutError after `timeout`
        seconds."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise TimeoutError(f"the save to {self.destination} goes on after {timeout} s")
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


_last: Saving | None = None


def save(
    models: Models,
    destination: str | Path,
    hf_config: str | Path | Published,
    *,
    format: str = "torch_dist",
    background: bool = False,
    layout: MegatronLayout | None = None,
    iteration: int | None = None,
    transformer_impl: str | None = None,
    make_vocab_size_divisible_by: int = 128,
    megatron_version: str | None = None,
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    sync: bool = True,
    metadata: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> "SaveReport | Saving":
    """Write a live Megatron-Core model to a Megatron ``torch_dist`` checkpoint or, with `format` ``hf``, to a
    Hugging Face directory.

    All ranks of torch's default process group call it, each with the `models` that ``get_model`` returned to
    it, as `load` takes them; all see the same file system. Of what several ranks hold alike one writes each box.
    `hf_config` is the directory, ``config.json`` or hub id that the model started from: it gives names, and the
    config, tokenizer and generation config that go with the weights; of a transformers config
    only the config does. The files are those that `hf_to_mcore` and
    `mcore_to_hf` make of the same weights, byte for byte; the manifest names another source. `layout` is how a
    ``torch_dist`` checkpoint is cut, by default as the model is; `iteration`, `make_vocab_size_divisible_by` and
    `megatron_version` are those of `hf_to_mcore`, `max_shard_size` that of `mcore_to_hf`, and `overwrite` and
    `sync` those of both. Padding rows of the vocabulary are written as zeros.

    With `iteration`, `destination` is the directory of a training run, such as Megatron-LM's ``--save``: it is given
    one iteration more, with config, tokenizer, flags and manifest in the iteration's own directory, which the run's
    tracker then names. Nothing else there is touched; `overwrite` replaces that iteration alone.

    With `background` each rank copies its share to (pinned) host memory, and a `Saving` is returned, whose
    `result()` waits for the report. The next save first waits for the last one, and raises its error.

    Raises ReshardError on every rank, and leaves no destination (or the old one), where anything fails on any.
    """
    global _last
    last, _last = _last, None
    if last is not None:
        last.result()
    job = _Save(models, destination, hf_config, format, background, layout, iteration, transformer_impl,
                make_vocab_size_divisible_by, megatron_version, max_shard_size, overwrite, sync, metadata, workers)  # fmt: skip
    with keyword_style_errors(), gc_paused():
        job.prepare()
        if background:
            _last = Saving(job)
            return _last
        return job.write()


@dataclass
class _Save:
    """A save on this rank; the first fields are what `save` was given."""

    models: Any
    destination: str | Path
    hf_config: str | Path | Published
    format: str
    background: bool
    layout: MegatronLayout | None
    iteration: int | None
    transformer_impl: str | None
    divisible_by: int
    megatron_version: str | None
    max_shard_size: str | int | None
    overwrite: bool
    sync: bool
    metadata: Mapping[str, Any] | None
    workers: int | None
    host: dict[int, torch.Tensor] = field(default_factory=dict)
    host_bytes: int = 0
    checksums: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """All that comes before the first byte, and the copies of a save in the background."""
        self.began = time.monotonic()
        self.team = meet("save")
        try:
            self.team.together(self._describe)
            self._agree_on_options()
            self.agreed = agree(self.team, self.rank, self.published)
            place = decide(self.team, self._place)
            self.team.together(lambda: self._lay_out(Path(place)))
            self.share = self._mine(self.team.scatter(self._shares()))
            self.team.together(self._open)
            self.team.together(self.rank.trainer.sync_params)
            if self.background:
                self.team.together(self._copy)
        except BaseException as error:
            self._end(error)
            raise

    def write(self) -> SaveReport:
        """Write this rank's share, and with the others see that all is there; then it appears."""
        team = self.team
        try:
            frames = team.share(self.new.sizes)
            team.together(lambda: self._write(frames))
            todo = team.scatter(self._left(team.gather(self.checksums)))
            team.together(lambda: self._read_back(todo))
            known = {name: value for some in team.gather(self.checksums) for name, value in some.items()}
            team.conclude(lambda: self._publish(known))
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        written = sum(box_bytes(piece.box, piece.dtype.size) for piece in self.share)
        return SaveReport(
            str(self.destination), self.new.format, self.published.model.family.name, str(self.laid_out), team.process, team.size,
            len(self.agreed.tensors), len(self.new.sizes), sum(self.new.sizes.values()), written, self.host_bytes,
            time.monotonic() - self.began, self.agreed.model.notices,
        )  # fmt: skip

    def _end(self, error: BaseException | None) -> None:
        """Let go of everything; with an error, of what was written too, once no rank writes any more."""
        self.host.clear()
        if error is not None:
            self.team.fail(error)
        self.team.stop()
        if hasattr(self, "work"):
            self.work.close(remove=error is not None)
        self.team.close()

    def _describe(self) -> None:
        allow_many_files()
        worker_count(self.workers)
        for name in ("background", "overwrite", "sync"):
            check_switch(getattr(self, name), name)
        if self.format not in FORMATS:
            raise ReshardError(f"format is {self.format!r:.80}, which is not one of {listed(FORMATS)}")
        if not isinstance(self.layout, (MegatronLayout, type(None))):
            raise ReshardError(
                f"layout is {self.layout!r:.80}, not a reshard.MegatronLayout such as MegatronLayout(tp=2)"
            )
        if self.transformer_impl not in (*TRANSFORMER_IMPLS, None):
            raise ReshardError(
                f"transformer_impl {self.transformer_impl} is not one of {listed(TRANSFORMER_IMPLS)}"
            )
        if not isinstance(self.destination, (str, os.PathLike)) or not str(self.destination):
            raise ReshardError(f"destination is {self.destination!r:.80}, which is no directory's path")
        if self.iteration is not None:
            check_number(self.iteration, "iteration", MAX_ITERATION)
            if self.format == "hf":
                raise ReshardError(
                    'a Hugging Face directory has no iterations: leave iteration out, or pass format="torch_dist"'
                )
        self.megatron_lm = version_of(self.megatron_version)
        self.shard_bytes = None if self.max_shard_size is None else parse_size(self.max_shard_size)
        self.published = Published.read(self.hf_config)
        self.rank = Rank(self.models, self.metadata)
        self.rank.describe(self.published.model, self.divisible_by)
        self.laid_out = self.layout or layout_of(self.rank.trainer.config)

    def _agree_on_options(self) -> None:
        """Raise ReshardError where the ranks were not told the same; which kind of layers they hold."""
        mine = {
            "destination": os.path.abspath(self.destination), "the digest of the config": self.published.digest,
            "format": self.format, "background": self.background, "layout": str(self.laid_out), "iteration": self.iteration,
            "transformer_impl": self.transformer_impl, "make_vocab_size_divisible_by": self.divisible_by,
            "megatron_version": list(self.megatron_lm), "max_shard_size": self.shard_bytes, "overwrite": self.overwrite, "sync": self.sync,
        }  # fmt: skip
        check_alike(self.team, "saves", mine)
        # A stage without layers does not tell.
        told = self.team.together(lambda: implementation_of(self.rank.trainer.models))
        self.implementation = self.transformer_impl or max(told)

    def _place(self) -> str:
        """The destination. Raises ReshardError where it is a training run's, all of which would be replaced."""
        place = Path(os.path.abspath(self.destination))
        if self.iteration is None and self.overwrite and iterations_in(place):
            raise ReshardError(
                f"{place} holds iterations of a training run, all of which overwrite=True would replace: pass iteration=, "
                f"or save to another directory"
            )
        return str(place)

    def _lay_out(self, place: Path) -> None:
        """Where the bytes of every tensor go: into the destination, or an iteration's directory in it."""
        agreed, beside, added = self.agreed, self.published.beside, self.iteration is not None
        self.new: Destination
        if self.format == "hf":
            plain = Fp8Blocks(())
            self.new = HuggingFaceFiles(
                agreed.model, agreed.fp32, agreed.tensors, plain, self.shard_bytes, beside
            )
        else:
            self.new = MegatronFiles(
                agreed.model, self.laid_out, agreed.tensors, agreed.copies, beside, transformer_impl=self.implementation,
                divisible_by=self.divisible_by, iteration=self.iteration, megatron_lm=self.megatron_lm, alone=added,
            )  # fmt: skip
            place = place / self.new.directory if added else place
        # What the destination must not overlap.
        config = self.published.path or Path(os.devnull)
        kind = AddedIteration if added else Workdir
        self.work = kind(config, beside.values(), place, self.overwrite, False, self.team.process)

    def _shares(self) -> list[dict[str, list[int]]]:
        """For each rank the boxes that it writes; in the first process, which knows."""
        shares: list[dict[str, list[int]]] = [{} for _ in range(self.team.size)]
        for name, several in self.agreed.given.items():
            for given in several:
                shares[given.rank].setdefault(name, []).append(given.number)
        return shares

    def _mine(self, given: dict[str, list[int]]) -> list[Piece]:
        """This rank's pieces that it was given to write."""
        pieces = self.rank.by_name()
        return [pieces[name][number] for name, numbers in given.items() for number in numbers]

    def _open(self) -> None:
        """Make the files at their full length; new bytes are zero."""
        if self.team.process:
            return
        self.work.check_destination()
        status, needed = os.statvfs(self.work.destination.parent), sum(self.new.sizes.values())
        if needed > status.f_bavail * status.f_frsize:
            raise ReshardError(
                f"{self.work.destination} needs {needed:,} bytes, but the disk has "
                f"{status.f_bavail * status.f_frsize:,} free"
            )
        self.work.open(SAVE, False)
        with OpenFiles(os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as files:
            for name, size in self.new.sizes.items():
                path = self.work.tree / name
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise write_error(path, error) from error
                files.resize(path, size)

    def _copy(self) -> None:
        """Copy this rank's share to host memory."""
        targets = [bytes_of(piece.region, piece.local) for piece in self.share]
        self.host = dict(enumerate(on_host(targets, self.rank.device)))
        self.host_bytes = sum(copy.numel() for copy in self.host.values())

    def _write(self, frames: set[str]) -> None:
        """Write this rank's share and the frames of some files; a tensor that it holds whole is hashed on the
        way."""
        root = self.work.tree
        strips = {name: self._strips(name) for name in {piece.name for piece in self.share}}
        written = {strip.path for found in strips.values() for strip in found} | {
            root / name for name in frames
        }
        files = OpenFiles(os.O_RDWR | os.O_NOFOLLOW)
        device = FromDevice(torch.device("cpu") if self.background else self.rank.device)
        try:
            self.new.write_frames(root, frames, files)
            groups = dict(enumerate(self._groups(strips)))
            write = partial(self._write_group, files=files, strips=strips, device=device)
            with (EarlySync if self.sync else NoSync)(files, sorted(written)) as sync:

                def check() -> None:
                    self.team.check()
                    sync.check()

                found = run_jobs(
                    {str(i): sum(self._size(index) for index in group) for i, group in groups.items()},
                    lambda i: write(groups[int(i)]),
                    self.workers,
                    check=check,
                    files_of=lambda i: {
                        str(s.path) for index in groups[int(i)] for s in strips[self.share[index].name]
                    },
                )
        finally:
            errors = files.close()
        for path, late in errors.items():  # what a server says only now
            raise write_error(path, late)
        self.checksums = {name: checksum for some in found.values() for name, checksum in some.items()}

    def _strips(self, name: str) -> list[Strip]:
        """Where a tensor and its copies go."""
        names = [name, *(copy for copy, primary in self.agreed.copies.items() if primary == name)]
        return [s._replace(path=self.work.tree / s.path) for n in names for s in self.new.strips.get(n, ())]

    def _groups(self, strips: dict[str, list[Strip]]) -> list[list[int]]:
        """What is written at a time: pieces, by their numbers in the share, that follow one another in the same
        files."""
        found = []
        for index, piece in enumerate(self.share):
            there = strips[piece.name]
            files = tuple(sorted({str(strip.path) for strip in there}))
            found.append((files, place_of(there, Rows.of(piece.box), piece.dtype.size), index))
        return [
            bundle
            for _, several in groupby(sorted(found), itemgetter(0))
            for bundle in bundles((index, self._size(index), PINNED_BYTES) for *_, index in several)
        ]

    def _size(self, index: int) -> int:
        return box_bytes(self.share[index].box, self.share[index].dtype.size)

    def _write_group(
        self, group: list[int], files: OpenFiles, strips: dict[str, list[Strip]], device: FromDevice
    ) -> dict[str, str]:
        """Write some pieces; the checksums of the tensors of which one of them is all."""
        pieces = {index: self.share[index] for index in group}
        most = slab_bytes(self.rank.device)
        parts = [(i, part) for i, p in pieces.items() for part in parts_of(p, p.dtype.size, most)]
        together = list(bundles(((i, part), part.size_bytes, most) for i, part in parts))
        digests = {
            index: xxhash.xxh3_128()
            for index, piece in pieces.items()
            if piece.box.lengths == self.agreed.tensors[piece.name].shape
        }
        memory = [[self._bytes(index, part) for index, part in bundle] for bundle in together]
        for bundle, arrays in zip(together, device.read(memory)):
            boxes = []
            for (index, part), data in zip(bundle, map(np.ascontiguousarray, arrays), strict=True):
                if index in digests:
                    digests[index].update(memoryview(data.reshape(-1)))
                boxes.append((strips[part.piece.name], part.rows, data))
            write_boxes(files, boxes)
        return {pieces[index].name: digest.hexdigest() for index, digest in digests.items()}

    def _bytes(self, index: int, part: Part) -> torch.Tensor:
        if index not in self.host:
            return part.bytes
        first = part.piece.box.offsets[0]
        return self.host[index][part.rows.start - first : part.rows.stop - first]

    def _left(self, known: list[dict[str, str]]) -> list[list[str]]:
        """For each rank the tensors that it hashes: those of which several ranks wrote parts. In the first
        process, which alone knows."""
        hashed = {name for some in known for name in some}
        shares: list[list[str]] = [[] for _ in known]
        load = [0] * len(known)
        for name, info in self.agreed.tensors.items() if known else ():
            if name not in hashed and name not in self.agreed.copies:
                least = load.index(min(load))
                load[least] += info.size_bytes
                shares[least].append(name)
        return shares

    def _read_back(self, names: list[str]) -> None:
        """Hash these tensors as the files have them."""
        mine = {name: self.agreed.tensors[name].size_bytes for name in names}
        strips = {
            name: [s._replace(path=self.work.tree / s.path) for s in self.new.strips[name]] for name in mine
        }
        with OpenFiles(os.O_RDONLY | os.O_NOFOLLOW) as files:
            reader = StripReader(self.agreed.tensors, files)

            def checksum(name: str) -> str:
                read = lambda n, start, stop: reader.read_rows(n, start, stop, strips[n])  # noqa: E731
                return checksum_of(name, self.agreed.tensors[name], read)

            self.checksums |= run_jobs(mine, checksum, self.workers, check=self.team.check)

    def _publish(self, checksums: dict[str, str]) -> None:
        checksums |= {copy: checksums[primary] for copy, primary in self.agreed.copies.items()}
        fields = self.new.fields(self.agreed.model.family.name, LIVE, [])
        if self.agreed.model.ignored:
            fields["ignored_config_fields"] = sorted(self.agreed.model.ignored)
        self.new.finish(self.work, fields, checksums, self.sync)
        self.work.publish(self.sync)
