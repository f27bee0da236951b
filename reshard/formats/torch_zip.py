"""The container of ``torch.save``: a zip of stored records, of which ``data.pkl`` describes the
tensor and ``data/0`` is its bytes.

A header is made without the data, since its length depends on dtype and shape only: every offset in
a file is known before the first byte is written. The checksum fields are zero, as
``torch.serialization.set_crc32_options(False)`` writes them; torch does not read them, and the
manifest has a stronger one.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from reshard.core.dtypes import BY_STORAGE, DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.formats import pickles
from reshard.formats.small_files import whole_numbers

ALIGNMENT = 64
MAX_DIRECTORY_BYTES = 16 << 20  # of a zip: a tensor's has half a kilobyte
MAX_PICKLE_BYTES = 64 << 20  # of an object; a tensor's has a few hundred bytes
MAX_STORAGE_BYTES = 64 << 20  # of an object's tensors, such as the step of an optimizer
_LOCAL, _CENTRAL, _END, _END64, _LOCATOR = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"
_BIG = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Container:
    """One tensor's container: `head`, then the tensor's bytes, then `tail`."""

    head: bytes
    data_bytes: int
    tail: bytes

    @property
    def size_bytes(self) -> int:
        """Length of the whole container."""
        return len(self.head) + self.data_bytes + len(self.tail)


def tensor_container(dtype: Dtype, shape: tuple[int, ...]) -> Container:
    """Return the container of a contiguous CPU tensor."""
    n = prod(shape)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    typed = dtype.storage != "UntypedStorage"
    module = "torch" if typed else "torch.storage"
    storage = pickles.Persistent(
        ("storage", pickles.Name(module, dtype.storage), "0", "cpu", n if typed else n * dtype.size)
    )
    hooks = pickles.call("collections", "OrderedDict")
    if typed:
        tensor = pickles.call("torch._utils", "_rebuild_tensor_v2", storage, 0, shape, stride, False, hooks)
    else:
        tensor = pickles.call(
            "torch._utils",
            "_rebuild_tensor_v3",
            storage,
            0,
            shape,
            stride,
            False,
            hooks,
            pickles.Name("torch", dtype.name),
        )
    return _container(pickles.dump(tensor, protocol=2), n * dtype.size)


def object_bytes(value: Any, storages: Mapping[str, bytes] | None = None) -> bytes:
    """Return the whole file that ``torch.save`` would write for plain data (`pickles.dump` says
    which); tensors in it have their bytes in these storages."""
    container = _container(pickles.dump(value, protocol=2), None, storages or {})
    return container.head + container.tail


# Those that torch's reader takes (kMinSupportedFileFormatVersion and kMaxSupportedFileFormatVersion in
# caffe2/serialize/versions.h).
FORMAT_VERSIONS = range(1, 11)


def _container(
    data_pkl: bytes, data_bytes: int | None, storages: Mapping[str, bytes] = MappingProxyType({})
) -> Container:
    records = [
        ("data.pkl", data_pkl),
        (".format_version", b"1"),
        ("byteorder", b"little"),
        ("version", b"3\n"),
        *((f"data/{name}", data) for name, data in sorted(storages.items())),
    ]
    head, entries = b"", []
    for name, payload in records:
        entries.append((f"archive/{name}", len(head), len(payload)))
        head += _local_header(f"archive/{name}", len(payload), len(head), 1) + payload
    if data_bytes is not None:
        entries.append(("archive/data/0", len(head), data_bytes))
        head += _local_header("archive/data/0", data_bytes, len(head), ALIGNMENT)
    start = len(head) + (data_bytes or 0)
    central = b"".join(_central_header(*entry) for entry in entries)
    return Container(head, data_bytes or 0, central + _end(len(entries), len(central), start))


def _local_header(name: str, size: int, offset: int, alignment: int) -> bytes:
    encoded = name.encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    # Padding is an extra field of its own ("FB", as torch has it), so that the payload starts aligned.
    end = offset + 30 + len(encoded) + len(extra)
    if alignment > 1:
        padding = -(end + 4) % alignment
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    short = min(size, _BIG)
    return (
        _LOCAL
        + struct.pack(
            "<5H3L2H", 45 if size >= _BIG else 0, 1 << 11, 0, 0, 0, 0, short, short, len(encoded), len(extra)
        )
        + encoded
        + extra
    )


def _central_header(name: str, offset: int, size: int) -> bytes:
    encoded = name.encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    short = min(size, _BIG)
    version = 45 if size >= _BIG else 0
    fields = struct.pack(
        "<6H3L5H2L",
        version,
        version,
        1 << 11,
        0,
        0,
        0,
        0,
        short,
        short,
        len(encoded),
        len(extra),
        0,
        0,
        0,
        0,
        offset,
    )
    return _CENTRAL + fields + encoded + extra


def _end(count: int, size: int, start: int) -> bytes:
    end = b""
    if start >= _BIG:
        end += _END64 + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, size, start)
        end += _LOCATOR + struct.pack("<LQL", 0, start + size, 1)
    return end + _END + struct.pack("<4H2LH", 0, 0, count, count, size, min(start, _BIG), 0)


def records(read: Any, size: int, where: str) -> dict[str, tuple[int, int]]:
    """Return the records of a container as name (without the archive's own) to (offset, length).

    `read(offset, length)` gives bytes of the container, which is `size` bytes long. Raises
    ReshardError for anything that is no zip of stored records or points outside of itself.
    """
    broken = ReshardError(f"{where} is not a readable torch container: it is truncated or corrupt")
    try:
        count, central = _central_directory(read, size)
        placed: dict[str, tuple[int, int]] = {}
        position = 0
        for _ in range(count):
            if central[position : position + 4] != _CENTRAL:
                raise broken
            method, stored, length, name_bytes, extra_bytes, comment_bytes, offset = struct.unpack_from(
                "<10xH8xLLHHH8xL", central, position
            )
            extra_at = position + 46 + name_bytes
            encoded = central[position + 46 : extra_at]
            name = encoded.decode().partition("/")[2]
            position = extra_at + extra_bytes + comment_bytes
            if _BIG in (length, stored, offset):
                length, stored, offset = _wide(
                    central[extra_at : extra_at + extra_bytes], length, stored, offset
                )
            if method != 0 or length != stored or length > size or offset + 30 > size or name in placed:
                raise broken
            local = read(offset, 30 + name_bytes)
            local_name, local_extra = struct.unpack_from("<26xHH", local)
            if local[:4] != _LOCAL or local_name != name_bytes or local[30:] != encoded:
                raise broken
            data_at = offset + 30 + name_bytes + local_extra
            if data_at + length > size:
                raise broken
            placed[name] = (data_at, length)
        if position != len(central):
            raise broken
    except (struct.error, ValueError, IndexError) as error:
        raise broken from error
    return placed


def _central_directory(read: Any, size: int) -> tuple[int, bytes]:
    """Return the number of a zip's records, and its central directory. Raises ValueError or
    struct.error where it has none."""
    tail_at = max(0, size - 4096)
    tail = read(tail_at, size - tail_at)
    at = tail.rindex(_END)
    # disk, disk of the directory, records here, in all, directory's size, start
    fields = struct.unpack_from("<4x4H2L2x", tail, at)
    if tail[max(0, at - 20) : at].startswith(_LOCATOR):
        (at64,) = struct.unpack_from("<8xQ", tail, at - 20)
        if not tail_at <= at64 <= size or tail[at64 - tail_at :][:4] != _END64:
            raise ValueError("no zip64 record where the locator says")
        wide = struct.unpack_from("<16x2L4Q", tail, at64 - tail_at)
        if any(
            a not in (b, 0xFFFF if i < 4 else _BIG) for i, (a, b) in enumerate(zip(fields, wide, strict=True))
        ):
            raise ValueError("two end records that do not agree")
        fields = wide
    disk, start_disk, count_on_disk, count, central_size, start = fields
    if disk or start_disk or count_on_disk != count:
        raise ValueError("a zip of several disks")
    if start + central_size > size or central_size > MAX_DIRECTORY_BYTES:
        raise ValueError("a central directory outside of the container")
    return count, tail[start - tail_at :][:central_size] if start >= tail_at else read(start, central_size)


def _wide(extra: bytes, *narrow: int) -> list[int]:
    """Return a record's length, stored length and offset; those that do not fit into 32 bits are in
    its zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        tag, n = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            values = iter(struct.unpack_from(f"<{n // 8}Q", extra, position + 4))
            return [next(values, value) if value == _BIG else value for value in narrow]
        position += 4 + n
    return list(narrow)


@dataclass(frozen=True, slots=True)
class ContainedTensor:
    """A tensor inside a container: its bytes start at `offset` and are row-major."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int


def stored_tensor(read: Any, size: int, where: str) -> ContainedTensor:
    """Return where the one tensor of a container lies. Raises ReshardError for a container that
    holds something else."""
    value, placed = _data_pkl(read, size, where)
    if not isinstance(value, pickles.Call) or value.name not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        what = value.name if isinstance(value, pickles.Call) else type(value).__name__
        raise ReshardError(f"{where} holds {what}, not one tensor")
    storage, start, shape, stride = value.args[:4] if len(value.args) >= 6 else (None,) * 4
    sound = (
        type(storage) is tuple
        and len(storage) == 5
        and all(map(whole_numbers, (shape, stride, (start,))))
        and len(stride) == len(shape)
    )
    if not sound:
        raise ReshardError(
            f"{where} holds a tensor whose storage, offset, shape or strides are no such thing"
        )
    kind, record = getattr(storage[1], "name", None), storage[2]
    rest = value.args[6:]
    dtype = BY_STORAGE.get(kind) if isinstance(kind, str) else None
    if value.name == "_rebuild_tensor_v3":
        named, rest = getattr(rest[0] if rest else None, "name", None), rest[1:]
        dtype = DTYPES.get(named) if isinstance(named, str) else None
    if any(rest):
        raise ReshardError(
            f"{where} holds a tensor with marks on it (a conjugate or negated view), which is not supported"
        )
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if dtype is None or any(a != b for a, b, n in zip(stride, contiguous, shape, strict=True) if n > 1):
        raise ReshardError(
            f"{where} holds a tensor of an unknown dtype or with strides {tuple(stride)}, "
            f"which is not supported"
        )
    offset, length = placed.get(f"data/{record}", (0, -1)) if isinstance(record, str) else (0, -1)
    if (start + prod(shape)) * dtype.size > length:
        raise ReshardError(f"{where}: the tensor's bytes are missing or cut short")
    return ContainedTensor(dtype, tuple(shape), offset + start * dtype.size)


def stored_object(read: Any, size: int, where: str) -> Any:
    """Return the plain data of a container, tensors in it as `pickles.Call` records."""
    return _data_pkl(read, size, where)[0]


def stored_state(read: Any, size: int, where: str) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return what `stored_object` does, and the records of the container, which have the bytes of the tensors in it."""
    return _data_pkl(read, size, where)


def stored_storages(read: Any, size: int, where: str) -> dict[str, bytes]:
    """Return the bytes of the storages of a container's tensors, by name. Raises ReshardError if
    they are more than plain data has use for."""
    placed = {n: at for n, at in records(read, size, where).items() if n.startswith("data/")}
    total = sum(length for _, length in placed.values())
    if total > MAX_STORAGE_BYTES:
        raise ReshardError(
            f"{where} has tensors of {total:,} bytes, more than the {MAX_STORAGE_BYTES:,} of plain data"
        )
    return {name.removeprefix("data/"): read(*at) for name, at in placed.items()}


def _data_pkl(read: Any, size: int, where: str) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return the content of a container's ``data.pkl``, and all its records."""
    placed = records(read, size, where)
    if "data.pkl" not in placed or (
        "byteorder" in placed and read(placed["byteorder"][0], min(placed["byteorder"][1], 9)) != b"little"
    ):
        raise ReshardError(f"{where} has no data.pkl or is not little-endian")
    if "version" in placed:
        version = read(placed["version"][0], min(placed["version"][1], 20)).strip()
        if not (version.isdigit() and int(version) in FORMAT_VERSIONS):
            raise ReshardError(
                f"{where} says that its format is version {version!r:.40}; {FORMAT_VERSIONS[0]} to "
                f"{FORMAT_VERSIONS[-1]} are known"
            )
    at, length = placed["data.pkl"]
    if length > MAX_PICKLE_BYTES:
        raise ReshardError(
            f"{where} has a data.pkl of {length:,} bytes, more than {MAX_PICKLE_BYTES:,}: it is corrupt"
        )
    return pickles.load(read(at, length), where), placed
