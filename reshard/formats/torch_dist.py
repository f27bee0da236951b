"""Megatron's ``torch_dist`` checkpoints: ``.metadata``, ``.distcp`` files, ``common.pt`` and the tracker file.

A checkpoint holds *keys*; each key is one global tensor, stored as *chunks*, each in a container of its own somewhere in a
``.distcp`` file. ``.metadata`` says which chunk is where.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.dtypes import DTYPES, Dtype, unknown_dtype
from reshard.errors import ReshardError, listed
from reshard.formats import pickles, torch_zip
from reshard.formats.pickles import METADATA, Name, call

TRACKER = "latest_checkpointed_iteration.txt"
COMMON_KEY = "common_state/shard_0_1"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a container lies: a file of the iteration's directory, its offset and length in bytes."""

    file: str
    offset: int
    length: int


@dataclass(slots=True)
class Key:
    """One global tensor of a checkpoint: dtype, shape, and its chunks as (offsets, sizes) to where they are stored."""

    dtype: Dtype
    shape: tuple[int, ...]
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], Stored] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """The tensors and objects that an iteration's ``.metadata`` lists. `directory` is the iteration's own directory."""

    directory: Path
    iteration: str
    keys: dict[str, Key]
    objects: dict[str, Stored]

    def reader(self, stored: Stored) -> Callable[[int, int], bytes]:
        """A function that reads (offset, length) within a stored container."""
        path = self.directory / stored.file

        def read(offset: int, length: int) -> bytes:
            with open(path, "rb") as file:
                return os.pread(file.fileno(), length, stored.offset + offset)

        return read

    def tensor_at(self, stored: Stored) -> torch_zip.StoredTensor:
        """Where a chunk's bytes lie; the offset counts from the start of its file."""
        where = f"{self.directory / stored.file} at byte {stored.offset}"
        tensor = torch_zip.stored_tensor(self.reader(stored), stored.length, where)
        return torch_zip.StoredTensor(tensor.dtype, tensor.shape, stored.offset + tensor.offset)

    def common(self) -> dict[str, Any]:
        """The common state: ``args``, ``iteration`` and the like, as plain data; ``args`` as a dict of its attributes."""
        path = self.directory / "common.pt"
        if path.is_file():
            data = path.read_bytes()
            value = torch_zip.stored_object(lambda offset, length: data[offset : offset + length], len(data), str(path))
        elif COMMON_KEY in self.objects:
            stored = self.objects[COMMON_KEY]
            value = torch_zip.stored_object(self.reader(stored), stored.length, f"{self.directory / stored.file} ({COMMON_KEY})")
            value = value[0] if isinstance(value, list) and value else value
        else:
            return {}
        if not isinstance(value, dict):
            raise ReshardError(f"{path} holds {type(value).__name__}, not a dict")
        args = value.get("args")
        return dict(value) | {"args": args.fields if isinstance(args, pickles.Call) else dict(args or {})}


def find(path: Path) -> tuple[Path, str] | None:
    """The iteration directory of a Megatron checkpoint and its name, or None where `path` is none.

    `path` is what ``--load`` takes (the tracker file decides) or an iteration's directory itself.
    """
    if (path / ".metadata").is_file():
        return path, path.name
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdigit():
        raise ReshardError(f"{tracker} holds {text[:40]!r}; it must be a number or 'release'")
    name = text if text == "release" else f"iter_{int(text):07d}"
    if not (path / name / ".metadata").is_file():
        raise ReshardError(f"{tracker} names {name}, but {path / name} has no .metadata: it is no torch_dist checkpoint or is not complete")
    return path / name, name


def read(directory: Path, iteration: str = "") -> Checkpoint:
    """Read an iteration's ``.metadata``. Raises ReshardError where it is damaged, refused or not of this format."""
    where = directory / ".metadata"
    config = directory / "metadata.json"
    if config.is_file():
        try:
            backend = json.loads(config.read_text()).get("sharded_backend")
        except (ValueError, AttributeError) as error:
            raise ReshardError(f"{config} is not readable JSON: {error}") from error
        if backend != "torch_dist":
            raise ReshardError(f"{config} says the format is {backend!r}; only 'torch_dist' is supported")
    try:
        data = where.read_bytes()
    except OSError as error:
        raise ReshardError(f"cannot read {where}: {error.strerror}") from error
    metadata = pickles.load(data, str(where))
    try:
        return _checkpoint(metadata, directory, iteration or directory.name)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ReshardError(f"{where} does not have the structure of a torch_dist checkpoint ({error!r})") from error


