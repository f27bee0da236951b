"""Pickles without trust and without torch.

A pickle is a program that may call anything. `load` runs it on a machine of its own that can only build plain
data: a short list of names stands for inert records of the call (`Call`), never for the real class, and any
other name refuses the whole file before it is called. What a few bytes can blow up (memo indices, shared
nesting, colliding keys) is bounded. `dump` writes pickles of plain data and of such records, so that torch
and Megatron find their own classes when they read the file.
"""

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from reshard.core.errors import ReshardError, first_line

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
    ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals"),
    *((module, n) for module in ("pathlib", "pathlib._local") for n in ("PosixPath", "PurePosixPath")),  # of Python 3.13 the second
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
    """The inert record of a call that a pickle wants: the name, the arguments and the state set afterward.

    Subclasses stand for one name each (the unpickler insists on classes); `fields` is the state where that is
    a dict.
    """

    __slots__ = ("args", "state")
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
        # arguments may share parts in a way that takes forever to print
        return f"{self.module}.{self.name}(...)"

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
        found = _CLASSES[module, name] = type(
            name, (Call,), {"__slots__": (), "module": module, "name": name}
        )
    return found


# A record of a checkpoint takes about ten bytes of a pickle for each container in it; more than this many are
# no checkpoint's.
MAX_CONTAINERS = 16_000_000
_SCALARS = frozenset((str, bytes, bool, type(None)))


def load(data: bytes, where: str) -> Any:
    """Read a pickle into plain data and `Call` records.

    Raises ReshardError for a name outside the short list and for bytes that are no pickle; nothing is
    executed either way.
    """
    containers = sum(map(data.count, (b"(", b")", b"]", b"}", b"\x8f"))) if len(data) > MAX_CONTAINERS else 0
    if containers > MAX_CONTAINERS:
        raise ReshardError(
            f"{where} holds a pickle of more than {MAX_CONTAINERS:,} containers, which no checkpoint has"
        )
    try:
        return _run(data, where)
    except ReshardError:
        raise
    except IndexError as error:
        raise ReshardError(
            f"{where} is not a readable pickle (it ends early or takes what is not there)"
        ) from error
    except KeyError as error:
        raise ReshardError(
            f"{where} is not a readable pickle (it refers to what it has not stored)"
        ) from error
    except (ValueError, TypeError, struct.error, OverflowError) as error:
        raise ReshardError(f"{where} is not a readable pickle ({first_line(error)})") from error


