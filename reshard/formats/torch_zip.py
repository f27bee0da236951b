"""The container of ``torch.save``: a zip of stored records, of which ``data.pkl`` describes the tensor and ``data/0`` is its bytes.

A header is made without the data, since its length depends on dtype and shape only: every offset in a file is known before the
first byte is written. The checksum fields are zero, as ``torch.serialization.set_crc32_options(False)`` writes them; torch does
not read them, and the manifest has a stronger one.
"""

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from reshard.dtypes import BY_STORAGE, DTYPES, Dtype
from reshard.errors import ReshardError
from reshard.formats import pickles

ALIGNMENT = 64
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
    """The container of a contiguous CPU tensor."""
    n = prod(shape)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    typed = dtype.storage != "UntypedStorage"
    module = "torch" if typed else "torch.storage"
    storage = pickles.Persistent(("storage", pickles.Name(module, dtype.storage), "0", "cpu", n if typed else n * dtype.size))
    hooks = pickles.call("collections", "OrderedDict")
    if typed:
        tensor = pickles.call("torch._utils", "_rebuild_tensor_v2", storage, 0, shape, stride, False, hooks)
    else:
        tensor = pickles.call(
            "torch._utils", "_rebuild_tensor_v3", storage, 0, shape, stride, False, hooks, pickles.Name("torch", dtype.name)
        )
    return _container(pickles.dump(tensor, protocol=2), n * dtype.size)


def object_bytes(value: Any) -> bytes:
    """The whole file that ``torch.save`` would write for plain data (`pickles.dump` says which)."""
    container = _container(pickles.dump(value, protocol=2), None)
    return container.head + container.tail


def _container(data_pkl: bytes, data_bytes: int | None) -> Container:
    records = [("data.pkl", data_pkl), (".format_version", b"1"), ("byteorder", b"little"), ("version", b"3\n")]
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
        + struct.pack("<5H3L2H", 45 if size >= _BIG else 0, 1 << 11, 0, 0, 0, 0, short, short, len(encoded), len(extra))
        + encoded
        + extra
    )


def _central_header(name: str, offset: int, size: int) -> bytes:
    encoded = name.encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    short = min(size, _BIG)
    version = 45 if size >= _BIG else 0
    fields = struct.pack("<6H3L5H2L", version, version, 1 << 11, 0, 0, 0, 0, short, short, len(encoded), len(extra), 0, 0, 0, 0, offset)
    return _CENTRAL + fields + encoded + extra


def _end(count: int, size: int, start: int) -> bytes:
    end = b""
    if start >= _BIG:
        end += _END64 + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, size, start)
        end += _LOCATOR + struct.pack("<LQL", 0, start + size, 1)
    return end + _END + struct.pack("<4H2LH", 0, 0, count, count, size, min(start, _BIG), 0)


def records(read: Any, size: int, where: str) -> dict[str, tuple[int, int]]:
    """The records of a container as name (without the archive's own) to (offset, length).

    `read(offset, length)` gives bytes of the container, which is `size` bytes long. Raises ReshardError for anything that is no
    zip of stored records or points outside of itself.
    """
    broken = ReshardError(f"{where} is not a readable torch container: it is truncated or corrupt")
    tail_at = max(0, size - 4096)
    tail = read(tail_at, size - tail_at)
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        raise broken
    count, central_size, start = struct.unpack_from("<10xHLL", tail, at)
    if start == _BIG or count == 0xFFFF or central_size == _BIG:
        at64 = tail.rfind(_END64)
        if at64 < 0:
            raise broken
        count, central_size, start = struct.unpack_from("<32xQQQ", tail, at64)
    if start + central_size > size:
        raise broken
    central = tail[start - tail_at :][:central_size] if start >= tail_at else read(start, central_size)
    found, position = {}, 0
    try:
        for _ in range(count):
            if central[position : position + 4] != _CENTRAL:
                raise broken
            method, stored, length, name_bytes, extra_bytes, comment_bytes, offset = struct.unpack_from(
                "<10xH8xLLHHH8xL", central, position
            )
            name = central[position + 46 :][:name_bytes].decode()
            extra = central[position + 46 + name_bytes :][:extra_bytes]
            wide = [value for value in (length, stored, offset) if value == _BIG]
            while wide and len(extra) >= 4:
                tag, n = struct.unpack_from("<HH", extra)
                if tag == 1:
                    values = list(struct.unpack_from(f"<{n // 8}Q", extra, 4))
                    length = values.pop(0) if length == _BIG else length
                    stored = values.pop(0) if stored == _BIG else stored
                    offset = values.pop(0) if offset == _BIG else offset
                    break
                extra = extra[4 + n :]
            local = read(offset, 30)
            if method != 0 or length != stored or local[:4] != _LOCAL:
                raise broken
            local_name, local_extra = struct.unpack_from("<26xHH", local)
            data_at = offset + 30 + local_name + local_extra
            if data_at + length > size:
                raise broken
            found[name.partition("/")[2]] = (data_at, length)
            position += 46 + name_bytes + extra_bytes + comment_bytes
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise broken from error
    return found


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside a container: its bytes start at `offset` and are row-major."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int


def stored_tensor(read: Any, size: int, where: str) -> StoredTensor:
    """Where the one tensor of a container lies. Raises ReshardError for a container that holds something else."""
    found = records(read, size, where)
    if "data.pkl" not in found or (("byteorder" in found) and read(*found["byteorder"]) != b"little"):
        raise ReshardError(f"{where} has no data.pkl or is not little-endian")
    value = pickles.load(read(*found["data.pkl"]), where)
    if not isinstance(value, pickles.Call) or value.name not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        raise ReshardError(f"{where} holds {value!r:.80}, not one tensor")
    (_, storage, record, *_), start, shape, stride = value.args[:4]
    dtype = BY_STORAGE.get(storage.name) or DTYPES.get(getattr(value.args[6], "name", "") if len(value.args) > 6 else "")
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if dtype is None or any(a != b for a, b, n in zip(stride, contiguous, shape, strict=True) if n > 1):
        raise ReshardError(f"{where} holds a tensor of an unknown dtype or with strides {tuple(stride)}, which is not supported")
    offset, length = found.get(f"data/{record}", (0, -1))
    if (start + prod(shape)) * dtype.size > length:
        raise ReshardError(f"{where}: the tensor's bytes are missing or cut short")
    return StoredTensor(dtype, tuple(shape), offset + start * dtype.size)


def stored_object(read: Any, size: int, where: str) -> Any:
    """The plain data of a container, tensors in it as `pickles.Call` records."""
    found = records(read, size, where)
    if "data.pkl" not in found:
        raise ReshardError(f"{where} has no data.pkl")
    return pickles.load(read(*found["data.pkl"]), where)
