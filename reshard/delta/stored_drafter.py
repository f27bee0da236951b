"""The drafter of a chain in files: its checkpoint, as the safetensors files of a directory have it, and a version of
it, written as such a directory."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.delta.chain import Chain, check_digest
from reshard.delta.files import DeltaFiles
from reshard.delta.records import RECORD_BYTES
from reshard.digests.numbers import bits_of, seed_of, start_of, sum_change, sum_rows, text_of, total_of
from reshard.formats import safetensors
from reshard.formats.small_files import MAX_COPIED_BYTES, read_file
from reshard.models.drafters import D2T, DRAFTER, T2D
from reshard.storage.io.casts import cast
from reshard.storage.io.files import OpenFiles, write_error
from reshard.storage.io.streams import TensorInfo
from reshard.storage.run.job import RunOptions
from reshard.storage.run.workdir import Workdir, fingerprint
from reshard.storage.sources.beside import beside
from reshard.storage.sources.versions import FileVersions
from reshard.storage.stores.place import is_store


class StoredDrafter:
    """The checkpoint of a drafter in a directory: `tensors` by published name. Raises ReshardError if its safetensors
    files are missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self.path, self.versions = directory, FileVersions(directory)
        stored = safetensors.read_directory(directory)
        self._stored, self.files = stored, OpenFiles()
        self.tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in stored.items()}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows `start` .. `stop` of a tensor, ``[rows, columns]``."""
        tensor, info = self._stored[name], self.tensors[name]
        rows = np.empty((stop - start, info.columns), info.dtype.numpy())
        offset = tensor.offset + start * info.columns * info.dtype.size
        self.files.read_into(self.path / tensor.file, offset, memoryview(rows.view(np.uint8)).cast("B"))
        return rows

    def digest(self, tensors: Mapping[str, TensorInfo], whose: str) -> str:
        """Return the digest of these tensors, by their canonical names, with their numbers in these dtypes. Raises
        ReshardError if it is another drafter than that, by name or shape, of `whose` they are."""
        self.check_has(tensors, whose)
        parts = []
        for name, info in tensors.items():
            seed = seed_of(name, info)
            parts.append(start_of(seed))
            parts += [sum_rows(seed, rows, start) for start, rows in self.slabs(name, info)]
        return text_of(total_of(parts))

    def check_has(self, tensors: Mapping[str, TensorInfo], whose: str) -> None:
        """Raise ReshardError unless these tensors of a drafter, of `whose` they are, are there in their shapes, whole
        numbers in their dtypes."""
        held = {DRAFTER + name: info for name, info in self.tensors.items()}
        lacking = [
            name.removeprefix(DRAFTER)
            for name, info in tensors.items()
            if name not in held
            or held[name].shape != info.shape
            or not (held[name].dtype == info.dtype or (held[name].dtype.floating and info.dtype.floating))
        ]
        if lacking:
            raise ReshardError(
                f"{self.path} is another drafter than {whose}: it has no {listed(lacking, 3)} of that shape"
            )

    def slabs(self, name: str, info: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a tensor by its canonical name, some rows at a time, each with the number of the first, in the dtype of
        this `info`."""
        published = name.removeprefix(DRAFTER)
        for start, stop in info.slabs(RECORD_BYTES):
            yield (
                start,
                cast(self.read_rows(published, start, stop), self.tensors[published].dtype, info.dtype),
            )

    def read_files(self) -> list[Path]:
        """Return the files with its tensors, and those that lie beside them."""
        weights = {self.path / tensor.file for tensor in self._stored.values()}
        return [*sorted(weights), *beside(self.path).files.values()]

    def unchanged(self) -> AbstractContextManager[None]:
        """Raise ReshardError at the end of the `with` block, naming them, where files were changed since this was
        made."""
        return self.versions.unchanged(self.read_files)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


