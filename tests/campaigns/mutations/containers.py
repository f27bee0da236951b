"""Ways to spoil torch's zip containers and the chunks in them."""

import io
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)

from tests.campaigns.mutations.pickled import change_pickle
from tests.campaigns.mutations.values import extreme, raw


def rezip(data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            with old.open(name) as record:
                record._expected_crc = None  # type: ignore[attr-defined]  # torch may write none
                new.writestr(name, change(name, record.read()))
    return out.getvalue()


def zip_fields(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A zip with one number of its end record, directory or a local header changed."""
    spoiled = bytearray(data)
    kind, fields = rng.choice([
        (b"PK\5\6", [(8, "H"), (10, "H"), (12, "L"), (16, "L"), (20, "H")]),
        (b"PK\1\2", [(10, "H"), (20, "L"), (24, "L"), (28, "H"), (30, "H"), (32, "H"), (42, "L")]),
        (b"PK\3\4", [(8, "H"), (18, "L"), (22, "L"), (26, "H"), (28, "H")]),
    ])  # fmt: skip
    starts = [i for i in range(len(data) - 4) if data[i : i + 4] == kind]
    start, (at, form) = rng.choice(starts), rng.choice(fields)
    most = 0xFFFF if form == "H" else 0xFFFFFFFF
    (old,) = struct.unpack_from("<" + form, spoiled, start + at)
    new = rng.choice(
        [0, 1, most, most - 1, most // 2, (old + 1) & most, (old - 1) & most, rng.randrange(most)]
    )
    struct.pack_into("<" + form, spoiled, start + at, new)
    return bytes(spoiled), f"{kind!r} field {at}: {old} is {new}"


def zip64_offset(data: bytes, value: int) -> bytes:
    """A zip whose first directory entry says in its zip64 field that its record lies at `value`."""
    start = data.index(b"PK\1\2")
    name = struct.unpack_from("<H", data, start + 28)[0]
    extra = struct.pack("<HHQ", 1, 8, value)
    entry = bytearray(data[start : start + 46])
    struct.pack_into("<H", entry, 30, len(extra))
    struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
    end = data.rindex(b"PK\5\6")
    tail = bytearray(data[end:])
    struct.pack_into("<L", tail, 12, struct.unpack_from("<L", tail, 12)[0] + len(extra))
    after = start + 46 + name
    return data[:start] + bytes(entry) + data[start + 46 : after] + extra + data[after:end] + bytes(tail)


def change_container(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A container of ``torch.save`` with other bytes; its length may change."""
    how = rng.choice(["pickle", "pickle", "pickle", "fields", "zip64", "record", "byteorder", "records"])
    if how == "fields":
        return zip_fields(rng, data)
    if how == "zip64":
        return zip64_offset(data, rng.choice([2**64 - 1, 2**63, 2**63 - 1, 2**40])), "zip64 offset"
    notes = [how]
    chosen = rng.choice(["data/0", "version", "data.pkl"])

    def change(name: str, payload: bytes) -> bytes:
        short = name.partition("/")[2]
        if how == "pickle" and short == "data.pkl":
            payload, note = change_pickle(rng, payload)
            notes.append(note)
        elif how == "record" and short == chosen:
            notes.append(chosen)
            payload = payload[: rng.randrange(len(payload) + 1)]
        elif how == "byteorder" and short == "byteorder":
            payload = rng.choice([b"big", b"", b"little\n", b"x" * 5000])
        return payload

    spoiled = rezip(data, change)
    if how == "records":
        out = io.BytesIO(spoiled)
        with warnings.catch_warnings(), zipfile.ZipFile(out, "a", zipfile.ZIP_STORED) as file:
            warnings.simplefilter("ignore")
            file.writestr(rng.choice(["archive/data.pkl", "archive/data/0", "other/data.pkl", "x"]), b"N.")
        spoiled = out.getvalue()
    return spoiled, ": ".join(notes)


def container_file(rng: random.Random, path: Path) -> str:
    data, note = change_container(rng, path.read_bytes())
    path.write_bytes(data)
    return note


def other_args(rng: random.Random, path: Path) -> str:
    """``common.pt`` with one of its args, or something at its top, changed, and saved by torch."""
    common = torch.load(path, weights_only=False)
    values = rng.choice([vars(common["args"]), vars(common["args"]), common])
    key = rng.choice(list(values))
    if rng.random() < 0.2:
        del values[key]
        note = f"{key} dropped"
    else:
        values[key] = extreme(rng, values[key])
        note = f"{key} = {values[key]!s:.60}"
    torch.save(common, path)
    return note


def chunk_tensor(rng: random.Random, tensor: torch.Tensor) -> tuple[bytes, str]:
    """Another way to save a chunk's tensor, or another tensor in its place, as torch writes it."""
    flat = tensor.contiguous().flatten()
    ways: dict[str, Callable[[], Any]] = {
        "a view into a larger storage": lambda: torch.cat([flat[:5] + 1, flat, flat[:3]])[
            5 : 5 + flat.numel()
        ].view(tensor.shape),
        "transposed strides": lambda: (
            tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.contiguous()
        ),
        "an expanded view": lambda: (
            flat[:1].expand(flat.numel()).view(tensor.shape)
            if tensor.dim() == 1
            else flat[:1].expand(tensor.shape)
        ),
        "a parameter": lambda: torch.nn.Parameter(tensor),
        "another dtype": lambda: tensor.to(rng.choice([torch.float64, torch.float16, torch.int16])),
        "another shape": lambda: flat,
        "without a row": lambda: tensor[1:].clone(),
        "more dims": lambda: tensor.clone()[None, None],
        "a list": lambda: [tensor],
        "a dict": lambda: {"w": tensor},
        "a negated view": lambda: torch._neg_view(tensor),
        "a sparse tensor": lambda: tensor.to_sparse(),
        "a number": lambda: 5,
    }
    how = rng.choice(sorted(ways))
    out = io.BytesIO()
    torch.save(ways[how](), out)
    return out.getvalue(), how


def chunk(rng: random.Random, directory: Path) -> str:
    """One weight's container replaced: a new one is appended to its file, and ``.metadata`` says so."""
    path = directory / ".metadata"
    if not path.is_file():
        return "nothing: another mutation has taken .metadata away"
    metadata = pickle.loads(path.read_bytes())
    index = rng.choice(
        [
            i
            for i in metadata.storage_data
            if isinstance(metadata.state_dict_metadata[i.fqn], TensorStorageMetadata)
        ]
    )
    place = metadata.storage_data[index]
    file = directory / place.relative_path
    if not file.is_file():
        return raw(rng, path)  # another mutation has taken the weights away
    data = file.read_bytes()
    old = data[place.offset : place.offset + place.length]
    if rng.random() < 0.4:  # in place
        start = old.index(b"\x80\x02")
        stop = old.index(b"PK", start)
        new, note = change_pickle(rng, old[start:stop], same_length=True)
        file.write_bytes(data[: place.offset + start] + new + data[place.offset + stop :])
        return f"{index.fqn} {tuple(index.offset or ())}: {note}"
    if rng.random() < 0.5:
        new, note = chunk_tensor(rng, torch.load(io.BytesIO(old), weights_only=False))
    else:
        new, note = change_container(rng, old)
    file.write_bytes(data + new)
    metadata.storage_data[index] = type(place)(place.relative_path, len(data), len(new))
    path.write_bytes(pickle.dumps(metadata))
    return f"{index.fqn} {tuple(index.offset or ())}: {note}"
