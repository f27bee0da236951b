"""Ways to spoil the files of a checkpoint: each takes a random generator and a file, changes the file and says how."""

import copy
import io
import json
import os
import pickle
import pickletools
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

HUGE_BYTES = 3 << 30
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**9, 10**18, 10**400,
    0.5, 1.5, -1.5, 1e308, float("nan"), float("inf"),
]  # fmt: skip
VALUES: list[Any] = [*NUMBERS, None, True, False, "", "1", "²", "\u0661", "nan", "x" * 5000, "../../etc/passwd", "\0", "\ud800", [], {}, [[]], [0],
                     [1, 2, 3, 4, 5], [-1], ["a"], {"a": 1}, {"": None}, [None] * 40, [2] * 2000]  # fmt: skip

Mutation = Callable[[random.Random, Path], str]


def extreme(rng: random.Random, value: Any) -> Any:
    """Something that may stand where `value` stood: often a number near it, sometimes another kind of thing."""
    if type(value) is int and rng.random() < 0.5:
        return rng.choice(
            [
                value + 1,
                value - 1,
                -value,
                value * 2,
                value // 2,
                value * 10**9,
                float(value),
                str(value),
                bool(value),
            ]
        )
    return copy.deepcopy(rng.choice(VALUES))


# Any file.


def raw(rng: random.Random, path: Path) -> str:
    """Damage that knows nothing of the format."""
    how = rng.choice(
        [
            "truncated",
            "emptied",
            "bytes",
            "bytes",
            "bytes",
            "grown",
            "sparse",
            "removed",
            "directory",
            "pipe",
            "link",
            "cut",
            "zeros",
        ]
    )
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "bytes":
        spoiled = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            if spoiled:
                spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        path.write_bytes(spoiled)
    elif how == "grown":
        path.write_bytes(data + rng.randbytes(rng.choice([1, 100, 5000])))
    elif how == "sparse":
        os.truncate(path, HUGE_BYTES)
    elif how == "cut":
        a = rng.randrange(len(data) + 1)
        path.write_bytes(data[:a] + data[a + rng.choice([1, 7, 64]) :])
    elif how == "zeros":
        a = rng.randrange(len(data) + 1)
        n = min(rng.choice([1, 64, 5000]), len(data) - a)
        path.write_bytes(data[:a] + bytes(n) + data[a + n :])
    else:
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "link":
            path.symlink_to(path.with_name("nowhere"))
    return how


# JSON.


