"""Ways to spoil pickles and what they say."""

import copy
import io
import pickle
import pickletools
import random
import struct
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.campaigns.mutations.values import extreme


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
        note, piece = rng.choice(
            [
                ("memo index", b"r\xff\xff\xff\x1f"),
                ("deep", b"(" * 100_000),
                ("deep lists", b"]" * 100_000 + b"a" * 99_999 + b"0"),
                ("counted bytes", b"\x8e" + struct.pack("<Q", 2**62)),
                ("shared tuples", tower + b"0"),
                ("a key of shared tuples", b"}" + tower + b"Ns0"),
                ("a command", b"cos\nsystem\n(X\x04\x00\x00\x00true\x85R0"),
                ("a value of shared tuples", tower),
            ]
        )
        pieces.insert(at, piece)
        note = f"{note} at opcode {at}"
    elif how == "name":
        i = rng.choice([i for i, (name, _, _) in enumerate(ops) if name == "GLOBAL"] or [at])
        pieces[i] = rng.choice([b"ctorch\nSize\n", b"ctorch\nfloat32\n", b"ctorch\nint64\n", b"ctorch\nFloatStorage\n",
                                b"cposix\nsystem\n", b"cargparse\nNamespace\n",
                                b"ccollections\nOrderedDict\n"])  # fmt: skip
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
    """``.metadata`` as torch reads it, with an entry changed, dropped or exchanged, and written
    again by torch's own classes."""
    metadata = pickle.loads(path.read_bytes())
    storage, state = metadata.storage_data, metadata.state_dict_metadata
    keys = [key for key, entry in state.items() if isinstance(entry, TensorStorageMetadata)]
    key = rng.choice(keys)
    places = [index for index in storage if index.fqn == key]
    index = rng.choice(places)
    chunk = rng.choice(state[key].chunks)
    how = rng.choice(["places", "places of one key", "storage", "storage", "chunk", "chunk", "shape", "no chunk",
                      "no place", "no key", "other kind", "same place", "dtype", "chunk twice", "no sizes", "whole",
                      "unknown key"])  # fmt: skip
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
