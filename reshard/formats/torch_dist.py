"""Megatron's ``torch_dist`` checkpoints: ``.metadata``, ``.distcp`` files, ``common.pt`` and the
tracker file.

A checkpoint holds *keys*; each key is one global tensor, stored as *chunks*, each in a container of
its own somewhere in a ``.distcp`` file. ``.metadata`` says which chunk is where.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.core.dtypes import DTYPES, Dtype, unknown_dtype
from reshard.core.errors import ReshardError, listed
from reshard.formats import pickles, torch_zip
from reshard.formats.pickles import METADATA, Name, call
from reshard.formats.ranges import ranged
from reshard.formats.small_files import (
    MAX_METADATA_BYTES,
    MAX_TRACKER_BYTES,
    a_name,
    read_at,
    read_file,
    read_json,
    whole_numbers,
)

TRACKER = "latest_checkpointed_iteration.txt"
COMMON_KEY = "common_state/shard_0_1"


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a container: a file of the iteration's directory, its offset and length in
    bytes."""

    file: str
    offset: int
    length: int


@dataclass(slots=True)
class Key:
    """One global tensor of a checkpoint: dtype, shape, and its chunks as (offsets, sizes) to where
    they are stored."""

    dtype: Dtype
    shape: tuple[int, ...]
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], Stored] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """The tensors and objects that an iteration's ``.metadata`` lists. `directory` is the
    iteration's own directory."""

    directory: Path
    iteration: str
    keys: dict[str, Key]
    objects: dict[str, Stored]

    def reader(self, stored: Stored) -> Callable[[int, int], bytes]:
        """Return a function that reads (offset, length) within a stored container."""
        return _reader(self.directory / stored.file, stored.offset)

    def tensor_at(self, stored: Stored) -> torch_zip.ContainedTensor:
        """Return where a chunk's bytes lie; the offset counts from the start of its file."""
        where = f"{self.directory / stored.file} at byte {stored.offset}"
        tensor = torch_zip.stored_tensor(self.reader(stored), stored.length, where)
        return torch_zip.ContainedTensor(tensor.dtype, tensor.shape, stored.offset + tensor.offset)

    def common(self) -> dict[str, Any]:
        """Return the common state: ``args``, ``iteration`` and the like, as plain data; ``args`` as
        a dict of its attributes."""
        container = self._common_container()
        if container is None:
            return {}
        where = container[2]
        value = torch_zip.stored_object(*container)
        if isinstance(value, list) and value and not (self.directory / "common.pt").is_file():
            value = value[0]  # what DCP stores of one rank
        if not isinstance(value, dict):
            raise ReshardError(f"{where} holds {type(value).__name__}, not a dict")
        args = value.get("args")
        if not isinstance(args, (pickles.Call, dict, type(None))):
            raise ReshardError(f"{where} has args of type {type(args).__name__}, not a namespace")
        return dict(value) | {"args": args.fields if isinstance(args, pickles.Call) else dict(args or {})}

    def common_storages(self) -> dict[str, bytes]:
        """Return the bytes of the tensors in the common state, by the names of their storages."""
        container = self._common_container()
        return {} if container is None else torch_zip.stored_storages(*container)

    def _common_container(self) -> tuple[Callable[[int, int], bytes], int, str] | None:
        """Return how to read the container of the common state, its length and its place; None without one."""
        path = self.directory / "common.pt"
        if path.is_file():
            return _reader(path, 0), path.stat().st_size, str(path)
        if COMMON_KEY not in self.objects:
            return None
        stored = self.objects[COMMON_KEY]
        return self.reader(stored), stored.length, f"{self.directory / stored.file} ({COMMON_KEY})"


def _reader(path: Path, start: int) -> Callable[[int, int], bytes]:
    """Return a function that reads (offset, length) of a file from byte `start` on."""

    def read(offset: int, length: int) -> bytes:
        in_store = ranged(path)
        if in_store is not None:
            return in_store.read(start + offset, length)
        try:
            with open(path, "rb") as file:
                return read_at(file.fileno(), length, start + offset)
        except OSError as error:
            raise ReshardError(f"cannot read {path}: {error.strerror}") from error

    return read


