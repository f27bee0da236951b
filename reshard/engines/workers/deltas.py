"""Deltas of a chain, written in place into one rank of a running engine."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod

from reshard.core.extras import importing

with importing("vllm"):
    import numpy as np
    import torch

from reshard.comm.background import in_background
from reshard.core.boxes import Box
from reshard.core.errors import ReshardError, UntouchedError, rewrite_message
from reshard.delta.chain import Chain
from reshard.delta.configs import model_of_base
from reshard.delta.encoding import Decoded
from reshard.delta.files import DeltaFiles, StoredRecord
from reshard.delta.manifests import Delta
from reshard.delta.records import Record, decode_record
from reshard.device.digests import Sums
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region, same_bits
from reshard.device.staging import row_view
from reshard.digests.numbers import seed_of
from reshard.engines.workers.placed import Placed, PlacedDeltas, State, state_of
from reshard.models.config_fields import ignored_config_fields
from reshard.models.drafters import DRAFTER
from reshard.refit.copying.copies import wait_for_device
from reshard.refit.drafter import DeclaredDrafter
from reshard.refit.engine import Engine, as_before_on_error
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import EXACT
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import TensorInfo

TO_GO_BACK = "write that one with reshard delta apply, and load it"
_CHUNK_ELEMENTS = 4 << 20  # that are 8 bytes each on the device


class HeldBox(NamedTuple):
    """A box of a canonical tensor that lies in a region of this rank's memory, at `local`."""

    box: Box
    region: Region
    local: Rows

    @property
    def rows(self) -> Rows:
        """The rows and columns of the box."""
        return Rows.of(self.box)


