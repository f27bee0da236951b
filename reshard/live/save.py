"""Save a live Megatron: every rank writes its own boxes into common files, which appear whole or not at
all."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.gc import gc_paused
from reshard.core.limits import MAX_ITERATION, check_number, check_switch
from reshard.device.staging import byte_view, copy_to_host
from reshard.live.collective import (
    check_same_options,
    keyword_style_errors,
    open_team,
    run_on_first,
)
from reshard.live.inventory import take_inventory
from reshard.live.local_model import LocalModel, Models
from reshard.live.published_model import PublishedModel, implementation_of, layout_of
from reshard.live.share_writer import ShareWriter
from reshard.megatron.flags import version_of
from reshard.megatron.hybrid import class_of_models, pattern_of
from reshard.megatron.layout import MegatronLayout, checked_layout
from reshard.megatron.parameters import TRANSFORMER_IMPLS
from reshard.storage.destinations.base import Destination
from reshard.storage.destinations.huggingface import HuggingFaceFiles, parse_size
from reshard.storage.destinations.megatron import MegatronFiles
from reshard.storage.io.boxes import box_bytes
from reshard.storage.io.files import OpenFiles, allow_many_files, write_error
from reshard.storage.quantized import Quantized
from reshard.storage.run.added_iteration import AddedIteration
from reshard.storage.run.job import files_of_process
from reshard.storage.run.partial import SAVE
from reshard.storage.run.workdir import Workdir
from reshard.storage.run.workers import worker_count
from reshard.storage.sources.paths import iterations_in
from reshard.storage.stores.place import is_store
from reshard.storage.stores.sending import send_files
from reshard.storage.stores.workdir import StoreWorkdir, iterations_in_store

log = logging.getLogger("reshard")
FORMATS = ("torch_dist", "hf")
# The source in the manifest.
LIVE = "a live Megatron-Core model"


@dataclass
class SaveReport:
    """The result of a save. Sizes in bytes: `written_bytes` and `host_bytes` (the copy that a
    background save made) are this rank's, `files` and `size_bytes` count all files with weights."""

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
        """Return the fields as plain values."""
        return asdict(self)


class Saving:
    """A save that runs in a background thread."""

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
        """Return True once the save has ended, well or not."""
        return not self.thread.is_alive()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save to end, and return its report. Raises its error, and TimeoutError after `timeout`
        seconds."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise TimeoutError(f"the save to {self.destination} is still running after {timeout} s")
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


_last: Saving | None = None


