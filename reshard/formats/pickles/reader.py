"""The pickle machine: a stack, marks on it, and a memo. Opcodes that no Python 3 pickler writes are
refused."""

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from reshard.core.errors import ReshardError, first_line
from reshard.formats.pickles.records import ALLOWED, Call, record_class

# A record of a checkpoint takes about ten bytes of a pickle for each container in it; more than
# this many are no checkpoint's.
MAX_CONTAINERS = 16_000_000
_SCALARS = frozenset((str, bytes, bool, type(None)))


def load(data: bytes, where: str) -> Any:
    """Read a pickle into plain data and `Call` records.

    Raises ReshardError for a name outside the short list and for bytes that are not a pickle; nothing is
    executed either way.
    """
    containers = sum(map(data.count, (b"(", b")", b"]", b"}", b"\x8f"))) if len(data) > MAX_CONTAINERS else 0
    if containers > MAX_CONTAINERS:
        raise ReshardError(
            f"{where} holds a pickle of more than {MAX_CONTAINERS:,} containers, which no checkpoint has"
        )
    try:
        return _Machine(data, where).run()
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


# The frequent opcodes, as numbers.
BINGET = pickle.BINGET[0]
LONG_BINGET = pickle.LONG_BINGET[0]
BININT = pickle.BININT[0]
BININT1 = pickle.BININT1[0]
BININT2 = pickle.BININT2[0]
MEMOIZE = pickle.MEMOIZE[0]
MARK = pickle.MARK[0]
STOP = pickle.STOP[0]
REDUCE = pickle.REDUCE[0]
NEWOBJ = pickle.NEWOBJ[0]
BUILD = pickle.BUILD[0]
SETITEMS = pickle.SETITEMS[0]
EMPTY_DICT = pickle.EMPTY_DICT[0]
EMPTY_TUPLE = pickle.EMPTY_TUPLE[0]
TUPLE = pickle.TUPLE[0]
TUPLE1 = pickle.TUPLE1[0]
_read_int, _read_index = struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from


class _Machine:
    """The state of one pickle. The frequent opcodes are in `run`, since the metadata of a large
    checkpoint has millions of them; each of the others is a method, which takes where its
    argument starts and returns where the next opcode does."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run the pickle; return what it leaves."""
        data, stack, marks, memo = self.data, self.stack, self.marks, self.memo
        push, pop = stack.append, stack.pop
        at = 0
        while True:
            op = data[at]
            at += 1
            if op == BINGET:
                push(memo[data[at]])
                at += 1
            elif op == BININT1:
                push(data[at])
                at += 1
            elif op == MARK:
                marks.append(len(stack))
            elif op == BININT:
                push(_read_int(data, at)[0])
                at += 4
            elif op == TUPLE:
                mark = marks.pop()
                stack[mark:] = (tuple(stack[mark:]),)
            elif op == EMPTY_DICT:
                push({})
            elif op == SETITEMS:
                mark = marks.pop()
                _set_items(stack[mark - 1], stack[mark:])
                del stack[mark:]
            elif op == REDUCE:
                arguments, function = pop(), pop()
                push(_reduce(function, arguments))
            elif op == EMPTY_TUPLE:
                push(())
            elif op == TUPLE1:
                stack[-1] = (stack[-1],)
            elif op == NEWOBJ:
                arguments, function = pop(), pop()
                push(_record(function, arguments))
            elif op == BUILD:
                state = pop()
                _set_state(stack[-1], state)
            elif op == BININT2:
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif op == LONG_BINGET:
                push(memo[_read_index(data, at)[0]])
                at += 4
            elif op == MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif op == STOP:
                return pop()
            elif (handler := _OTHERS.get(op)) is not None:
                at = handler(self, at)
            elif op in _COUNTED:
                at = self._counted(op, at)
            else:
                raise ValueError(f"opcode {bytes([op])!r} at byte {at - 1}")

    def _counted(self, op: int, at: int) -> int:
        """Push a string, bytes or a long integer, with its length before it."""
        form, kind = _COUNTED[op]
        (length,) = struct.unpack_from(form, self.data, at)
        at += struct.calcsize(form)
        if length < 0 or length > len(self.data) - at:
            raise IndexError
        raw = self.data[at : at + length]
        if kind is str:
            self.stack.append(str(raw, "utf-8"))
        elif kind is int:
            self.stack.append(int.from_bytes(raw, "little", signed=True))
        else:
            self.stack.append(kind(raw))
        return at + length

    def _tuple_of(self, length: int) -> None:
        if len(self.stack) < length:
            raise IndexError
        self.stack[-length:] = (tuple(self.stack[-length:]),)

    def _tuple2(self, at: int) -> int:
        self._tuple_of(2)
        return at

    def _tuple3(self, at: int) -> int:
        self._tuple_of(3)
        return at

    def _binput(self, at: int) -> int:
        self.memo[self.data[at]] = self.stack[-1]
        return at + 1

    def _long_binput(self, at: int) -> int:
        self.memo[_read_index(self.data, at)[0]] = self.stack[-1]
        return at + 4

    def _none(self, at: int) -> int:
        self.stack.append(None)
        return at

    def _newtrue(self, at: int) -> int:
        self.stack.append(True)
        return at

    def _newfalse(self, at: int) -> int:
        self.stack.append(False)
        return at

    def _binfloat(self, at: int) -> int:
        self.stack.append(struct.unpack_from(">d", self.data, at)[0])
        return at + 8

    def _empty_list(self, at: int) -> int:
        self.stack.append([])
        return at

    def _empty_set(self, at: int) -> int:
        self.stack.append(set())
        return at

    def _frozenset(self, at: int) -> int:
        mark = self.marks.pop()
        self.stack[mark:] = (frozenset(map(_key, self.stack[mark:])),)
        return at

    def _append(self, at: int) -> int:
        self._extend(len(self.stack) - 1, list)
        return at

    def _appends(self, at: int) -> int:
        self._extend(self.marks.pop(), list)
        return at

    def _additems(self, at: int) -> int:
        self._extend(self.marks.pop(), set)
        return at

    def _extend(self, mark: int, kind: type) -> None:
        """Add what is above a mark to the list or set below it."""
        target, values = self.stack[mark - 1] if mark > 0 else None, self.stack[mark:]
        del self.stack[mark:]
        if type(target) is not kind:
            raise ValueError("it adds to what is not a list or set")
        if isinstance(target, set):
            target.update(map(_key, values))
        elif isinstance(target, list):
            target.extend(values)

    def _setitem(self, at: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])
        return at

    def _global(self, at: int) -> int:
        module_end = self.data.index(b"\n", at)
        name_end = self.data.index(b"\n", module_end + 1)
        module, name = self.data[at:module_end].decode(), self.data[module_end + 1 : name_end].decode()
        self.stack.append(_class_of(module, name, self.where))
        return name_end + 1

    def _stack_global(self, at: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_class_of(module, name, self.where))
        return at

    def _binpersid(self, at: int) -> int:
        """Leave the id where it is: it stands for the object that a reader would look up by it."""
        self.stack[-1] = self.stack[-1]
        return at

    def _newobj_ex(self, at: int) -> int:
        _, arguments, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(_record(function, arguments))
        return at

    def _proto(self, at: int) -> int:
        if self.data[at] > 5:
            raise ValueError(f"protocol {self.data[at]}")
        return at + 1

    def _frame(self, at: int) -> int:
        """Skip the length of a frame, a hint for readers of streams."""
        return at + 8

    def _pop(self, at: int) -> int:
        self.stack.pop()
        return at

    def _pop_mark(self, at: int) -> int:
        del self.stack[self.marks.pop() :]
        return at


