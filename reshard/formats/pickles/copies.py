"""Plain data that was read from a pickle, made ready to be written into another one."""

from collections import OrderedDict
from typing import Any

from reshard.core.errors import ReshardError
from reshard.formats.pickles.records import Call, Name, Persistent, call

REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
# Classes that the reader builds itself.
CLASSES = {tuple: Name("torch", "Size"), OrderedDict: Name("collections", "OrderedDict")}
# Parts that several values share are written for each: more than this many are no checkpoint's common state.
MAX_VALUES, MAX_DEPTH, MAX_BITS = 200_000, 100, 2000


def writable(value: Any, where: str) -> Any:
    """Return what `dump` writes so that it reads as `value` does, which `load` has returned.

    Classes that are referred to become names, and the storages of tensors are looked up again, on the CPU.
    Raises ReshardError for what has no such form.
    """
    return _Copy(where).of(value, 0)


class _Copy:
    def __init__(self, where: str) -> None:
        self.where, self.count = where, 0

    def of(self, value: Any, depth: int) -> Any:
        """Return the form of a value that lies so deep in others."""
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_DEPTH:
            raise ReshardError(f"{self.where} holds more values than a checkpoint has, or nests them deeper")
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes, Name):
            return value
        if kind is int and value.bit_length() < MAX_BITS:
            return value
        if kind in (list, tuple):
            return kind(self.of(each, depth + 1) for each in value)
        if kind is OrderedDict and not value:
            return call("collections", "OrderedDict")
        if kind in (dict, OrderedDict):
            return {self.of(key, depth + 1): self.of(each, depth + 1) for key, each in value.items()}
        if kind in (set, frozenset):
            members = [self.of(each, depth + 1) for each in value]
            return call("builtins", kind.__name__, sorted(members, key=repr))
        if isinstance(value, Call):
            return self._call(value, depth + 1)
        if isinstance(value, type) and issubclass(value, Call):
            return Name(value.module, value.name)
        if isinstance(value, type) and value in CLASSES:
            return CLASSES[value]
        raise ReshardError(f"{self.where} holds a {kind.__name__} that cannot be written again")

    def _call(self, value: Call, depth: int) -> Call:
        arguments = list(value.args)
        if value.name in REBUILDS and arguments and type(arguments[0]) is tuple and len(arguments[0]) == 5:
            kind, storage, key, _, size = arguments[0]
            arguments[0] = Persistent((kind, self.of(storage, depth), key, "cpu", size))
            arguments[1:] = [self.of(each, depth) for each in arguments[1:]]
        else:
            arguments = [self.of(each, depth) for each in arguments]
        state = None if value.state is None else self.of(value.state, depth)
        return call(value.module, value.name, *arguments, state=state)