def save(
    models: Models,
    destination: str | Path,
    hf_config: str | Path | PublishedModel,
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
    """Write a live Megatron-Core model to a Megatron ``torch_dist`` checkpoint or, with `format`
    ``hf``, to a Hugging Face directory.

    All ranks of torch's default process group call it, with `models` as for `load`; all see the
    same file system. To the URL of an object store each rank sends some of the files, from a directory that all see
    (``RESHARD_SPOOL``). One rank writes each box that several hold. The files are those that
    `hf_to_mcore` and `mcore_to_hf` make of the same weights, byte for byte; the manifest names
    another source. Padding rows of the vocabulary are written as zeros.

    Args:
        hf_config: the directory, ``config.json`` or hub id that the model started from. It gives names,
            config, tokenizer and generation config. A transformers config gives names and config only.
        background: copy each rank's share to (pinned) host memory and return a `Saving`, whose `result()` waits for
            the report. The next save first waits for this one, and raises its error.
        layout: the layout that a ``torch_dist`` checkpoint is cut for, by default the model's.
        iteration: add this iteration to a training run, whose directory (Megatron-LM's ``--save``) `destination` is.
            Config, tokenizer, flags and manifest go into the iteration's directory, which the run's tracker then names.
            Nothing else there is touched; `overwrite` replaces that iteration alone.
        megatron_version, make_vocab_size_divisible_by: as for `hf_to_mcore`. max_shard_size: as for `mcore_to_hf`.
            overwrite, sync: as for both.

    Raises ReshardError on every rank, and leaves no destination (or the old one), where anything
    fails on any.
    """
    global _last
    last, _last = _last, None
    if last is not None:
        last.result()
    job = _Save(models, destination, hf_config, format, background, layout, iteration, transformer_impl,
                make_vocab_size_divisible_by, megatron_version, max_shard_size, overwrite, sync, metadata,
                workers)  # fmt: skip
    with keyword_style_errors(), gc_paused():
        job.prepare()
        if background:
            _last = Saving(job)
            return _last
        return job.write()


@dataclass
class _Save:
    """A save on this rank; the first fields are the arguments of `save`."""

    models: Any
    destination: str | Path
    hf_config: str | Path | PublishedModel
    format: str
    background: bool
    layout: MegatronLayout | None
    iteration: int | None
    transformer_impl: str | None
    make_vocab_size_divisible_by: int
    megatron_version: str | None
    max_shard_size: str | int | None
    overwrite: bool
    sync: bool
    metadata: Mapping[str, Any] | None
    workers: int | None
    host: dict[int, torch.Tensor] = field(default_factory=dict)
    host_bytes: int = 0

    def prepare(self) -> None:
        """Do all that comes before the first byte, and make the copies of a background save."""
        self.began = time.monotonic()
        self.team = open_team("save")
        try:
            self.team.together(self._check_options)
            self._agree_on_options()
            self.inventory = take_inventory(self.team, self.local, self.published)
            path = run_on_first(self.team, self._checked_destination)
            self.team.together(lambda: self._lay_out(path))
            numbers = self.team.scatter(self.inventory.assigned_numbers(self.team.size))
            self.share = self.local.numbered(numbers)
            self.team.together(self._create_files)
            self._check_spool()
            self.team.together(self.local.trainer.sync_params)
            if self.background:
                self.team.together(self._copy_to_host)
        except BaseException as error:
            self._end(error)
            raise

    def write(self) -> SaveReport:
        """Write this rank's share, check with the others that all is written, and publish the files."""
        team = self.team
        try:
            frames = files_of_process(self.new.sizes, team.process, team.size)
            device = torch.device("cpu") if self.background else self.local.device
            writer = ShareWriter(
                team,
                self.share,
                self.host,
                self.inventory,
                self.new,
                self.work.tree,
                device,
                self.sync,
                self.workers,
            )
            team.together(lambda: writer.write(frames))
            names = team.scatter(writer.names_to_read_back(team.gather(writer.checksums)))
            team.together(lambda: writer.read_back(names))
            checksums = {
                n: value for of_rank in team.gather(writer.checksums) for n, value in of_rank.items()
            }
            team.together(self._send)
            team.conclude(lambda: self._publish(checksums))
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        written = sum(box_bytes(live.box, live.dtype.size) for live in self.share)
        return SaveReport(
            str(self.destination),
            self.new.format,
            self.published.model.family.name,
            str(self.laid_out),
            team.process,
            team.size,
            len(self.inventory.tensors),
            len(self.new.sizes),
            sum(self.new.sizes.values()),
            written,
            self.host_bytes,
            time.monotonic() - self.began,
            [*self.inventory.model.notices, *self.work.notices],
        )

    def _end(self, error: BaseException | None) -> None:
        """Release everything. With an error, also remove what was written, once no rank writes any more."""
        self.host.clear()
        if error is not None:
            self.team.fail(error)
        self.team.stop()
        if hasattr(self, "work"):
            self.work.close(remove=error is not None)
        self.team.close()

    def _check_options(self) -> None:
        allow_many_files()
        worker_count(self.workers)
        for name in ("background", "overwrite", "sync"):
            check_switch(getattr(self, name), name)
        if self.format not in FORMATS:
            raise ReshardError(f"format is {self.format!r:.80}, which is not one of {listed(FORMATS)}")
        checked_layout(self.layout)
        if self.transformer_impl not in (*TRANSFORMER_IMPLS, None):
            raise ReshardError(
                f"transformer_impl {self.transformer_impl} is not one of {listed(TRANSFORMER_IMPLS)}"
            )
        if not isinstance(self.destination, (str, os.PathLike)) or not str(self.destination):
            raise ReshardError(f"destination is {self.destination!r:.80}, which is not a directory's path")
        if self.iteration is not None:
            check_number(self.iteration, "iteration", MAX_ITERATION)
            if self.format == "hf":
                raise ReshardError(
                    'a Hugging Face directory has no iterations: leave iteration out, or pass format="torch_dist"'
                )
        self.megatron_lm = version_of(self.megatron_version)
        self.shard_bytes = None if self.max_shard_size is None else parse_size(self.max_shard_size)
        self.published = PublishedModel.read(self.hf_config)
        self.local = LocalModel(self.models, self.metadata)
        self.local.find_boxes(self.published.model, self.make_vocab_size_divisible_by)
        self.laid_out = self.layout or layout_of(
            self.local.trainer.config, pattern_of(self.local.trainer.texts[0])
        )

    def _agree_on_options(self) -> None:
        """Raise ReshardError if the ranks were given different options. Find which layers the model
        has."""
        options = {
            "destination": self.destination
            if is_store(self.destination)
            else os.path.abspath(self.destination),
            "the digest of the config": self.published.digest,
            "format": self.format,
            "background": self.background,
            "layout": str(self.laid_out),
            "iteration": self.iteration,
            "transformer_impl": self.transformer_impl,
            "make_vocab_size_divisible_by": self.make_vocab_size_divisible_by,
            "megatron_version": list(self.megatron_lm),
            "max_shard_size": self.shard_bytes,
            "overwrite": self.overwrite,
            "sync": self.sync,
        }
        check_same_options(self.team, "saves", options)
        # A stage without layers cannot tell.
        implementations = self.team.together(lambda: implementation_of(self.local.trainer.texts))
        self.implementation = self.transformer_impl or max(implementations)

    def _checked_destination(self) -> str:
        """Return the destination's path. Raises ReshardError if it is a training run's, all of
        which would be replaced."""
        if is_store(self.destination):
            place = str(self.destination).rstrip("/")
            iterations = iterations_in_store(place) if self.overwrite else []
        else:
            place = os.path.abspath(self.destination)
            iterations = iterations_in(Path(place))
        if self.iteration is None and self.overwrite and iterations:
            raise ReshardError(
                f"{place} holds iterations of a training run, all of which overwrite=True would replace: "
                "pass iteration=, or save to another directory"
            )
        return place

    def _lay_out(self, place: str) -> None:
        """Lay out the files in the destination, or in an iteration's directory in it."""
        inventory, beside, added = self.inventory, self.published.beside, self.iteration is not None
        if inventory.model.wrapped and not inventory.with_tower:
            raise ReshardError(
                f"{self.published.path} is the config of a {inventory.model.family.wrapped_in[0]}, of which the "
                "trainer has the language model only: give the whole model, or let the trainer save, and pass "
                "--hf-config to reshard mcore-to-hf"
            )
        self.new: Destination
        self.work: Workdir
        if self.format == "hf":
            plain = Quantized()
            self.new = HuggingFaceFiles(
                inventory.model,
                inventory.fp32,
                inventory.tensors,
                plain,
                self.shard_bytes,
                beside,
                inventory.packed,
            )
        else:
            self.new = MegatronFiles(
                inventory.model,
                self.laid_out,
                inventory.tensors,
                inventory.copies,
                beside,
                transformer_impl=self.implementation,
                make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
                iteration=self.iteration,
                megatron_lm=self.megatron_lm,
                model_class=class_of_models(self.local.trainer.texts),
                alone=added,
            )
            place = f"{place}/{self.new.directory}" if added else place
        # The destination must not overlap it.
        config = self.published.path or Path(os.devnull)
        if is_store(place):
            self.work = StoreWorkdir(
                config,
                place,
                self.overwrite,
                False,
                self.team.process,
                shared=True,
                iteration=self.iteration,
                reads=beside.values(),
            )
            self.sync = False  # what is in the spool is sent, and removed
            return
        kind = AddedIteration if added else Workdir
        self.work = kind(config, beside.values(), Path(place), self.overwrite, False, self.team.process)

    def _create_files(self) -> None:
        """Create the files at their full length; new bytes are zero."""
        if self.team.process:
            return
        self.work.check_destination()
        needed, free = self.work.space(self.new.sizes)
        if needed > free:
            raise ReshardError(
                f"{self.work.destination} needs {needed:,} bytes, but the disk has {free:,} free"
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

    def _check_spool(self) -> None:
        """Raise ReshardError if a rank does not see the files that the first one has created for a store."""
        work = self.work
        if isinstance(work, StoreWorkdir):
            token = run_on_first(self.team, lambda: work.token)
            self.team.together(lambda: work.check_shared(token))

    def _send(self) -> None:
        """Send this rank's part of the files, where the destination is in a store."""
        work, sizes = self.work, self.new.sizes
        if isinstance(work, StoreWorkdir):
            own = files_of_process(sizes, self.team.process, self.team.size)
            send_files(work, {name: sizes[name] for name in own}, self.team.check)
            work.expect(sizes)

    def _copy_to_host(self) -> None:
        """Copy this rank's share to host memory."""
        live_bytes = [byte_view(live.region, live.local) for live in self.share]
        self.host = dict(enumerate(copy_to_host(live_bytes, self.local.device)))
        self.host_bytes = sum(copy.numel() for copy in self.host.values())

    def _publish(self, checksums: dict[str, str]) -> None:
        checksums |= {copy: checksums[primary] for copy, primary in self.inventory.copies.items()}
        fields = self.new.fields(self.inventory.model.family.name, LIVE, [])
        if self.inventory.model.ignored:
            fields["ignored_config_fields"] = sorted(self.inventory.model.ignored)
        self.new.finish(self.work, fields, checksums, self.sync)
        self.work.publish(self.sync)