def _checkpoint(metadata: Any, directory: Path, iteration: str) -> Checkpoint:
    keys: dict[str, Key] = {}
    objects: dict[str, Stored] = {}
    stored = {}
    for index, info in metadata.fields["storage_data"].items():
        fields = info.fields
        offset = index.fields.get("offset")
        if fields.get("transform_descriptors"):
            raise ReshardError(
                f"{directory}: {index.fields['fqn']} is stored with transforms {fields['transform_descriptors']}, which are not supported"
            )
        relative = Path(fields["relative_path"])
        if relative.is_absolute() or ".." in relative.parts:
            raise ReshardError(f"{directory}/.metadata names the file {relative}, which is outside of the checkpoint")
        place = Stored(str(relative), int(fields["offset"]), int(fields["length"]))
        stored[index.fields["fqn"], None if offset is None else tuple(offset)] = place
    for key, entry in metadata.fields["state_dict_metadata"].items():
        if entry.name == "BytesStorageMetadata":
            objects[key] = stored[key, None]
            continue
        name = entry.fields["properties"].state[0].name
        chunks = {(tuple(c.fields["offsets"]), tuple(c.fields["sizes"])): None for c in entry.fields["chunks"]}
        keys[key] = Key(DTYPES.get(name) or unknown_dtype(name), tuple(entry.fields["size"]), {c: stored[key, c[0]] for c in chunks})
    sizes: dict[str, int] = {}
    missing = []
    for place in stored.values():
        if place.file not in sizes:
            path = directory / place.file
            sizes[place.file] = path.stat().st_size if path.is_file() else -1
            if sizes[place.file] < 0:
                missing.append(place.file)
        if 0 <= sizes[place.file] < place.offset + place.length:
            raise ReshardError(
                f"{directory / place.file} is truncated: it has {sizes[place.file]} bytes, .metadata needs {place.offset + place.length}"
            )
    if missing:
        raise ReshardError(f"{directory} lacks the files {listed(sorted(missing))} that its .metadata names")
    return Checkpoint(directory, iteration, keys, objects)


def metadata_bytes(keys: dict[str, Key], objects: dict[str, Stored], checkpoint_id: str) -> bytes:
    """The ``.metadata`` of a checkpoint with these keys and objects."""
    layout = call("torch.serialization", "_get_layout", "torch.strided")
    memory_format = call(METADATA, "_MEM_FORMAT_ENCODING", 0)
    size = lambda shape: call("torch", "Size", tuple(shape))  # noqa: E731
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}

    def place(key: str, offset: Any, at: Stored) -> None:
        index = call(METADATA, "MetadataIndex", state={"fqn": key, "offset": offset, "index": None})
        storage[index] = call("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                              state={"relative_path": at.file, "offset": at.offset, "length": at.length})  # fmt: skip

    for key, entry in keys.items():
        properties = call(METADATA, "TensorProperties", state=(Name("torch", entry.dtype.name), layout, False, memory_format, False))
        chunks = [call(METADATA, "ChunkStorageMetadata", state={"offsets": size(o), "sizes": size(s)}) for o, s in entry.chunks]
        state[key] = call(METADATA, "TensorStorageMetadata", state={"properties": properties, "size": size(entry.shape), "chunks": chunks})
        for (offsets, _), at in entry.chunks.items():
            place(key, size(offsets), at)
    for key, at in objects.items():
        state[key] = call(METADATA, "BytesStorageMetadata", state={})
        place(key, None, at)
    meta = call(METADATA, "StorageMeta", state={"checkpoint_id": checkpoint_id, "save_id": None, "load_id": None, "modules": []})
    fields = {"state_dict_metadata": state, "planner_data": None, "storage_data": storage, "storage_meta": meta, "version": "1.0.0"}
    return pickles.dump(call(METADATA, "Metadata", state=fields))


def common_bytes(args: dict[str, Any], iteration: int, content_metadata: dict[str, Any]) -> bytes:
    """``common.pt``, with `args` as the ``argparse.Namespace`` that Megatron-LM expects."""
    plain = {key: value if value is None or isinstance(value, (bool, int, float, str, list, tuple, Name, pickles.Call)) else str(value)
             for key, value in args.items()}  # fmt: skip
    return torch_zip.object_bytes({
        "args": call("argparse", "Namespace", state=plain), "iteration": iteration, "checkpoint_version": 3.0,
        "content_metadata": content_metadata,
    })  # fmt: skip
