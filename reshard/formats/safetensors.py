"""Hugging Face directories: safetensors files, their index, and the plan of new ones.

A safetensors file is eight bytes of header length, a JSON header, then the tensors' bytes. Every
number in the header is checked against the file before it is used.
"""

import io
import json
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from reshard.core.dtypes import BY_SAFETENSORS, Dtype
from reshard.core.errors import ReshardError, listed
from reshard.formats.ranges import ranged
from reshard.formats.small_files import MAX_INDEX_BYTES, a_name, read_json, whole_numbers

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# the format allows twice as much; ten times the largest model's, and parsed it takes 1 GB
MAX_HEADER_BYTES = 50_000_000
FIRST_BYTES = 256 << 10
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: `offset` and `size_bytes` in bytes from the start of `file`."""

    file: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """Length of its bytes."""
        return prod(self.shape) * self.dtype.size


def spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the first byte and the end of each of these tensors of one file, in order."""
    return sorted((tensor.offset, tensor.offset + tensor.size_bytes) for tensor in tensors)


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file. Raises ReshardError for a truncated file, a header that is
    too long or does not add up."""
    text, size = _header_text(path)
    try:
        header = json.loads(text.decode(), object_pairs_hook=lambda pairs: _no_duplicates(pairs, path))
    except (ValueError, RecursionError) as error:
        raise ReshardError(f"{path} has a header that is not JSON: it is corrupt") from error
    if not isinstance(header, dict):
        raise ReshardError(f"{path} has a header that is not a JSON object")
    first = 8 + len(text)
    tensors = {
        name: _tensor(path, name, entry, first, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_contiguous(path, tensors, first, size)
    return tensors


def _header_text(path: Path) -> tuple[bytes, int]:
    """Return the text of a file's header, and the size of the file."""
    if not os.path.isfile(path):
        raise ReshardError(f"{path} is not a file that can be read")
    in_store = ranged(path)
    try:
        size = path.stat().st_size if in_store is None else in_store.size_bytes
        # The beginning in one call, which is the whole header of most files.
        begun = None if in_store is None else io.BytesIO(in_store.read(0, FIRST_BYTES))
        with open(path, "rb") if begun is None else begun as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ReshardError(
                    f"{path} is truncated: it has {size} bytes, fewer than a safetensors header"
                )
            (length,) = struct.unpack("<Q", prefix)
            if prefix + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise ReshardError(
                    f"{path} is a Git LFS pointer, not the weights: run git lfs pull in {path.parent}"
                )
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ReshardError(
                    f"{path} has a header of {length} bytes in a file of {size}: it is "
                    f"truncated or no safetensors file"
                )
            file.seek(8)
            text = file.read(length)
            if in_store is not None and len(text) < length:
                text += in_store.read(8 + len(text), length - len(text))
    except OSError as error:
        raise ReshardError(f"cannot read {path}: {error.strerror}") from error
    if len(text) < length:
        raise ReshardError(f"{path} was truncated while it was read")
    return text, size


def _tensor(path: Path, name: str, entry: object, first: int, size: int) -> Tensor:
    """Return the tensor of a header's entry; `first` is the byte after the header, `size` that of
    the file."""
    if not a_name(name):
        raise ReshardError(
            f"{path}: the header has the name {_short(name)} of {len(name):,} characters: the file is corrupt"
        )
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(field, ()) for field in ("dtype", "shape", "data_offsets"))
    sound = isinstance(dtype, str) and whole_numbers(shape) and whole_numbers(offsets) and len(offsets) == 2
    if not sound or max(offsets) > size - first:
        raise ReshardError(
            f"{path}: the header's entry for {name} is malformed or points outside of the file ({size} bytes)"
        )
    start, end = offsets
    if dtype not in BY_SAFETENSORS:
        raise ReshardError(f"{path}: {name} has dtype {dtype:.40}, which is not supported")
    tensor = Tensor(path.name, BY_SAFETENSORS[dtype], tuple(shape), first + start)
    if tensor.size_bytes != end - start:
        raise ReshardError(
            f"{path}: {name} has {end - start} bytes, but {dtype} {shape} needs {tensor.size_bytes}"
        )
    return tensor


def _check_contiguous(path: Path, tensors: dict[str, Tensor], first: int, size: int) -> None:
    """Raise ReshardError unless the tensors' bytes follow one another from byte `first` to the end
    of the file."""
    position = first
    for start, end, name in sorted((t.offset, t.offset + t.size_bytes, name) for name, t in tensors.items()):
        if start != position:
            raise ReshardError(
                f"{path}: the bytes of {name} overlap others or leave a gap: the file is corrupt"
            )
        position = end
    if position != size:
        raise ReshardError(
            f"{path} has {size} bytes, but its header accounts for {position}: it is truncated or corrupt"
        )


