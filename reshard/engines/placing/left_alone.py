"""The tensors that a refit leaves alone: which of them are whole, and copies of them on the host. An engine may lose
tensors, as in sleep, and no trainer of the refit has these."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from reshard.core.errors import ReshardError, listed
from reshard.engines.placing.accounts import LEFT_ALONE, Account
from reshard.refit.guard import Guard

HALF_WRITTEN = -2  # no count of losses either
DRAFT = "draft."  # begins the names of a drafter's tensors, as in vLLM itself from 0.33 on


class _Written(NamedTuple):
    """The last time that a refit wrote a tensor: how often it had been lost by then, or `HALF_WRITTEN`; and how
    often its engine had loaded all weights itself."""

    losses: int
    loads: int


class _Copy(NamedTuple):
    """A copy on the host, and how often others than refits had written weights by then."""

    tensor: torch.Tensor
    other_writes: int


@dataclass
class _Record:
    """The history of the tensors of a model and its drafter, by name; it outlasts connections."""

    written: dict[str, _Written] = field(default_factory=dict)
    brought: set[str] = field(default_factory=set)  # by a refit, ever
    copies: dict[str, _Copy] = field(default_factory=dict)


_records: WeakKeyDictionary[torch.nn.Module, _Record] = WeakKeyDictionary()


class LeftAlone:
    """Which tensors of a `module` and its drafter are whole, by name, and copies on the host of those that are left
    alone.

    One is whole if a refit has written it to the end, or the engine has loaded it, since it was last lost. One that is
    not is written again from its copy, if that is of what was there last; without one there is nothing to serve.

    Those in `kept` are lost only where the guard counts losses of buffers, the others wherever it counts losses. Of an
    engine that has started, what it loads itself and what others write are its model's tensors, and never its
    drafter's.
    """

    def __init__(self, module: torch.nn.Module, guard: Guard) -> None:
        self.guard = guard
        self.kept: Collection[str] = ()
        self._record = _records.setdefault(module, _Record())

    def _losses(self, name: str) -> int:
        return self.guard.buffer_losses if name in self.kept else self.guard.losses

    def _written(self, name: str) -> _Written | None:
        """Return when a refit last wrote a tensor; None if it never did, or the engine has loaded it since."""
        written = self._record.written.get(name)
        is_older = written is not None and written.loads != self.guard.loads
        return None if is_older and not name.startswith(DRAFT) else written

    def is_whole(self, name: str) -> bool:
        """Return True if a tensor was written to the end, or loaded, since it was last lost."""
        written = self._written(name)
        if written is not None:
            return written.losses == self._losses(name)
        if name in self.kept:
            return self.guard.buffer_losses == 0
        if name.startswith(DRAFT):
            return self.guard.was_whole and self.guard.losses == 0
        return self.guard.loaded_at == self.guard.losses

    def has_copy(self, name: str) -> bool:
        """Return True if there is a copy of what was last there of a tensor."""
        copy = self._record.copies.get(name)
        return copy is not None and (name.startswith(DRAFT) or copy.other_writes == self.guard.other_writes)

    def save(self, tensors: Mapping[str, torch.Tensor], anew: bool) -> None:
        """Copy to the host those of these tensors that are whole; without `anew`, if they have no copies."""
        for name, tensor in tensors.items():
            if self.is_whole(name) and (anew or not self.has_copy(name)):
                self._record.copies[name] = _Copy(tensor.detach().cpu().clone(), self.guard.other_writes)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write those of these tensors that were lost, and have copies."""
        for name, tensor in tensors.items():
            if not self.is_whole(name) and self.has_copy(name):
                tensor.data.copy_(self._record.copies[name].tensor)
                self.end([name])

    # At every refit, of all that it brings: names are not looked at one by one.

    def begin(self, names: Iterable[str]) -> None:
        """Note that a refit begins to write these tensors."""
        brought = {*names}
        for name in self._record.copies.keys() & brought:
            del self._record.copies[name]
        self._record.brought |= brought
        self._note(brought, HALF_WRITTEN)

    def end(self, names: Iterable[str]) -> None:
        """Note that a refit has written these tensors to the end."""
        brought = {*names}
        self._note(brought.difference(self.kept), self.guard.losses)
        self._note(brought.intersection(self.kept), self.guard.buffer_losses)

    def _note(self, names: Iterable[str], losses: int) -> None:
        self._record.written |= dict.fromkeys(names, _Written(losses, self.guard.loads))

    def were_brought(self, names: Iterable[str]) -> bool:
        """Return True if refits have written any of these tensors since the engine started."""
        return not self._record.brought.isdisjoint(names)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of these names whose tensors are not whole, and have no copies; a drafter's first."""
        lost = (name for name in names if not self.is_whole(name) and not self.has_copy(name))
        return sorted(lost, key=lambda name: (not name.startswith(DRAFT), name))

    def check(self, names: Iterable[str], brings_none: bool, load: str, lose: str) -> None:
        """Raise ReshardError if tensors that no refit is to bring are neither whole nor restored by one.

        `brings_none` if the trainer has nothing of the drafter. `load` is the engine's call that loads its model again;
        a drafter is there once more when the engine is started, and connected before `lose`.
        """
        missing = self.missing(names)
        if not missing:
            return
        engine, is_drafters = self.guard.engine, missing[0].startswith(DRAFT)
        is_one = is_drafters or len(missing) == 1
        it, they, are, were = ("it", "it", "is", "was") if is_one else ("them", "they", "are", "were")
        written = self._written(missing[0])
        if written is not None and written.losses == HALF_WRITTEN:
            why = f"a refit of {it} failed"
        elif written is None and not self.guard.losses:
            why = f"{they} may have been lost in sleep before reshard was connected"
        else:
            why = f"{they} {were} lost in sleep"
        what, lacks = listed(missing, 2), f"does not bring {it}"
        again = f"load all weights again ({load})"
        if is_drafters:
            what, lacks = "drafter", "has no drafter" if brings_none else f"does not bring all of {it}"
            again = f"start {engine} again, and connect before {lose}"
        raise ReshardError(
            f"this {engine}'s {what} {are} not whole, since {why}, and the trainer {lacks}: refit {it} from a trainer "
            f"that has {it}, or {again}"
        )


def left_alone(
    tensors: Mapping[str, torch.Tensor], accounts: Mapping[str, Account]
) -> dict[str, torch.Tensor]:
    """Return those of these tensors that a refit leaves alone by their accounts."""
    return {name: tensor for name, tensor in tensors.items() if accounts[name].what == LEFT_ALONE}