class EngineDeltas:
    """One rank of an engine, as the deltas of chains reach it. Raises ReshardError for an engine that serves
    quantized weights."""

    def __init__(self, engine: Engine) -> None:
        _check_plain(engine)
        self.engine = engine
        self.chain: Chain | None = None
        self.session = ""
        self.prepared: list[DeltaFiles] = []
        # The version that was begun, and the digest of its weights; None where it serves these already.
        self.due: tuple[int, str] | None = None
        self._reading: Future[tuple[list[DeltaFiles], PlacedDeltas]] | None = None
        self._stream: Any = None  # in which a GPU prepares changes
        self.is_written = False  # by this session
        self.wrote = False  # it, and other weights than were there
        self.has_lost = False  # others have written or moved the weights since
        self.files = OpenFiles()
        self.boxes: dict[str, list[HeldBox]] = {}
        # Of the weights as the session has found them.
        self.found: State | None = None
        self.sums, self.values = Sums((), ()), list[int]()
        self.coming: PlacedDeltas | None = None
        self.back: tuple[PlacedDeltas, State] | None = None  # with the weights from which it leads back
        self.why = "nothing was written into it yet"  # there is no way back

    def open(self, place: str | Path, session: str) -> Chain:
        """Return the chain at a place, of whose tensors the boxes that this rank holds are found; any other session
        ends. Raises ReshardError where it is of another model.

        It is read anew at each call: another chain may have been begun in the place of the last one.
        """
        self.close()
        self.chain, self.session, self.is_written, self.wrote = Chain(place), session, False, False
        with as_before_on_error(self.engine):
            self._take(self.chain)
        return self.chain

    def _take(self, chain: Chain) -> None:
        """Have the engine take what a chain has, and find the boxes of that."""
        tensors = chain.base.tensors
        self._check_model(chain)
        self._take_drafter(chain)
        if self.engine.optional:
            self.engine.take_optional(self.engine.optional & tensors.keys())
            _check_plain(self.engine)
        self.found, self.boxes = state_of(self.engine), {}
        for identity, tensor in self.engine.placement.tensors.items():
            region = self.engine.regions[identity]
            for part in tensor.parts:
                self._check(part.name, region, tensors.get(part.name))
                held = HeldBox(part.box, region, Rows.of(part.local_box))
                self.boxes.setdefault(part.name, []).append(held)

    def _check_model(self, chain: Chain) -> None:
        """Raise ReshardError if the engine is of another model by its config than a chain's base, where the chain says
        of which that is."""
        base, model = chain.base, model_of_base(chain.base, chain.where)
        if model is None:
            return
        try:
            with ignored_config_fields(*base.ignored_config_fields, recorded=True):
                self.engine.check_model(model)
        except ReshardError as error:
            sentence = str(error).replace("but the served model's is", "but the chain's base has")
            raise ReshardError(f"{sentence}: start it with that base, {base.name}") from error

    def _take_drafter(self, chain: Chain) -> None:
        """Have the engine take the drafter of a chain; where there is none, it keeps its own. Raises ReshardError if it
        drafts by another one, or by none."""
        drafter, of_drafter = chain.base.drafter, chain.base.of_drafter()
        if drafter is None or of_drafter is None:
            self.engine.take_facts({})
            return
        tensors = {
            name.removeprefix(DRAFTER): (info.shape, info.dtype.name)
            for name, info in of_drafter.tensors.items()
        }
        with rewrite_message(
            ("the trainer has a drafter", "the chain has a drafter"),
            ("the trainer's drafter", "the chain's drafter"),
            ("give the trainer's model without it", "take a chain without it"),
        ):
            self.engine.take_facts({chain.where: DeclaredDrafter(tensors, drafter.config).encode()})

    def _check(self, name: str, region: Region, info: TensorInfo | None) -> None:
        assert self.chain is not None
        guard, where = self.engine.guard, self.chain.where
        if info is None:
            raise ReshardError(f"this {guard.engine} holds {name}, which the base of {where} does not have")
        dtype = str(region.tensor.dtype).removeprefix("torch.")
        if dtype != info.dtype.name and (info.dtype.name, dtype) not in EXACT:
            raise ReshardError(
                f"this {guard.engine} holds {name} as {dtype}, and the base of {where} has "
                f"{info.dtype.name}: start it with that dtype"
            )

    def digests(self) -> list[list[Any]]:
        """Return for each box that this rank holds its tensor's name, its rows and columns, and what it adds to
        the digest of all weights. Raises ReshardError where some of these are not kept."""
        assert self.chain is not None
        self.engine.check_kept()
        live, seeds = [], []
        for name, boxes in self.boxes.items():
            info = self.chain.base.tensors[name]
            for box in boxes:
                _check_exact(box, name, info)
                live.append(LiveBox(name, box.box, box.region, box.local, info.dtype))
                seeds.append(seed_of(name, info))
        self.sums = Sums(live, seeds)
        self.values = self.sums.take()
        return [
            [box.name, list(Rows.of(box.box)), value] for box, value in zip(live, self.values, strict=True)
        ]

    def begin(self, held: str, version: int, digest: str, pending_bytes: int) -> None:
        """Fetch and check all that is to be written from weights with digest `held` to a version, whose weights
        have this `digest`: checksums, and that each change lies in its box. All of it is kept on the engine's device
        if it takes at most `pending_bytes` there. That goes on in the background, while the engine serves; what led
        back is dropped."""
        self._lose("another version was begun")
        self.due, self.has_lost = (version, digest), False
        self.engine.guard.readers.append(WeakMethod(self._written_by_others))
        self._reading = in_background(partial(self._read, self.session, held, version, digest, pending_bytes))

    def is_prepared(self, waits: bool) -> bool:
        """Return True once what was begun is there, for which this `waits` if it is told to. Raises its error."""
        if self._reading is not None:
            if not (waits or self._reading.done()):
                return False
            reading, self._reading = self._reading, None
            self.prepared, self.coming = reading.result()
            if self.has_lost:
                self._lose(self.why)
        return True

    def _read(
        self, session: str, held: str, version: int, digest: str, pending_bytes: int
    ) -> tuple[list[DeltaFiles], PlacedDeltas]:
        """Return the files of the deltas between two versions, and their changes; on a thread, which reads nothing of
        the weights."""
        assert self.chain is not None
        prepared: list[DeltaFiles] = []
        with self._in_stream(), self.chain.unchanged():
            deltas = self._between(held, version, digest)
            coming = PlacedDeltas(deltas[0].follows, version, self.sums, self.values, pending_bytes)
            for delta in deltas:
                files = DeltaFiles(self.chain, delta, self.files)
                for stored in self._records(files):
                    if self.session != session:
                        raise ReshardError("another call of apply_deltas has begun on this engine")
                    with files.errors_of(stored):
                        payload = files.read(stored)
                    coming.add(partial(self._found, files, stored, payload))
                    if coming.why:  # checked all the same, where there is memory for it
                        self._decode(files, stored, payload, torch.device("cpu"))
                prepared.append(files)
        return prepared, coming

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        """Use a GPU inside in a stream that the engine does not wait for; at the end all of it is done."""
        device = self.engine.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()

    def _between(self, held: str, version: int, digest: str) -> list[Delta]:
        """Return the deltas that lead from weights with digest `held` to a version with this `digest`. Raises
        ReshardError where there are none: the chain is not the one that was read before."""
        assert self.chain is not None
        deltas = self.chain.deltas(version)
        starts = [number for number, delta in enumerate(deltas) if delta.before == held]
        if not starts or deltas[-1].after != digest:
            raise ReshardError(
                f"{self.chain.where} was replaced while it was read: version {version} has other weights now; "
                f"call apply_deltas again"
            )
        return deltas[starts[-1] :]  # the last, where weights come again

    def _records(self, files: DeltaFiles) -> Iterable[StoredRecord]:
        """Yield the records of which this rank holds elements."""
        for name, boxes in self.boxes.items():
            for stored in files.records.get(name, ()):
                if any(stored.record.rows.intersect(box.rows) for box in boxes):
                    yield stored

    def _decode(
        self, files: DeltaFiles, stored: StoredRecord, payload: np.ndarray, device: torch.device
    ) -> Decoded:
        """Return a record's changes on a device."""
        record, dtype = stored.record, _torch_dtype(files.tensors[stored.record.name])
        with files.errors_of(stored):
            return decode_record(record, dtype, torch.from_numpy(payload).to(device))

    def _found(self, files: DeltaFiles, stored: StoredRecord, payload: np.ndarray) -> list[Placed]:
        """Return where a record's changes go, and what they are."""
        return self._placed(stored.record, self._decode(files, stored, payload, self.engine.device))

    def write(self, version: int, digest: str) -> None:
        """Write what was prepared, and serve as this version, whose weights have this digest. Raises ReshardError,
        before the first byte, if others have written or moved the weights, or, where changes are read again, files of
        the chain are no longer those that were checked; if they change after that, the engine does not serve."""
        assert self.chain is not None
        guard = self.engine.guard
        try:
            self.engine.check_idle()
        except ReshardError as error:
            raise UntouchedError(str(error)) from error
        if self.due is None and not self.is_written:
            # As long as others read, this engine served, and may have been written into without a word.
            if not guard.ready or state_of(self.engine) != self.found or self.sums.take() != self.values:
                raise self._others_wrote()
            if guard.version != version:
                self._lose("it serves the same weights as another version")
            guard.origin = ""
            guard.refitted(version)  # a version that changes nothing
            self.is_written = True
            return
        if self.due != (version, digest) or self._reading is not None:
            raise ReshardError(f"version {version} of {self.chain.where} was not prepared: call apply_deltas")
        # An engine that served meanwhile may have been written into without a word.
        is_as_found = not self.has_lost and guard.ready and state_of(self.engine) == self.found
        if self.coming is None or not is_as_found or self.sums.take() != self.values:
            raise self._others_wrote()
        coming, self.coming, self.is_written, self.wrote = self.coming, None, True, True
        if not coming.why:
            self._rewrite(partial(_then, coming.write, version))
            self.back = coming, state_of(self.engine)
            guard.readers.append(WeakMethod(self._written_by_others))
        else:
            self.chain.check_unchanged()
            with self.chain.unchanged():
                self._rewrite(partial(_then, self._read_and_write, version))
            self.why = coming.why
        self.prepared, self.due = [], None

    def _others_wrote(self) -> ReshardError:
        """Drop what was prepared; return the error."""
        self._lose("others have written or moved its weights")
        return ReshardError(
            f"others have written or moved weights of this {self.engine.guard.engine} since they were compared: call "
            "apply_deltas again"
        )

    def _read_and_write(self) -> None:
        for files in self.prepared:
            for stored in self._records(files):
                with files.errors_of(stored):
                    payload = files.read(stored)
                for placed in self._found(files, stored, payload):
                    placed.write()

    def _rewrite(self, write: Callable[[], int]) -> int:
        """Write weights, and serve them as the version that `write` returns; return it."""
        self.engine.begin()
        with torch.no_grad():
            version = write()
        self.engine.update_derived()
        self.engine.drop_caches()
        if not wait_for_device(self.engine.device, self.engine.timeout):
            raise ReshardError("the GPU is not done with what it writes")
        self.engine.end(version)
        return version

    def _placed(self, record: Record, decoded: Decoded) -> list[Placed]:
        """Return where a record's changes go in each of the boxes that hold them."""
        assert self.chain is not None
        changed, dtype, found = record.rows, _torch_dtype(self.chain.base.tensors[record.name]), []
        width = max(1, changed.columns)
        rows = torch.div(decoded.positions, width, rounding_mode="floor")
        columns = decoded.positions - rows * width + changed.column
        rows += changed.start
        for box in self.boxes[record.name]:
            if not changed.intersect(box.rows):
                continue
            inside = (rows >= box.rows.start) & (rows < box.rows.stop)
            inside &= (columns >= box.rows.column) & (columns < box.rows.column + box.rows.columns)
            local_rows = rows[inside] - box.rows.start + box.local.start
            local_columns = columns[inside] - box.rows.column + box.local.column
            places = local_rows * box.region.pitch + local_columns + box.region.offset
            memory = _memory(box.region)
            values = decoded.values[inside].view(dtype).to(memory.dtype)  # an engine holds some wider
            found.append(Placed.of(memory, places, values))
        return found

    def check_roll_back(self, version: int | None) -> int:
        """Return the version to which `roll_back` leads. Raises ReshardError, with the engine as it is, where there is
        none, or it is another one than the `version` that is asked for."""
        guard = self.engine.guard
        self.engine.check_idle()
        if self.back is not None and state_of(self.engine) != self.back[1]:
            self._written_by_others()
        if self.back is None:
            raise ReshardError(
                f"this {guard.engine} keeps no version to go back to, since {self.why}: {TO_GO_BACK}"
            )
        guard.check_ready()
        before = self.back[0].before
        if version not in (None, before):
            raise ReshardError(
                f"this {guard.engine} goes back to version {before}, and not to version {version}: {TO_GO_BACK}"
            )
        return before

    def roll_back(self, version: int) -> None:
        """Serve again, as this version, what was there before the last deltas, bit for bit."""
        self.check_roll_back(version)
        assert self.back is not None
        [back, _], self.back = self.back, None
        served = self._rewrite(lambda: version if back.take_back() else back.after)
        if served != version:
            raise UntouchedError(
                f"others have written into weights of this {self.engine.guard.engine} in place, so it cannot go back "
                f"to version {version}, and serves what it did: {TO_GO_BACK}"
            )
        self.why = "it went back already"

    def _written_by_others(self) -> None:
        self._lose("others have written, moved or discarded weights since")
        self.has_lost = True

    def _lose(self, why: str) -> None:
        """Drop what leads to another version, and back."""
        self.coming, self.back, self.why = None, None, why

    def close(self) -> None:
        """Close the files of the chain, and forget it."""
        self.session = ""  # of which a thread that still reads takes notice
        if self._reading is not None:
            wait([self._reading])
        self.files.close()
        if self.chain is not None:
            self.chain.close()
        self.chain, self.prepared, self._reading, self.coming, self.due = None, [], None, None, None