def _no_duplicates(pairs: list, path: Path) -> dict:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = [name for name, _ in pairs if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        raise ReshardError(f"{path}: the header has {listed(map(_short, sorted(set(twice))))} twice")
    return entries


def _short(name: str) -> str:
    """Return a name as it is, or the beginning of one that is not printable."""
    return name if a_name(name) else ascii(name[:60])


def read_directory(path: Path, notices: list[str] | None = None) -> dict[str, Tensor]:
    """Return all tensors of a Hugging Face directory, by name: those of all files that its index names, of
    model.safetensors, or of all files, as vLLM reads them where there is neither. Raises ReshardError if a
    file is missing or damaged, or a tensor is in two.

    If the index disagrees with its files, these count, as for transformers and vLLM; `notices` gets a sentence on it.
    """
    index = path / INDEX
    if not index.exists():
        files = sorted(p.name for p in path.glob("*.safetensors"))
        if not files:
            others = sorted(p.name for p in (*path.glob("*.bin"), *path.glob("*.pth"), *path.glob("*.gguf")))
            hint = (
                f", only {listed(others, 3)}: save it with save_pretrained(safe_serialization=True) first"
                if others
                else ""
            )
            raise ReshardError(f"{path} has no safetensors files{hint}")
        return _read_files(path, files if SINGLE not in files else [SINGLE])
    weight_map = read_json(index, "a readable index", MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ReshardError(
            f"{index} is not a readable index: it has no weight_map of tensor names to file names"
        )
    strange = [name for name in (*weight_map, *weight_map.values()) if not a_name(name)]
    if strange:
        raise ReshardError(f"{index} is not a readable index: {_short(strange[0])} is not a name")
    files = sorted(set(weight_map.values()))
    unsafe = [name for name in files if os.path.basename(name) != name]
    if unsafe:
        raise ReshardError(f"{index} names {listed(unsafe, 3)}, which are not files of {path}")
    if SINGLE not in files and (path / SINGLE).exists():
        raise ReshardError(
            f"{path} has {SINGLE} beside {INDEX}, which names other files ({listed(files, 2)}): "
            "transformers reads the one, vLLM the others; move away what is not this model's"
        )
    missing = [name for name in files if not os.path.isfile(path / name)]
    if missing:
        raise ReshardError(f"{path} lacks the shard files {listed(missing)} that its index names")
    tensors = _read_files(path, files)
    wrong = {name for name, tensor in tensors.items() if weight_map.get(name) != tensor.file}
    wrong |= weight_map.keys() - tensors.keys()
    if wrong and notices is not None:
        notices.append(
            f"{INDEX} says of {listed(sorted(wrong), 3)} something else than the files, which are read"
        )
    return tensors


def _read_files(path: Path, files: list[str]) -> dict[str, Tensor]:
    """Return the tensors of these files. Raises ReshardError for one that is in two of them."""
    tensors: dict[str, Tensor] = {}
    for name in files:
        for tensor, entry in read_header(path / name).items():
            if tensor in tensors:
                raise ReshardError(f"{path}: {tensor} is in {tensors[tensor].file} and again in {name}")
            tensors[tensor] = entry
    return tensors


@dataclass(frozen=True)
class NewFile:
    """A file to be written: `head` are its first bytes, `tensors` says where the others go."""

    name: str
    head: bytes
    tensors: dict[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.head) + sum(t.size_bytes for t in self.tensors.values())


def plan_file(
    tensors: dict[str, tuple[Dtype, tuple[int, ...]]], name: str, metadata: dict[str, str] | None = None
) -> NewFile:
    """Lay all tensors out in one file of this name, with further `metadata` in its header."""
    [file] = plan_files(tensors, sys.maxsize, metadata)
    return replace(file, name=name, tensors={n: replace(t, file=name) for n, t in file.tensors.items()})


def plan_files(
    tensors: dict[str, tuple[Dtype, tuple[int, ...]]],
    max_shard_bytes: int,
    metadata: dict[str, str] | None = None,
) -> list[NewFile]:
    """Lay tensors out in files of at most `max_shard_bytes` (a larger tensor gets one of its own),
    in the order given."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in tensors.items():
        n = prod(shape) * dtype.size
        if groups[-1] and size + n > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n
    files = []
    for number, group in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Larger element types first, as the safetensors library does, so that every tensor is
        # aligned to its own.
        group = sorted(group, key=lambda name: -tensors[name][0].size)
        header: dict = {"__metadata__": {"format": "pt"} | (metadata or {})}
        position = 0
        for name in group:
            dtype, shape = tensors[name]
            n = prod(shape) * dtype.size
            header[name] = {
                "dtype": dtype.safetensors,
                "shape": list(shape),
                "data_offsets": [position, position + n],
            }
            position += n
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        placed = {n: Tensor(file, *tensors[n], 8 + len(text) + header[n]["data_offsets"][0]) for n in group}
        files.append(NewFile(file, struct.pack("<Q", len(text)) + text, placed))
    return files


def index_json(files: list[NewFile]) -> str | None:
    """Return the text of ``model.safetensors.index.json``, or None if one file holds everything."""
    if len(files) == 1:
        return None
    weight_map = {name: file.name for file in files for name in file.tensors}
    total = sum(t.size_bytes for file in files for t in file.tensors.values())
    return (
        json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2
        )
        + "\n"
    )
