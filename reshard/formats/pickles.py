"""Pickles without trust and without torch.

A pickle is a program that may call anything. `load` runs it with a short list of names, each bound to an inert record of the
call (`Call`), never to the real class; any other name refuses the whole file before it is called. `dump` writes pickles of plain
data and of such records, so that torch and Megatron find their own classes when they read the file.
"""

import io
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from typing import Any

from reshard.errors import ReshardError

METADATA = "torch.distributed.checkpoint.metadata"

# Names that a checkpoint's pickles may hold. None of them is ever called: each stands for an inert record.
ALLOWED = {
    *((METADATA, n) for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                              "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    *(("torch.distributed.checkpoint.planner", n) for n in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    ("torch.serialization", "_get_layout"),
    *(("torch", n) for n in ("device", "Generator", "strided", "contiguous_format")),
    *(("torch", n) for n in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16",
                             "int8", "uint8", "bool", "complex64")),
    *(("torch", f"{n}Storage") for n in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")),
    *(("torch.storage", n) for n in ("UntypedStorage", "TypedStorage", "_load_from_bytes")),
    *(("torch._utils", n) for n in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
    ("torch._C", "Generator"), ("torch._tensor", "_rebuild_from_type_v2"), ("torch.serialization", "_get_dtype"),
    *((module, n) for module in ("numpy.core.multiarray", "numpy._core.multiarray") for n in ("_reconstruct", "scalar")),
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.dtypes", "UInt32DType"),
    ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("signal", "Signals"),
    ("_codecs", "encode"), ("io", "BytesIO"), ("_io", "BytesIO"), ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"),
    *(("megatron.core.transformer.enums", n) for n in ("AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope",
                                                       "LayerType", "AttnMaskType", "ModelType")),
    ("megatron.core.enums", "ModelType"), ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    *(("megatron.core.rerun_state_machine", n) for n in ("RerunDiagnostic", "RerunMode", "RerunState")),
    ("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
}  # fmt: skip


class Name:
    """A name that a pickle refers to without calling it, such as the dtype ``torch.bfloat16``."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))


class Call:
    """The inert record of a call that a pickle wants: the name, the arguments and the state set afterwards.

    Subclasses stand for one name each (the unpickler insists on classes); `fields` is the state where that is a dict.
    """

    module = name = ""
    args: tuple
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> "Call":
        call = object.__new__(cls)
        call.args, call.state = args, None
        return call

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None and isinstance(state[1], dict):
            state = state[1]
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes that the pickle sets."""
        return self.state if isinstance(self.state, dict) else {}

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}{self.args!r}"

    def __hash__(self) -> int:
        return id(self)


def call(module: str, name: str, *args: Any, state: Any = None) -> Call:
    """A record of ``module.name(*args)``, with `state` set on the result, for `dump`."""
    record = _record_class(module, name)(*args)
    record.state = state
    return record


_CLASSES: dict[tuple[str, str], type[Call]] = {}


def _record_class(module: str, name: str) -> type[Call]:
    found = _CLASSES.get((module, name))
    if found is None:
        found = _CLASSES[module, name] = type(name, (Call,), {"module": module, "name": name})
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        module = IMPORT_MAPPING.get(module, module)  # torch.save writes protocol 2, with Python 2's module names
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) not in ALLOWED:
            raise ReshardError(
                f"{self.where} holds a pickle that refers to {module}.{name}, which a checkpoint has no need of; refused, nothing was run"
            )
        return _record_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def load(data: bytes, where: str) -> Any:
    """Read a pickle into plain data and `Call` records.

    Raises ReshardError for a name outside the short list and for bytes that are no pickle; nothing is executed either way.
    """
    try:
        return _Unpickler(io.BytesIO(data), where).load()
    except ReshardError:
        raise
    except RecursionError as error:
        raise ReshardError(f"{where} holds a pickle nested too deeply") from error
    except Exception as error:
        raise ReshardError(f"{where} is not a readable pickle ({error})") from error


def dump(value: Any, protocol: int = 4) -> bytes:
    """Write plain data, `Name` and `Call` records as a pickle; strings and names are written once and then referred to."""
    return b"".join((pickle.PROTO, bytes([protocol]), *_Writer(protocol).ops(value), pickle.STOP))


class Persistent:
    """An object that the reader looks up by `pid`, such as a tensor's storage."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        self.pid = pid


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
            out((pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE)[min(len(value), 4)])
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