def _places(value: Any, at: tuple = ()) -> list[tuple]:
    """The paths of everything in a JSON value but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*at, key), *_places(item, (*at, key)))]


def _parent(value: Any, place: tuple) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def change_json(rng: random.Random, value: Any) -> tuple[str, str]:
    """A changed JSON text, and what was changed."""
    places = _places(value)
    shallow = [place for place in places if len(place) <= 2] or [()]
    place = rng.choice(rng.choice([places, shallow]) or [()])
    how = rng.choice(
        [
            "value",
            "value",
            "value",
            "value",
            "removed",
            "twice",
            "swapped",
            "moved",
            "deep",
            "deep in place",
            "other root",
            "added",
        ]
    )
    note = f"{how} {'.'.join(map(str, place))[:80]}"
    if how == "other root" or not place:
        return json.dumps(rng.choice(VALUES)), "other root"
    if how == "deep":
        return json.dumps(value)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested 100,000 deep"
    parent = _parent(value, place)
    if how == "value":
        parent[place[-1]] = new = extreme(rng, parent[place[-1]])
        note += f" = {str(new)[:60]}"
    elif how == "removed":
        del parent[place[-1]]
    elif how == "added":
        parent[place[-1] if isinstance(parent, list) else f"{place[-1]}x"] = extreme(rng, parent[place[-1]])
    elif how in ("swapped", "moved"):
        other = rng.choice([p for p in places if len(p) == len(place)])
        theirs = _parent(value, other)
        if how == "swapped":
            theirs[other[-1]], parent[place[-1]] = parent[place[-1]], theirs[other[-1]]
        else:
            theirs[other[-1]] = copy.deepcopy(parent[place[-1]])
        note += f" with {'.'.join(map(str, other))[:80]}"
    elif how == "deep in place":
        parent[place[-1]] = "DEEP"
        return json.dumps(value).replace('"DEEP"', "[" * 100_000 + "]" * 100_000), note
    text = json.dumps(value)
    if how == "twice":
        entry = json.dumps({str(place[-1]): extreme(rng, parent[place[-1]])})[1:-1]
        at = text.find(json.dumps(str(place[-1])) + ":")
        text = text[:at] + entry + ", " + text[at:] if at >= 0 else text
    return text, note


def json_file(rng: random.Random, path: Path) -> str:
    text, note = change_json(rng, json.loads(path.read_bytes()))
    path.write_text(text)
    return note


# safetensors.


def safetensors_header(rng: random.Random, path: Path) -> str:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    how = rng.choice(["json", "json", "json", "length", "swapped places", "many names", "name"])
    names = [name for name in header if name != "__metadata__"]
    if how == "length":
        new = rng.choice([0, 1, length - 1, length + 1, length + 8, 2**62, 2**63, 2**64 - 1, len(data)])
        path.write_bytes(struct.pack("<Q", new) + data[8:])
        return f"header length {new}"
    if how == "swapped places":
        a = rng.choice(names)
        alike = [n for n in names if header[n]["shape"] == header[a]["shape"]]
        b = rng.choice(alike)
        header[a]["data_offsets"], header[b]["data_offsets"] = (
            header[b]["data_offsets"],
            header[a]["data_offsets"],
        )
        text, note = json.dumps(header), f"places of {a} and {b} swapped"
    elif how == "many names":
        extra = ", ".join(f'"n{i % 59_999}": {{}}' for i in range(60_000))
        text, note = json.dumps(header)[:-1] + f", {extra}}}", "60,000 names, one twice"
    elif how == "name":
        a = rng.choice(names)
        new = rng.choice(
            [rng.choice(names), "x" * 100_000, "", a + "\n", a.upper(), "\ud800", "__metadata__"]
        )
        header[new] = header.pop(a)
        text, note = json.dumps(header), f"{a} renamed {new[:60]!r}"
    else:
        text, note = change_json(rng, header)
    encoded = text.encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
    return note


# Pickles.


def _int_op(value: int) -> bytes:
    return b"\x8a" + bytes([len(pickle.encode_long(value))]) + pickle.encode_long(value)


def _value_op(value: Any) -> bytes:
    if type(value) is int and abs(value) < 2**1000:
        return _int_op(value)
    with io.BytesIO() as out:
        pickle.Pickler(out, 2).dump(value)
        return out.getvalue()[2:-1].replace(b"q\x00", b"").replace(b"q\x01", b"")


def change_pickle(rng: random.Random, data: bytes, same_length: bool = False) -> tuple[bytes, str]:
    """A pickle with other opcodes or arguments; with `same_length` only such as keep its length."""
    ops = [(op.name, arg, at) for op, arg, at in pickletools.genops(data)]
    ends = [at for _, _, at in ops[1:]] + [len(data)]
    pieces = [data[at:end] for (_, _, at), end in zip(ops, ends, strict=True)]
    integers = [i for i, (name, _, _) in enumerate(ops) if name in ("BININT", "BININT1", "BININT2", "LONG1")]
    texts = [i for i, (name, _, _) in enumerate(ops) if "UNICODE" in name]
    if same_length:
        i = rng.choice(integers)
        name, arg, _ = ops[i]
        form, least, most = {
            "BININT": ("<i", -(2**31), 2**31 - 1),
            "BININT1": ("<B", 0, 255),
            "BININT2": ("<H", 0, 65535),
        }[name]
        new = rng.choice(
            [n for n in (least, most, 0, 1, arg + 1, arg - 1, -arg, arg // 2, arg * 2) if least <= n <= most]
        )
        pieces[i] = pieces[i][:1] + struct.pack(form, new)
        return b"".join(pieces), f"{name} {arg} at {ops[i][2]} is {new}"
    how = rng.choice(
        [
            "integer",
            "integer",
            "integer",
            "value",
            "swap integers",
            "swap texts",
            "text",
            "drop",
            "twice",
            "bomb",
            "name",
        ]
    )
    at = rng.randrange(1, len(pieces))
    if how in ("integer", "value") and integers:
        i = rng.choice(integers if how == "integer" else integers + texts)
        new = extreme(rng, ops[i][1])
        pieces[i] = _value_op(new)
        note = f"{ops[i][1]!s:.60} is {str(new)[:60]}"
    elif how.startswith("swap") and len(texts if how == "swap texts" else integers) > 1:
        i, j = rng.sample(texts if how == "swap texts" else integers, 2)
        pieces[i], pieces[j] = pieces[j], pieces[i]
        note = f"{ops[i][1]!s:.60} and {ops[j][1]!s:.60} swapped"
    elif how == "text" and texts:
        i = rng.choice(texts)
        new = rng.choice(
            [ops[i][1] + "x", "", "..", "/etc/passwd", "\0", "x" * 5000, ops[i][1].upper()]
        ).encode()
        pieces[i] = b"X" + struct.pack("<I", len(new)) + new
        note = f"{ops[i][1]!s:.60} is {new[:60]!r}"
    elif how == "bomb":
        number = [b"j" + struct.pack("<I", 10_000 + i) for i in range(65)]
        store = [b"r" + get[1:] + b"0" for get in number]
        tower = (
            b"N\x85"
            + store[0]
            + b"".join(number[i] * 2 + b"\x86" + store[i + 1] for i in range(64))
            + number[64]
        )
        note, piece = rng.choice([
            ("memo index", b"r\xff\xff\xff\x1f"), ("deep", b"(" * 100_000), ("deep lists", b"]" * 100_000 + b"a" * 99_999 + b"0"),
            ("counted bytes", b"\x8e" + struct.pack("<Q", 2**62)), ("shared tuples", tower + b"0"),
            ("a key of shared tuples", b"}" + tower + b"Ns0"), ("a command", b"cos\nsystem\n(X\x04\x00\x00\x00true\x85R0"),
            ("a value of shared tuples", tower),
        ])  # fmt: skip
        pieces.insert(at, piece)
        note = f"{note} at opcode {at}"
    elif how == "name":
        i = rng.choice([i for i, (name, _, _) in enumerate(ops) if name == "GLOBAL"] or [at])
        pieces[i] = rng.choice([b"ctorch\nSize\n", b"ctorch\nfloat32\n", b"ctorch\nint64\n", b"ctorch\nFloatStorage\n", b"cposix\nsystem\n",
                                b"cargparse\nNamespace\n", b"ccollections\nOrderedDict\n"])  # fmt: skip
        note = f"{ops[i][1]!s:.60} is {pieces[i]!r}"
    elif how == "twice":
        pieces.insert(at, pieces[at])
        note = f"opcode {at} {ops[at][0]} twice"
    else:
        del pieces[at]
        note = f"opcode {at} {ops[at][0]} dropped"
    return b"".join(piece for piece in pieces if piece[:1] != b"\x95"), note


def metadata_pickle(rng: random.Random, path: Path) -> str:
    data, note = change_pickle(rng, path.read_bytes())
    path.write_bytes(data)
    return note


def metadata_entries(rng: random.Random, path: Path) -> str:
    """``.metadata`` as torch reads it, with an entry changed, dropped or exchanged, and written again by torch's own classes."""
    metadata = pickle.loads(path.read_bytes())
    storage, state = metadata.storage_data, metadata.state_dict_metadata
    keys = [key for key, entry in state.items() if isinstance(entry, TensorStorageMetadata)]
    key = rng.choice(keys)
    places = [index for index in storage if index.fqn == key]
    index = rng.choice(places)
    chunk = rng.choice(state[key].chunks)
    how = rng.choice(["places", "places of one key", "storage", "storage", "chunk", "chunk", "shape", "no chunk", "no place", "no key",
                      "other kind", "same place", "dtype", "chunk twice", "no sizes", "whole", "unknown key"])  # fmt: skip
    note = f"{how} {key}"
    if how.startswith("places") or how == "same place":
        others = (
            places
            if how == "places of one key"
            else [i for i in storage if storage[i].length == storage[index].length]
        )
        other = rng.choice(others)
        a, b = copy.copy(storage[index]), copy.copy(storage[other])
        storage[index] = b
        if how != "same place":
            storage[other] = a
        note += f" {tuple(index.offset or ())} with {other.fqn} {tuple(other.offset or ())}"
    elif how == "storage":
        field = rng.choice(["relative_path", "offset", "length"])
        new = extreme(rng, getattr(storage[index], field))
        storage[index] = copy.copy(storage[index])
        object.__setattr__(storage[index], field, new)
        note += f" {field} {str(new)[:60]}"
    elif how == "chunk":
        field = rng.choice(["offsets", "sizes"])
        new = list(getattr(chunk, field))
        new[rng.randrange(len(new))] = extreme(rng, new[0])
        object.__setattr__(chunk, field, tuple(new) if rng.random() < 0.9 else extreme(rng, 0))
        note += f" {field} {new!s:.60}"
    elif how == "shape":
        new = list(state[key].size)
        new[rng.randrange(len(new))] = extreme(rng, new[0])
        object.__setattr__(state[key], "size", tuple(new))
        note += f" {new!s:.60}"
    elif how == "no chunk":
        state[key].chunks.remove(chunk)
    elif how == "no place":
        del storage[index]
    elif how == "no key":
        del state[key]
    elif how == "other kind":
        state[key] = rng.choice([BytesStorageMetadata(), None, 5, [], state[rng.choice(keys)]])
    elif how == "dtype":
        state[key].properties.dtype = rng.choice(
            [torch.float32, torch.int16, torch.float16, torch.complex64, torch.bool, torch.float64]
        )
    elif how == "chunk twice":
        state[key].chunks.append(
            rng.choice([chunk, ChunkStorageMetadata(chunk.offsets, torch.Size([1] * len(chunk.sizes)))])
        )
    elif how == "no sizes":
        chunk_fields = rng.choice(["offsets", "sizes"])
        object.__delattr__(chunk, chunk_fields)
    elif how == "whole":
        metadata.storage_data = extreme(rng, 0)
    else:
        new = rng.choice(["decoder.layers.0.extra.weight", "optimizer.state.x", "", "x" * 5000, key + "_w"])
        state[new] = state[key]
        storage |= {MetadataIndex(new, i.offset): storage[i] for i in places}
        note += f" {new[:40]}"
    path.write_bytes(pickle.dumps(metadata, protocol=rng.choice([2, 4])))
    return note


# Zip containers.


def _rezip(data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
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

    spoiled = _rezip(data, change)
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


def tracker(rng: random.Random, path: Path) -> str:
    text = rng.choice(["", "²", "\u0661", "-1", "+1", "1e3", "0x10", "release\0", " release \n\n", "RELEASE", "iter_0000001", "9" * 5000, "../release",
                       "1_0", "0", "release\nrelease", "\ufeffrelease"])  # fmt: skip
    path.write_text(text)
    return repr(text[:40])


def mutations_of(path: Path) -> list[Mutation]:
    """What can be done to a file, by its name; more than once in the list what is worth doing more often."""
    name = path.name
    if name == ".metadata":
        return [metadata_pickle, metadata_entries, metadata_entries, raw]
    if name == "common.pt":
        return [container_file, other_args, other_args, raw]
    if name.endswith(".safetensors"):
        return [safetensors_header, safetensors_header, safetensors_header, raw]
    if name.endswith(".distcp"):
        return [lambda rng, path: chunk(rng, path.parent)] * 4 + [raw]
    if name.endswith(".json"):
        return [json_file, json_file, json_file, raw]
    if name == "latest_checkpointed_iteration.txt":
        return [tracker, raw]
    return [raw]
