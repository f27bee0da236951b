"""Plain data that was read from a pickle, made ready to be written into another one."""

from collections import OrderedDict
from typing import Any

from reshard.core.errors import ReshardError
from reshard.formats.pickles.records import Call, Name, Persistent, call

REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
# Classes that the reader builds itself.
CLASSES = {tuple: Name("torch", "Size"), OrderedDict: Name("collections", "OrderedDict")}
# Parts that several values share are written for each: more than this many are no checkpoint's common state.
MAX_VALUES = 4_000_000


def writable(value: Any, where: str) -> Any:
    """Return what `dump` writes so that it reads as `value` does, which `load` has returned.

    Classes that are referred to become names, and the storages of tensors are looked up again, on the CPU.
    Raises ReshardError for what has no such form.
    """
    return _Copy(where).of(value)


class _Copy:
    def __init__(self, where: str) -> None:
        self.where, self.count = where, 0

    def of(self, value: Any) -> Any:
        """Return the form of one value."""
        self.count += 1
        if self.count > MAX_VALUES:
            raise ReshardError(f"{self.where} holds more than {MAX_VALUES:,} values, which no checkpoint has")
        kind = type(value)
        if value is None or kind in (bool, int, float, str, bytes, Name):
            return value
        if kind is OrderedDict:
            record = call("collections", "OrderedDict")
            return self._with_items(value) if value else record
        if kind is dict:
            return self._with_items(value)
        if kind is list:
            return [self.of(each) for each in value]
        if kind is tuple:
            return tuple(self.of(each) for each in value)
        if kind in (set, frozenset):
            return call("builtins", kind.__name__, sorted(map(self.of, value), key=repr))
        if isinstance(value, Call):
            return self._call(value)
        if isinstance(value, type):
            if issubclass(value, Call):
                return Name(value.module, value.name)
            if value in CLASSES:
                return CLASSES[value]
        raise ReshardError(f"{self.where} holds a {kind.__name__}, which cannot be written again")

    def _with_items(self, value: dict) -> dict:
        return {self.of(key): self.of(each) for key, each in value.items()}

    def _call(self, value: Call) -> Call:
        arguments = value.args
        is_tensor = value.name in REBUILDS and arguments and type(arguments[0]) is tuple
        if is_tensor and len(arguments[0]) == 5:
            kind, storage, key, _, size = arguments[0]
            pid = (kind, self.of(storage), key, "cpu", size)
            rest = tuple(self.of(each) for each in arguments[1:])
            return call(value.module, value.name, Persistent(pid), *rest)
        state = None if value.state is None else self.of(value.state)
        return call(value.module, value.name, *(self.of(each) for each in arguments), state=state)
