"""Deltas of a live model, Megatron-Core's or one under FSDP2: after each step, what changed is added to a chain."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reshard.comm.team import Team
from reshard.core.boxes import Box
from reshard.core.errors import ReshardError, listed
from reshard.core.gc import gc_paused
from reshard.delta.chain import Chain, check_tensors, next_version
from reshard.delta.configs import check_config_of_chain, check_named_alike, check_same_config, recorded
from reshard.delta.disk import DeltaReport
from reshard.delta.files import RecordWriter
from reshard.delta.manifests import Base, BaseDrafter, Delta, File, delta_name
from reshard.delta.records import RECORD_BYTES, encode_box
from reshard.delta.source import own_tensors
from reshard.delta.stored_drafter import StoredDrafter
from reshard.device.live_boxes import LiveBox, Slab, slabs_of
from reshard.device.staging import numpy_view
from reshard.device.stored import published
from reshard.digests.numbers import bits_of, seed_of, start_of, start_total, sum_rows, text_of, total_of
from reshard.live.begun_save import BegunSave, Kept, Packed
from reshard.live.collective import check_same_options, keyword_style_errors, open_team, run_on_first
from reshard.live.drafter import LocalDrafter, take_drafter
from reshard.live.inventory import take_inventory
from reshard.live.local_boxes import LocalBoxes
from reshard.live.local_part import local_boxes
from reshard.live.published_model import PublishedModel
from reshard.megatron.towers import takes_tower
from reshard.models.drafters import DRAFTER
from reshard.models.model import Model
from reshard.storage.io.casts import cast, float_dtype
from reshard.storage.io.streams import TensorInfo
from reshard.storage.sources.base import Source
from reshard.storage.sources.opening import open_source, with_larger_model
from reshard.storage.sources.paths import HF_FILES, locate
from reshard.trainers.drafter import WithDrafter
from reshard.trainers.fsdp import FsdpModel

if TYPE_CHECKING:
    from reshard.live.local_model import Models


class DeltaWriter:
    """Adds versions of a live model to a chain.

    Each rank keeps what it last wrote in host memory (`kept_bytes`): of boxes that several ranks hold one
    of them keeps and writes it, so all ranks together keep the weights once, and none gathers another's. What
    changed of a rank's boxes becomes a file of its own.

    All ranks of torch's default process group make one, and call `save` together. `models` are Megatron's, or a
    `reshard.trainers.FsdpModel`. `hf_config` is that of `reshard.export`, `chain` a directory that all ranks
    reach, or a URL. `base` is the checkpoint that the model holds now, with which a new chain begins: by default
    `hf_config`. The model is compared with it, where it is a directory or was fetched from the hub. A `base` that is
    given and is not on this host is only noted, as the name of what the model holds. `dtype`, such as ``bf16``, is the
    chain's where the model holds another one.

    Of a `reshard.trainers.WithDrafter` each version brings the model and the drafter. A new chain then begins with
    `drafter_base`, the checkpoint that the drafter holds now, which is as `base` is. Ranks that hold nothing of the
    drafter give the model alone; all give the same `drafter_base`.

    Raises ReshardError on every rank where the models are not that of `hf_config`, or hold other weights than
    the newest version of the chain, or than the base of a new one, or the drafter does.
    """

    def __init__(
        self,
        models: "Models | FsdpModel | WithDrafter",
        hf_config: str | Path | PublishedModel,
        chain: str | Path,
        *,
        base: str | Path | None = None,
        drafter_base: str | Path | None = None,
        make_vocab_size_divisible_by: int = 128,
        metadata: Mapping[str, Any] | None = None,
        dtype: str | None = None,
    ) -> None:
        with keyword_style_errors():
            target = float_dtype(dtype)
        name = None if target is None else target.name
        self.chain = Chain(chain)
        self.digest = self.digest_of_drafter = ""  # the second of its part, empty without one
        self.kept: list[Kept] = []
        self.is_closed = False
        self._begun: BegunSave | None = None  # the last
        with keyword_style_errors(), gc_paused(), open_team("deltas") as team:
            described: list[tuple[PublishedModel, LocalBoxes, LocalDrafter | None]] = []

            def describe() -> None:
                published, drafter = PublishedModel.read(hf_config), None
                of_model = models.trainer if isinstance(models, WithDrafter) else models
                local = local_boxes(of_model, metadata, turned_too=True)  # type: ignore[arg-type]
                local.find_boxes(published.model, make_vocab_size_divisible_by, name)
                if isinstance(models, WithDrafter):
                    drafter = LocalDrafter(models.drafter)
                    drafter.find_boxes(published.model, dtype=name)
                described.append((published, local, drafter))

            team.together(describe)
            [(published, self.local, self.local_drafter)] = described
            options = {"the digest of the config": published.digest, "drafter_base": str(drafter_base)}
            check_same_options(team, "deltas", options)
            inventory = take_inventory(team, self.local, published)
            self.tensors = {n: info for n, info in inventory.tensors.items() if n not in inventory.copies}
            self.published = published
            self.numbers = team.scatter(inventory.assigned_numbers(team.size))
            self._add_drafter(team)
            self._follow(team)
            named: list[tuple[str, Path | None]] = []
            team.together(lambda: named.append(_base_of(hf_config, published, base, self.chain.exists)))
            self._begin(team, *named[0], None if drafter_base is None else str(drafter_base))

    def _add_drafter(self, team: Team) -> None:
        """Find what all ranks hold of the drafter, and which of it this rank writes."""
        inventory = take_drafter(team, self.local_drafter)
        self.drafter = None if inventory is None else inventory.declared
        self.numbers_of_drafter: dict[str, list[int]] = {}
        if inventory is None:
            return
        alike = sorted(name for name in self.tensors if name.startswith(DRAFTER))
        if alike:
            raise ReshardError(
                f"the model's {listed(alike, 3)} would be taken for its drafter's: give the model without the drafter"
            )
        self.tensors |= inventory.tensors
        self.numbers_of_drafter = team.scatter(inventory.assigned_numbers(team.size))

    def _begin(self, team: Team, name: str, directory: Path | None, drafter: str | None) -> None:
        """Keep the weights as they are, and begin the chain with them, or see that it ends with them. The base is known
        by its name, and by the directory of its weights where these are on this host; that of the `drafter` by its
        name."""
        self.kept = [Kept(slab, bits) for slab, bits in self._numbers()]
        parts = team.together(self._totals)
        self.digest = text_of(total_of([start_total(self.tensors), *(whole for whole, _ in parts)]))
        if self.drafter is not None:
            starts = start_total(self._tensors_of_drafter())
            self.digest_of_drafter = text_of(total_of([starts, *(part for _, part in parts)]))

        exists = run_on_first(team, lambda: self.chain.exists)
        begun = run_on_first(team, lambda: self._check_drafter(exists, drafter))
        if not exists and directory is not None:
            self._check_base(team, directory)

        def begin() -> None:
            if exists:
                self._check_newest(self.chain.deltas())
                return
            with self.chain.store.writing() as scratch:
                self.chain.check_end(None)
                said = recorded(self.published.config, self.published.model)
                base = Base(name, self.digest, self.tensors, **said)
                self.chain.begin(replace(base, drafter=begun and BaseDrafter(**begun)), scratch)

        run_on_first(team, begin)

    def _totals(self) -> list[int]:
        """Return what this rank adds to the digest of all, and to that of the drafter."""
        numbers = [(_is_drafters(kept.slab.live_box.name), self._digest_of(kept)) for kept in self.kept]
        return [
            sum(number for _, number in numbers),
            sum(number for is_drafters, number in numbers if is_drafters),
        ]

    def _tensors_of_drafter(self) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.tensors.items() if _is_drafters(name)}

    def _check_drafter(self, exists: bool, base: str | None) -> dict[str, Any] | None:
        """Return what a new chain says of the drafter that it begins with, whose checkpoint is the `base`. Raises
        ReshardError where that has other weights than the trainer's, or the chain that exists another drafter."""
        if exists:
            self._check_drafter_of_chain()
            return None
        if self.drafter is None:
            if base is not None:
                raise ReshardError(
                    f"drafter_base= is {base}, and the trainer has no drafter: give WithDrafter(trainer, drafter)"
                )
            return None
        if base is None:
            raise ReshardError(
                "a chain that begins with a drafter needs the name of that: give drafter_base= the checkpoint that the "
                "drafter holds now, as a directory, or by its name, which is believed"
            )
        if os.path.isdir(base):
            with closing(StoredDrafter(Path(base))) as stored, stored.unchanged():
                digest = stored.digest(self._tensors_of_drafter(), "the trainer's drafter")
            if digest != self.digest_of_drafter:
                raise ReshardError(
                    f"the trainer's drafter holds other weights than {base} (digest {self.digest_of_drafter}, not "
                    f"{digest}): give drafter_base= the checkpoint that it holds now"
                )
        return {"name": base, "digest": self.digest_of_drafter, "config": self.drafter.config}

    def _check_drafter_of_chain(self) -> None:
        """Raise ReshardError unless the chain has the drafter that the trainer has, or none as the trainer."""
        begun, where = self.chain.base.drafter, self.chain.where
        if (begun is None) != (self.drafter is None):
            raise ReshardError(
                f"{where} was begun without a drafter, and the trainer has one: give a directory for a new chain, or "
                f"the model without its drafter"
                if begun is None
                else f"{where} has a drafter ({begun.name}), and the trainer has none: give WithDrafter(trainer, "
                f"drafter), or a directory for a new chain"
            )
        if begun is not None and self.drafter is not None:
            self.drafter.check_config(begun.config, where)

    def _check_base(self, team: Team, directory: Path) -> None:
        """Raise ReshardError on every rank unless the checkpoint in a directory has the weights with which the chain
        begins. Each rank reads some of its tensors."""

        begun = self._of_model()
        tensors = begun.tensors

        def digest() -> int:
            with closing(
                open_source(directory, self.published.path if locate(directory) is not None else None)
            ) as source:
                stored, model = own_tensors(source), self.published.model
                check_named_alike(
                    (source.model, stored), (model, tensors), str(directory), "the trainer's model"
                )
                lacking = [
                    n for n, info in tensors.items() if n not in stored or stored[n].shape != info.shape
                ]
                if lacking:
                    raise ReshardError(
                        f"{directory} is another model than the trainer's: it has no {listed(lacking, 3)} "
                        "of that shape; give base= the checkpoint that the model holds now"
                    )
                named = str(directory), "the trainer's model"
                check_same_config(with_larger_model(source), self._larger_model(), *named)
                with source.unchanged():
                    return sum(
                        _digest_of_stored(source, name, tensors[name])
                        for name in sorted(tensors)[team.process :: team.size]
                    )

        base_digest = text_of(total_of(team.together(digest)))
        if base_digest != begun.digest:
            raise ReshardError(
                f"the trainer's model holds other weights than {directory} (digest {begun.digest}, not "
                f"{base_digest}), so a chain that begins with them could not be applied to that: give base= the "
                "checkpoint that the model holds now"
            )

    def _of_model(self) -> Base:
        """Return the weights as they are, without the drafter's."""
        drafter = BaseDrafter("", self.digest_of_drafter, {}) if self.drafter is not None else None
        return Base("", self.digest, self.tensors, drafter=drafter).of_model()

    def _larger_model(self) -> Model:
        return takes_tower(self.published.model, self.published.config)

    def _check_newest(self, deltas: list[Delta]) -> None:
        """Raise ReshardError unless this model's weights are those of the chain's newest version."""
        base = self.chain.base
        check_tensors(base, self.tensors, "the trainer's model", self.chain.where)
        check_config_of_chain(base, self._larger_model(), "the trainer's model", self.chain.where)
        newest = deltas[-1].after if deltas else base.digest
        if newest != self.digest:
            last = f"version {deltas[-1].version}" if deltas else f"the base ({base.name})"
            raise ReshardError(
                f"{self.chain.where} ends with {last}, and the trainer's model holds other weights (digest "
                f"{self.digest}, not {newest}): load those, or give a directory for a new chain"
            )

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps in host memory."""
        return sum(kept.bits.nbytes for kept in self.kept)

    def save(self, version: int | None = None) -> DeltaReport:
        """Add what changed since the last version to the chain, as `version`, by default the next one. All
        ranks call it, while no rank trains.

        Raises ReshardError on every rank, and adds nothing, where one of them fails.
        """
        with keyword_style_errors(), gc_paused():
            add, _ = self._pack(version)
            return add()

    def begin_save(self, version: int | None = None) -> BegunSave:
        """Begin what `save` does, and return once what changed is packed in host memory: the weights may change from
        then on. Files are written, checked and published in the background; `BegunSave.wait` says what has become of
        them. All ranks call it, while no rank trains.

        The next save, and `close`, wait for that, and raise its error where nobody has waited.
        """
        with keyword_style_errors(), gc_paused():
            add, packed = self._pack(version)
        self._begun = BegunSave(add, packed)
        return self._begun

    def _pack(self, version: int | None) -> tuple[Callable[[], DeltaReport], list[Packed]]:
        """Pack what changed on this rank since the last version; return it with the call, by any thread, that adds it
        to the chain."""
        begun = self._begun
        with ExitStack() as ends:
            team = ends.enter_context(open_team("a delta"))
            try:
                team.together(lambda: begun.tell() if begun is not None else None)
            finally:
                if (
                    begun is not None and begun.is_done
                ):  # one that goes on, where this was interrupted, is not forgotten
                    self._begun = None
            digest = self.digest
            last = {"version": version, "the digest of the last version": self.digest}
            check_same_options(team, "deltas", last)
            self._follow(team)
            packed: list[Packed] = []
            team.together(lambda: packed.extend(self._changes()))
            rest = ends.pop_all()

        def add() -> DeltaReport:
            with (
                keyword_style_errors(),
                rest,
            ):  # the team has connections of its own, and uses none of torch's groups
                return self._add(team, version, packed, digest)

        return add, packed

    def _changes(self) -> Iterator[Packed]:
        """Yield what changed on this rank since the last version."""
        for kept, (slab, new) in zip(self.kept, self._numbers(), strict=True):
            encoded = encode_box(slab.live_box.name, _box_of(slab), kept.bits, new)
            if encoded is not None:
                yield Packed(kept, *encoded)

    def _add(self, team: Team, version: int | None, packed: list[Packed], digest: str) -> DeltaReport:
        """Add to the chain what the ranks have packed of what changed since weights with this digest."""

        def start() -> tuple[int, int]:
            if self.digest != digest:
                raise ReshardError("another version was added while this one was packed: save again")
            deltas = self.chain.deltas()
            self._check_newest(deltas)
            return next_version(deltas, version, self.chain.where)

        with ExitStack() as stack:
            number, follows = run_on_first(team, start)
            scratch = self._scratch(team, stack)
            written = team.together(lambda: self._write(team, scratch, number, follows, packed))
            run_on_first(team, lambda: self.chain.check_end(follows))
            own = written[team.process][0]
            after = text_of(int(self.digest, 16) + total_of(change for _, _, change, _ in written))
            of_drafter = ""
            if self.drafter is not None:
                changes = total_of(change for _, _, _, change in written)
                of_drafter = text_of(int(self.digest_of_drafter, 16) + changes)
            files = [File(*file) for file, _, _, _ in written if file]
            changed = sum(n for _, n, _, _ in written)
            delta = Delta(number, follows, self.digest, after, changed, files, drafter=of_drafter)
            with self.chain.adding(delta) if team.process == 0 else nullcontext():
                team.together(lambda: self.chain.store.put(scratch / own[0], own[0]) if own else None)
                run_on_first(team, lambda: self.chain.append(delta, scratch))
            self._keep(packed, after, of_drafter)
            return DeltaReport.of(self.chain, delta)

    def _keep(self, packed: list[Packed], digest: str, of_drafter: str) -> None:
        """Keep the weights of a version that is there now. A rank that fails here has another digest than the others,
        with which it adds nothing more."""
        for one in packed:
            one.keep()
        self.digest, self.digest_of_drafter = digest, of_drafter

    def _follow(self, team: Team) -> None:
        """Let the trainer finish what it has put off, and find the boxes that this rank writes where they lie."""

        def follow() -> None:
            if self.is_closed:
                raise ReshardError("this DeltaWriter is closed: make another one")
            self.local.trainer.sync_params()
            self.local.find_regions()
            if self.local_drafter is not None:
                self.local_drafter.find_regions()

        team.together(follow)
        self.boxes = self.local.numbered(self.numbers)
        if self.local_drafter is not None:
            self.boxes += self.local_drafter.numbered(self.numbers_of_drafter)

    def _scratch(self, team: Team, stack: ExitStack) -> Path:
        """Return where this rank writes what is not whole yet: the first one has made it by then."""
        entered: list[Path] = []

        def enter(is_first: bool) -> None:
            if is_first == (team.process == 0):
                entered.append(stack.enter_context(self.chain.store.writing(is_first)))

        for is_first in (True, False):
            team.together(lambda is_first=is_first: enter(is_first))  # type: ignore[misc]
        return entered[0]

    def _write(
        self, team: Team, scratch: Path, number: int, follows: int, packed: list[Packed]
    ) -> tuple[list[Any] | None, int, int, int]:
        """Write this rank's file into `scratch`; return what it is, how many elements changed, and by how
        much the digest, and that of the drafter."""
        if not packed:
            return None, 0, 0, 0
        rank = f"-rank-{team.process:05d}" if team.size > 1 else ""
        writer = RecordWriter(scratch, f"{delta_name(number)}{rank}.safetensors")
        try:
            changes = [
                (record.name, writer.add_change(record, payload, self.tensors[record.name], kept.bits))
                for kept, record, payload in packed
            ]
            file = writer.finish(number, follows)
            change = total_of(of_record for _, of_record in changes)
            of_drafter = total_of(of_record for name, of_record in changes if _is_drafters(name))
            return [file.name, file.bytes, file.xxh3_128], writer.changed, change, of_drafter
        finally:
            writer.close()

    def _numbers(self) -> Iterator[tuple[Slab, np.ndarray]]:
        """Yield the slabs that this rank writes, with the bits of their published numbers: a copy on the host."""
        for box in self.boxes:
            for slab in slabs_of(box, box.dtype.size, RECORD_BYTES):
                yield slab, _published_bits(slab, box)

    def _digest_of(self, kept: Kept) -> int:
        name, rows = kept.slab.live_box.name, kept.slab.rows
        return sum_rows(seed_of(name, self.tensors[name]), kept.bits, rows.start, rows.column)

    def close(self) -> None:
        """Free what is kept, once a save that was begun has ended. No version can be saved afterward.

        Raises ReshardError if that save has failed, and nobody has waited for it.
        """
        begun = self._begun
        try:
            if begun is not None:
                begun.tell()
        finally:
            if (
                begun is None or begun.is_done
            ):  # what one that goes on reads stays, where this was interrupted
                self._begun, self.is_closed, self.kept = None, True, []
                self.chain.close()


def _is_drafters(name: str) -> bool:
    return name.startswith(DRAFTER)


def _base_of(
    hf_config: Any, published: PublishedModel, base: str | Path | None, exists: bool
) -> tuple[str, Path | None]:
    """Return the name of the checkpoint with which a chain begins, and the directory of its weights, None for
    a base that is not on this host. Raises ReshardError for a new chain of which it is not known."""
    if base is not None:
        return str(base), Path(base) if os.path.isdir(base) else None
    path = published.path
    directory = path.parent if path is not None and path.is_file() else path
    if directory is not None and directory.name == HF_FILES and locate(directory.parent) is not None:
        directory = directory.parent
    has_weights = directory is not None and (
        any(directory.glob("*.safetensors")) or locate(directory) is not None
    )
    if not has_weights and not exists:
        raise ReshardError(
            f"the weights of {hf_config if isinstance(hf_config, str | Path) else 'hf_config'} are not on "
            "this host, so the trainer's model cannot be compared with them: give base= the checkpoint "
            "that it holds now, as a directory, or by its name, which is believed"
        )
    return str(hf_config), directory if has_weights else None


def _digest_of_stored(source: Source, name: str, info: TensorInfo) -> int:
    """Return what a checkpoint's tensor adds to the digest, in the dtype of the chain."""
    seed, stored = seed_of(name, info), source.tensors[name].dtype
    total = start_of(seed)
    for start, stop in info.slabs(RECORD_BYTES, source.row_multiple(name)):
        total += sum_rows(seed, cast(source.read_rows(name, start, stop), stored, info.dtype), start)
    return total


def _box_of(slab: Slab) -> Box:
    box, rows = slab.live_box.box, slab.rows
    return Box((rows.start, *box.offsets[1:]), (rows.stop - rows.start, *box.lengths[1:]))


def _published_bits(slab: Slab, box: LiveBox) -> np.ndarray:
    held = slab.bytes
    copied = torch.empty(held.shape, dtype=torch.uint8)
    copied.copy_(held)
    numbers = published(copied.view(box.region.tensor.dtype), box.dtype)
    copied = numbers.to(getattr(torch, box.dtype.name)).view(torch.uint8)
    bits: np.ndarray = bits_of(numpy_view(copied).view(f"i{box.dtype.size}"))
    return bits