_OTHERS: dict[int, Callable[[_Machine, int], int]] = {
    pickle.TUPLE2[0]: _Machine._tuple2,
    pickle.TUPLE3[0]: _Machine._tuple3,
    pickle.BINPUT[0]: _Machine._binput,
    pickle.LONG_BINPUT[0]: _Machine._long_binput,
    pickle.NONE[0]: _Machine._none,
    pickle.NEWTRUE[0]: _Machine._newtrue,
    pickle.NEWFALSE[0]: _Machine._newfalse,
    pickle.BINFLOAT[0]: _Machine._binfloat,
    pickle.EMPTY_LIST[0]: _Machine._empty_list,
    pickle.EMPTY_SET[0]: _Machine._empty_set,
    pickle.FROZENSET[0]: _Machine._frozenset,
    pickle.APPEND[0]: _Machine._append,
    pickle.APPENDS[0]: _Machine._appends,
    pickle.ADDITEMS[0]: _Machine._additems,
    pickle.SETITEM[0]: _Machine._setitem,
    pickle.GLOBAL[0]: _Machine._global,
    pickle.STACK_GLOBAL[0]: _Machine._stack_global,
    pickle.BINPERSID[0]: _Machine._binpersid,
    pickle.NEWOBJ_EX[0]: _Machine._newobj_ex,
    pickle.PROTO[0]: _Machine._proto,
    pickle.FRAME[0]: _Machine._frame,
    pickle.POP[0]: _Machine._pop,
    pickle.POP_MARK[0]: _Machine._pop_mark,
}
_COUNTED: dict[int, tuple[str, type]] = {
    pickle.SHORT_BINUNICODE[0]: ("<B", str), pickle.BINUNICODE[0]: ("<I", str), pickle.BINUNICODE8[0]: ("<Q", str),
    pickle.SHORT_BINBYTES[0]: ("<B", bytes), pickle.BINBYTES[0]: ("<I", bytes), pickle.BINBYTES8[0]: ("<Q", bytes),
    pickle.BYTEARRAY8[0]: ("<Q", bytearray), pickle.LONG1[0]: ("<B", int), pickle.LONG4[0]: ("<i", int),
}  # fmt: skip


def _reduce(function: Any, arguments: Any) -> Any:
    """Return what stands for a call: a record, but for ``torch.Size`` and an empty OrderedDict,
    which are built."""
    is_sequence = type(arguments) is tuple and len(arguments) == 1 and type(arguments[0]) in (tuple, list)
    if function is tuple and is_sequence:
        return tuple(arguments[0])
    if function is OrderedDict and arguments == ():
        return OrderedDict()
    return _record(function, arguments)


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, Call):
        target.__setstate__(state)
    # Attributes of an OrderedDict carry nothing that is read here.
    elif not isinstance(target, OrderedDict):
        raise ValueError("it sets the state of what has none")


def _class_of(module: Any, name: Any, where: str) -> Any:
    """Return what stands for a name of the short list. Raises ReshardError for any other."""
    if type(module) is not str or type(name) is not str:
        raise ValueError("a name that is not text")
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
    return record_class(module, name)


def _record(kind: Any, args: Any) -> Call:
    """Return the inert record of a call. Raises ValueError if the callee is not a name."""
    if type(kind) is not type or not issubclass(kind, Call) or type(args) is not tuple:
        raise ValueError("it makes an object of what is not a name")
    record = object.__new__(kind)
    record.args, record.state = args, None
    return record


def _key(key: Any) -> Any:
    """Return a key of a dict or member of a set. Raises ValueError for what may take long to hash,
    or was made to collide."""
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
        raise ValueError("it sets items of what is not a dict")
    for i in range(0, len(values), 2):
        key = values[i]
        target[key if type(key) is str else _key(key)] = values[i + 1]