def _check_plain(engine: Engine) -> None:
    """Raise ReshardError if an engine does not serve what deltas change."""
    if engine.scales or engine.staged_rounds:
        identity = next(iter({**engine.scales, **engine.staged_rounds}))
        raise ReshardError(
            f"this {engine.guard.engine} serves {identity[0]} rearranged or quantized, and deltas are of plain "
            "weights: write the version with reshard delta apply, and load that"
        )


def _then(write: Callable[[], None], version: int) -> int:
    write()
    return version


def _memory(region: Region) -> torch.Tensor:
    """View a region's tensor, from its first element to the end of its memory, as a vector."""
    tensor = region.tensor.detach()
    elements = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return torch.as_strided(tensor, (elements,), (1,), tensor.storage_offset())


def _check_exact(box: HeldBox, name: str, info: TensorInfo) -> None:
    """Raise ReshardError where the engine holds numbers that the chain's dtype does not have."""
    held, dtype = row_view(box.region, box.local), _torch_dtype(info)
    step = max(1, _CHUNK_ELEMENTS // max(1, box.rows.columns)) if held.dtype != dtype else len(held)
    for first in range(0, len(held) if held.dtype != dtype else 0, step):
        numbers = held[first : first + step]
        if not same_bits(numbers.to(dtype).to(held.dtype), numbers):
            raise ReshardError(
                f"the engine holds numbers of {name} that {info.dtype.name} does not have: load the base"
            )


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, info.dtype.name)
    return dtype