def find(path: Path) -> tuple[Path, str] | None:
    """Return the iteration directory of a Megatron checkpoint and its name, or None if `path` is
    none.

    `path` is what ``--load`` takes (the tracker file decides) or an iteration's directory itself.
    """
    if (path / ".metadata").is_file():
        return path, path.name
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    name = tracked(tracker)
    if not (path / name / ".metadata").is_file():
        raise ReshardError(
            f"{tracker} names {name}, but {path / name} has no .metadata: it is no "
            f"torch_dist checkpoint or is not complete"
        )
    return path / name, name


def tracked(tracker: Path) -> str:
    """Return the directory that a tracker file names. Raises ReshardError if it holds something
    else."""
    text = read_file(tracker, MAX_TRACKER_BYTES).decode(errors="replace").strip()
    if text != "release" and not re.fullmatch("[0-9]{1,18}", text):
        raise ReshardError(f"{tracker} holds {text[:40]!r}; it must be a number or 'release'")
    return text if text == "release" else f"iter_{int(text):07d}"


def read(directory: Path, iteration: str = "") -> Checkpoint:
    """Read an iteration's ``.metadata``. Raises ReshardError if it is damaged, refused or not of
    this format."""
    where = directory / ".metadata"
    config = directory / "metadata.json"
    if config.exists():
        backend = read_json(config, "readable JSON").get("sharded_backend")
        if backend != "torch_dist":
            raise ReshardError(
                f"{config} says the format is {str(backend)[:40]!r}; only 'torch_dist' is supported"
            )
    metadata = pickles.load(read_file(where, MAX_METADATA_BYTES), str(where))
    try:
        return _checkpoint(metadata, directory, iteration or directory.name)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise ReshardError(
            f"{where} does not have the structure of a torch_dist checkpoint ({what})"
        ) from error


def _checkpoint(metadata: Any, directory: Path, iteration: str) -> Checkpoint:
    keys: dict[str, Key] = {}
    objects: dict[str, Stored] = {}
    stored = {}
    relatives: set[str] = set()
    for index, info in metadata.fields["storage_data"].items():
        fields, name, offset = info.fields, index.fields["fqn"], index.fields.get("offset")
        relative, start, length = fields["relative_path"], fields["offset"], fields["length"]
        if not a_name(name) or not a_name(relative) or not whole_numbers((start, length)):
            raise ValueError(
                f"an entry {ascii(name) if type(name) is str else '':.100} whose name, file, offset or "
                f"length is no such thing"
            )
        if not (offset is None or whole_numbers(offset)):
            raise ValueError(f"an entry {name} at an offset that is none")
        if fields.get("transform_descriptors"):
            raise ReshardError(f"{directory}: {name} is stored with transforms, which are not supported")
        relatives.add(relative)
        stored[name, None if offset is None else tuple(offset)] = Stored(relative, start, length)
    for relative in relatives:
        if os.path.isabs(relative) or ".." in Path(relative).parts:
            raise ReshardError(
                f"{directory}/.metadata names the file {relative}, which is outside of the checkpoint"
            )
    for key, entry in metadata.fields["state_dict_metadata"].items():
        if not a_name(key):
            raise ValueError("a key that is not a name")
        if entry.name == "BytesStorageMetadata":
            objects[key] = stored[key, None]
            continue
        dtype, shape = entry.fields["properties"].state[0].name, entry.fields["size"]
        if type(dtype) is not str or not whole_numbers(shape):
            raise ValueError(f"the key {key} with a dtype or shape that is none")
        keys[key] = Key(
            DTYPES.get(dtype) or unknown_dtype(dtype),
            tuple(shape),
            _chunks(key, tuple(shape), entry.fields["chunks"], stored),
        )
    sizes: dict[str, int] = {}
    missing = []
    for place in stored.values():
        if place.file not in sizes:
            path = directory / place.file
            sizes[place.file] = path.stat().st_size if os.path.isfile(path) else -1
            if sizes[place.file] < 0:
                missing.append(place.file)
        if 0 <= sizes[place.file] < place.offset + place.length:
            raise ReshardError(
                f"{directory / place.file} is truncated: it has {sizes[place.file]} bytes, .metadata needs "
                f"{place.offset + place.length}"
            )
    if missing:
        raise ReshardError(f"{directory} lacks the files {listed(sorted(missing))} that its .metadata names")
    _check_apart(keys, directory)
    return Checkpoint(directory, iteration, keys, objects)