def _run(data: bytes, where: str) -> Any:
    """The pickle machine: a stack, marks on it, and a memo. Opcodes that no Python 3 pickler writes are
    refused.

    A large checkpoint's metadata has millions of opcodes: the frequent ones come first, and are written out.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push, pop, new = stack.append, stack.pop, object.__new__
    signed, unsigned = struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from
    at = 0
    while True:
        op = data[at]
        at += 1
        if op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op < 0x60:
            if op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x4A:  # BININT
                push(signed(data, at)[0])
                at += 4
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
            elif op == 0x52:  # REDUCE
                args, kind = pop(), pop()
                if (
                    kind is tuple
                    and type(args) is tuple
                    and len(args) == 1
                    and type(args[0]) in (tuple, list)
                ):
                    push(tuple(args[0]))  # torch.Size
                elif kind is OrderedDict and args == ():
                    push(OrderedDict())
                else:
                    push(_record(kind, args, new))
            elif op == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x2E:  # STOP
                return pop()
            else:
                at = _rare(op, data, at, stack, marks, where)
        elif op == 0x74:  # TUPLE
            mark = marks.pop()
            stack[mark:] = (tuple(stack[mark:]),)
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x75:  # SETITEMS
            mark = marks.pop()
            _set_items(stack[mark - 1], stack[mark:])
            del stack[mark:]
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x81:  # NEWOBJ
            args, kind = pop(), pop()
            push(_record(kind, args, new))
        elif op == 0x62:  # BUILD
            state = pop()
            if isinstance(stack[-1], Call):
                stack[-1].__setstate__(state)
            # attributes of an OrderedDict carry nothing that is read here
            elif not isinstance(stack[-1], OrderedDict):
                raise ValueError("it sets the state of what has none")
        elif op == 0x6A:  # LONG_BINGET
            push(memo[unsigned(data, at)[0]])
            at += 4
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[unsigned(data, at)[0]] = stack[-1]
            at += 4
        else:
            at = _rare(op, data, at, stack, marks, where)


def _rare(op: int, data: bytes, at: int, stack: list, marks: list[int], where: str) -> int:
    """Carry out one of the other opcodes, whose argument starts at `at`; where the next one starts."""
    if op in _COUNTED:  # strings, bytes and long integers, with their length before them
        form, kind = _COUNTED[op]
        (n,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        if n < 0 or n > len(data) - at:
            raise IndexError
        raw = data[at : at + n]
        stack.append(
            str(raw, "utf-8")
            if kind is str
            else int.from_bytes(raw, "little", signed=True)
            if kind is int
            else kind(raw)
        )
        return at + n
    if op in (0x86, 0x87):  # TUPLE2, TUPLE3
        n = op - 0x84
        if len(stack) < n:
            raise IndexError
        stack[-n:] = (tuple(stack[-n:]),)
    elif op in (0x88, 0x89):  # NEWTRUE, NEWFALSE
        stack.append(op == 0x88)
    elif op == 0x47:  # BINFLOAT
        stack.append(struct.unpack_from(">d", data, at)[0])
        return at + 8
    elif op == 0x5D:  # EMPTY_LIST
        stack.append([])
    elif op in (0x61, 0x65, 0x90):  # APPEND, APPENDS, ADDITEMS
        mark = len(stack) - 1 if op == 0x61 else marks.pop()
        target, values = stack[mark - 1] if mark > 0 else None, stack[mark:]
        del stack[mark:]
        if op == 0x90 and type(target) is set:
            target.update(map(_key, values))
        elif op != 0x90 and type(target) is list:
            target.extend(values)
        else:
            raise ValueError("it adds to what is no list or set")
    elif op == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        _set_items(stack[-1], [key, value])
    elif op == 0x63:  # GLOBAL
        module_end = data.index(b"\n", at)
        name_end = data.index(b"\n", module_end + 1)
        stack.append(_name(data[at:module_end].decode(), data[module_end + 1 : name_end].decode(), where))
        return name_end + 1
    elif op == 0x93:  # STACK_GLOBAL
        name, module = stack.pop(), stack.pop()
        stack.append(_name(module, name, where))
    elif op == 0x51:  # BINPERSID asks the reader for the object of an id; the id itself stands for it
        stack[-1] = stack[-1]
    elif op == 0x92:  # NEWOBJ_EX
        _, args, kind = stack.pop(), stack.pop(), stack.pop()
        stack.append(_record(kind, args, object.__new__))
    elif op == 0x8F:  # EMPTY_SET
        stack.append(set())
    elif op == 0x91:  # FROZENSET
        mark = marks.pop()
        stack[mark:] = (frozenset(map(_key, stack[mark:])),)
    elif op == 0x80:  # PROTO
        if data[at] > 5:
            raise ValueError(f"protocol {data[at]}")
        return at + 1
    elif op == 0x95:  # FRAME, a hint for readers of streams
        return at + 8
    elif op == 0x30:  # POP
        stack.pop()
    elif op == 0x31:  # POP_MARK
        del stack[marks.pop() :]
    else:
        raise ValueError(f"opcode {bytes([op])!r} at byte {at - 1}")
    return at


_COUNTED: dict[int, tuple[str, type]] = {
    0x8C: ("<B", str), 0x58: ("<I", str), 0x8D: ("<Q", str),
    0x43: ("<B", bytes), 0x42: ("<I", bytes), 0x8E: ("<Q", bytes), 0x96: ("<Q", bytearray),
    0x8A: ("<B", int), 0x8B: ("<i", int),
}  # fmt: skip


def _name(module: Any, name: Any, where: str) -> Any:
    """What stands for a name of the short list. Raises ReshardError for any other."""
    if type(module) is not str or type(name) is not str:
        raise ValueError("a name that is no text")
    module = IMPORT_MAPPING.get(module, module)  # torch.save writes protocol 2, with Python 2's module names
    if (module, name) == ("torch", "Size"):
        return tuple
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if (module, name) not in ALLOWED:
        raise ReshardError(
            f"{where} holds a pickle that refers to {f'{module}.{name}':.200}, which a checkpoint has no "
            f"need of; refused, nothing was run"
        )
    return _record_class(module, name)


def _record(kind: Any, args: Any, new: Callable) -> Call:
    if type(kind) is not type or not issubclass(kind, Call) or type(args) is not tuple:
        raise ValueError("it makes an object of what is no name")
    record = new(kind)
    record.args, record.state = args, None
    return record


def _key(key: Any) -> Any:
    """A key of a dict or member of a set: nothing that takes long to hash or was made to collide."""
    kind = type(key)
    if kind in _SCALARS or isinstance(key, (Call, type)) or (kind is int and -(1 << 62) < key < 1 << 62):
        return key
    if kind is tuple and all(
        type(item) in _SCALARS or (type(item) is int and -(1 << 62) < item < 1 << 62) for item in key
    ):
        return key
    raise ValueError(f"a key of type {kind.__name__}")


def _set_items(target: Any, values: list) -> None:
    if len(values) % 2 or not isinstance(target, dict):
        raise ValueError("it sets items of what is no dict")
    for i in range(0, len(values), 2):
        key = values[i]
        target[key if type(key) is str else _key(key)] = values[i + 1]


def dump(value: Any, protocol: int = 4) -> bytes:
    """Write plain data, `Name` and `Call` records as a pickle; strings and names are written once and then
    referred to."""
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
