"""Pickles of plain data and of inert records, so that torch and Megatron find their own classes
when they read them."""

import pickle
import struct
from typing import Any

from reshard.formats.pickles.records import Call, Name, Persistent


def dump(value: Any, protocol: int = 4) -> bytes:
    """Write plain data, `Name` and `Call` records as a pickle; strings and names are written once
    and then referred to."""
    return b"".join((pickle.PROTO, bytes([protocol]), *_Writer(protocol).ops(value), pickle.STOP))


class _Writer:
    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.memo: dict[Any, bytes] = {}

    def ops(self, value: Any) -> list[bytes]:
        out: list[bytes] = []
        self.write(value, out.append)
        return out

    def write(self, value: Any, out: Any) -> None:
        kind = type(value)
        if value is None:
            out(pickle.NONE)
        elif kind is bool:
            out(pickle.NEWTRUE if value else pickle.NEWFALSE)
        elif kind is int:
            if 0 <= value < 256:
                out(pickle.BININT1 + bytes([value]))
            elif -(2**31) <= value < 2**31:
                out(pickle.BININT + struct.pack("<i", value))
            else:
                encoded = pickle.encode_long(value)
                out(pickle.LONG1 + bytes([len(encoded)]) + encoded)
        elif kind is float:
            out(pickle.BINFLOAT + struct.pack(">d", value))
        elif kind is str:
            encoded = value.encode()
            self._once(value, pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded, out)
        elif kind is bytes:
            out(pickle.BINBYTES + struct.pack("<I", len(value)) + value)
        elif kind is tuple:
            if len(value) > 3:
                out(pickle.MARK)
            for item in value:
                self.write(item, out)
            out(
                (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE)[
                    min(len(value), 4)
                ]
            )
        elif kind is list:
            out(pickle.EMPTY_LIST + pickle.MARK)
            for item in value:
                self.write(item, out)
            out(pickle.APPENDS)
        elif kind is dict:
            out(pickle.EMPTY_DICT + pickle.MARK)
            for key, item in value.items():
                self.write(key, out)
                self.write(item, out)
            out(pickle.SETITEMS)
        elif kind is Name:
            self._name(value.module, value.name, out)
        elif kind is Persistent:
            self.write(value.pid, out)
            out(pickle.BINPERSID)
        elif isinstance(value, Call):
            self._name(value.module, value.name, out)
            self.write(value.args, out)
            out(pickle.REDUCE if value.args or value.state is None else pickle.NEWOBJ)
            if value.state is not None:
                self.write(value.state, out)
                out(pickle.BUILD)
        else:
            raise TypeError(f"{kind.__name__} has no plain form in a pickle: {value!r}")

    def _name(self, module: str, name: str, out: Any) -> None:
        self._once((module, name), pickle.GLOBAL + f"{module}\n{name}\n".encode(), out)

    def _once(self, key: Any, ops: bytes, out: Any) -> None:
        if key in self.memo:
            out(self.memo[key])
            return
        index = len(self.memo)
        put, get = (pickle.BINPUT, pickle.BINGET) if index < 256 else (pickle.LONG_BINPUT, pickle.LONG_BINGET)
        number = bytes([index]) if index < 256 else struct.pack("<I", index)
        self.memo[key] = get + number
        out(ops + put + number)