def _chunks(key: str, shape: tuple[int, ...], chunks: Any, stored: dict) -> dict:
    """Return the chunks of a key by (offsets, sizes). Raises ReshardError for one that leaves the
    key's shape or is stored nowhere."""
    places = {}
    for chunk in chunks:
        offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
        if not (whole_numbers(offsets) and whole_numbers(sizes) and len(offsets) == len(sizes) == len(shape)):
            raise ValueError(
                f"a chunk of {key} whose offsets or sizes are none of a tensor of {len(shape)} dims"
            )
        offsets, sizes = tuple(offsets), tuple(sizes)
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {key} at {offsets} of {sizes}, outside of its shape {shape}")
        place = stored.get((key, offsets))
        if place is None:
            raise ValueError(f"a chunk of {key} at {offsets} that is stored nowhere")
        places[offsets, sizes] = place
    return places


def _check_apart(keys: dict[str, Key], directory: Path) -> None:
    """Raise ReshardError if two chunks of tensors share bytes of a file."""
    places: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for key, entry in keys.items():
        for at in entry.chunks.values():
            places[at.file].append((at.offset, at.length, key))
    for file, taken in places.items():
        taken.sort()
        end, before = 0, ""
        for offset, length, key in taken:
            if offset < end and length:
                raise ReshardError(
                    f"{directory}/.metadata has chunks of {before} and {key} at the same bytes of {file}"
                )
            end, before = offset + length, key


def metadata_bytes(keys: dict[str, Key], objects: dict[str, Stored], checkpoint_id: str) -> bytes:
    """Return the ``.metadata`` of a checkpoint with these keys and objects."""
    layout = call("torch.serialization", "_get_layout", "torch.strided")
    memory_format = call(METADATA, "_MEM_FORMAT_ENCODING", 0)
    size = lambda shape: call("torch", "Size", tuple(shape))  # noqa: E731
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}

    def place(key: str, offset: Any, at: Stored) -> None:
        index = call(METADATA, "MetadataIndex", state={"fqn": key, "offset": offset, "index": None})
        storage[index] = call(
            "torch.distributed.checkpoint.filesystem",
            "_StorageInfo",
            state={"relative_path": at.file, "offset": at.offset, "length": at.length},
        )

    for key, entry in keys.items():
        properties = call(
            METADATA,
            "TensorProperties",
            state=(Name("torch", entry.dtype.name), layout, False, memory_format, False),
        )
        chunks = [
            call(METADATA, "ChunkStorageMetadata", state={"offsets": size(o), "sizes": size(s)})
            for o, s in entry.chunks
        ]
        state[key] = call(
            METADATA,
            "TensorStorageMetadata",
            state={"properties": properties, "size": size(entry.shape), "chunks": chunks},
        )
        for (offsets, _), at in entry.chunks.items():
            place(key, size(offsets), at)
    for key, at in objects.items():
        state[key] = call(METADATA, "BytesStorageMetadata", state={})
        place(key, None, at)
    meta = call(
        METADATA,
        "StorageMeta",
        state={"checkpoint_id": checkpoint_id, "save_id": None, "load_id": None, "modules": []},
    )
    fields = {
        "state_dict_metadata": state,
        "planner_data": None,
        "storage_data": storage,
        "storage_meta": meta,
        "version": "1.0.0",
    }
    return pickles.dump(call(METADATA, "Metadata", state=fields))


def common_bytes(
    args: dict[str, Any],
    iteration: int,
    content_metadata: dict[str, Any],
    others: dict[str, Any] | None = None,
    storages: dict[str, bytes] | None = None,
) -> bytes:
    """Return ``common.pt``, with `args` as the ``argparse.Namespace`` that Megatron-LM expects.

    `others` are further entries, as `pickles.writable` gives them, whose tensors have their bytes in `storages`.
    """
    kept = (bool, int, float, str, bytes, list, tuple, dict, Name, pickles.Call, type(None))
    plain = {key: value if isinstance(value, kept) else str(value) for key, value in args.items()}
    return torch_zip.object_bytes((others or {}) | {
        "args": call("argparse", "Namespace", state=plain), "iteration": iteration, "checkpoint_version": 3.0,
        "content_metadata": content_metadata,
    }, storages)  # fmt: skip