class NextDrafter:
    """The drafter of `base` as it is after the deltas of a chain, whose changes are given. Raises ReshardError if the
    base is another drafter than the chain's."""

    def __init__(self, base: StoredDrafter, chain: Chain, changes: Sequence[DeltaFiles]) -> None:
        begun = chain.base.of_drafter()
        if begun is None:
            raise ReshardError(f"{chain.where} has no drafter: leave --drafter out")
        self.base, self.where, self.begun, self.changes = base, chain.where, begun, changes
        base.check_has(begun.tensors, f"the base of {chain.where}")
        others = sorted(n for n in base.tensors if n != T2D and DRAFTER + n not in begun.tensors)
        if others:
            raise ReshardError(
                f"{base.path} has {listed(others, 3)}, which the drafter of {chain.where} does not have, and which may "
                f"be older than its version: give a checkpoint of the drafter without it"
            )

    @contextmanager
    def written(
        self, destination: str | Path, reads: Sequence[Path], options: RunOptions
    ) -> Iterator[Callable[[], None]]:
        """Write the drafter's files in a hidden directory beside a destination, which the function that is yielded
        makes the destination. Raises ReshardError, before anything is written there, unless the base's tensors, and
        those after each delta, have the digests that the chain says, and where files that the model `reads` are in
        the destination."""
        if is_store(destination):
            raise ReshardError(f"{destination} is in an object store: give a directory for the drafter")
        base = self.base
        reads = [*base.read_files(), *reads]
        workdir = Workdir(base.path, reads, Path(destination), options.overwrite, resume=False)
        workdir.check_destination()
        is_there = False
        try:
            workdir.open(fingerprint(str(base.path), self.where, len(self.changes)), resume=False)
            with base.unchanged():
                self._write(workdir.tree / safetensors.SINGLE, options.sync)
                for name, path in beside(base.path).files.items():
                    workdir.write_file(name, read_file(path, MAX_COPIED_BYTES), options.sync)

            def publish() -> None:
                nonlocal is_there
                workdir.publish(options.sync)
                is_there = True

            yield publish
        finally:
            workdir.close(remove=not is_there)

    def _write(self, path: Path, sync: bool) -> None:
        tensors = dict(self.begun.tensors)
        if T2D in self.base.tensors:
            tensors[DRAFTER + T2D] = self.base.tensors[T2D]
        laid_out = {name.removeprefix(DRAFTER): (info.dtype, info.shape) for name, info in tensors.items()}
        planned = safetensors.plan_file(laid_out, path.name)
        path.touch()
        sums, shifts = [0] * (len(self.changes) + 1), []
        with OpenFiles.of_destination(write=True) as files:
            files.write(path, 0, planned.head)
            for name, info in self.begun.tensors.items():
                published = name.removeprefix(DRAFTER)
                offset = planned.tensors[published].offset
                sums[0] += start_of(seed_of(name, info))
                for rows in self._next_rows(name, info, sums):
                    data = rows.tobytes()
                    files.write(path, offset, data)
                    offset += len(data)
                    if published == D2T:
                        shifts.append(rows.copy())
            self._check(sums)
            if T2D in self.base.tensors:
                files.write(path, planned.tensors[T2D].offset, self._tokens(shifts).tobytes())
            if sync:
                files.sync(path)
            for failed, error in files.close().items():  # what a file server says only now
                raise write_error(failed, error)

    def _next_rows(self, name: str, info: TensorInfo, sums: list[int]) -> Iterator[np.ndarray]:
        """Yield rows of a tensor as they are after all deltas; add what they add to the digest of the base to the first
        of `sums`, and what each delta adds to that to its own."""
        seed = seed_of(name, info)
        for start, read in self.base.slabs(name, info):
            rows = np.array(read)
            sums[0] += sum_rows(seed, rows, start)
            bits = bits_of(rows)
            for number, files in enumerate(self.changes, 1):
                for change in files.changes(name, start, start + len(rows)):
                    at = change.rows - start, change.columns
                    sums[number] += sum_change(seed, bits[at], change.values, change.rows, change.columns)
                    bits[at] = change.values
            yield rows

    def _check(self, sums: Sequence[int]) -> None:
        check_digest(self.begun, text_of(total_of(sums[:1])), str(self.base.path), self.where)
        for number, files in enumerate(self.changes, 1):
            if text_of(total_of(sums[: number + 1])) != files.delta.drafter:
                raise ReshardError(
                    f"{self.where}: version {files.delta.version} does not give the drafter that it says: begin a new "
                    f"chain"
                )

    def _tokens(self, shifts: Sequence[np.ndarray]) -> np.ndarray:
        """Return which of the model's tokens the drafter has: what the base says, or, where the chain changes d2t, what
        follows from that."""
        info = self.base.tensors[T2D]
        of_drafter = np.concatenate(shifts).reshape(-1) if shifts else np.empty(0)
        if not shifts or np.array_equal(of_drafter, self.base.read_rows(D2T, 0, len(of_drafter)).reshape(-1)):
            return self.base.read_rows(T2D, 0, info.rows)
        tokens = of_drafter + np.arange(len(of_drafter))
        if tokens.min() < 0 or tokens.max() >= info.rows:
            raise ReshardError(
                f"{self.where} gives the drafter a token that {T2D} of {self.base.path} does not have"
            )
        has = np.zeros(info.shape, info.dtype.numpy())
        has[tokens] = 1
        return has


@contextmanager
def written_beside(
    drafter: tuple[str | Path, str | Path],
    model: str | Path,
    chain: Chain,
    changes: Sequence[DeltaFiles],
    reads: Sequence[Path],
    options: RunOptions,
) -> Iterator[Callable[[], None]]:
    """Do what `NextDrafter.written` does of a `drafter`, given as the directory of its base and its destination, beside
    that of the `model`, which `reads` files; a dry run writes nothing."""
    base, destination = drafter
    places = [os.path.realpath(place) for place in (model, destination) if not is_store(place)]
    if len(places) == 2 and os.path.commonpath(places) in places:
        raise ReshardError(
            f"{model} and {destination} overlap: give the drafter a directory beside the model's"
        )
    if not os.path.isdir(base):
        raise ReshardError(f"{base} is not a directory with a drafter's checkpoint")
    with closing(StoredDrafter(Path(base))) as stored:
        following = NextDrafter(stored, chain, changes)
        for path in stored.read_files() if not is_store(model) else ():
            if Path(os.path.realpath(path)).is_relative_to(places[0]):
                raise ReshardError(
                    f"{path} is in {model}, which this run would replace: move it away, and read it from there"
                )
        if options.dry_run:
            yield lambda: None
            return
        with following.written(destination, reads, options) as publish:
            yield publish
