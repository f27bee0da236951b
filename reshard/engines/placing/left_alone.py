"""The tensors that a refit leaves alone: which of them are whole, and copies of them on the host. An engine may lose
tensors, as in sleep, and no trainer of the refit has these."""

from collections.abc import Callable, Collection, Iterable, Mapping
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
    """How often a tensor had been lost when a refit last wrote it, or `HALF_WRITTEN`; and how often its engine had
    loaded all weights itself by then."""

    losses: int
    loads: int


class _Copy(NamedTuple):
    """A copy on the host, and how often others than refits had written weights by then."""

    tensor: torch.Tensor
    other_writes: int


@dataclass
class _Record:
    """What has become of the tensors of a model and its drafter, by name; it outlasts connections."""

    written: dict[str, _Written] = field(default_factory=dict)
    copies: dict[str, _Copy] = field(default_factory=dict)


_records: WeakKeyDictionary[torch.nn.Module, _Record] = WeakKeyDictionary()


class LeftAlone:
    """Which tensors of a `module` and its drafter are whole, by name, and copies on the host of those that are left
    alone.

    One is whole if a refit has written it to the end, or the engine has loaded it, since it was last lost. One that is
    not is written again from its copy, if that is of what was there last; without one there is nothing to serve.

    `buffers` are the names of those that are no parameters. Those of which `is_kept` is true are lost only where the
    guard counts losses of buffers, the others wherever it counts losses. An engine loads its model itself, and never
    its drafter, unless it starts.
    """

    def __init__(self, module: torch.nn.Module, guard: Guard, is_kept: Callable[[str], bool]) -> None:
        self.guard, self.is_kept = guard, is_kept
        self.buffers: Collection[str] = ()
        self._record = _records.setdefault(module, _Record())

    def _losses(self, name: str) -> int:
        return self.guard.buffer_losses if self.is_kept(name) else self.guard.losses

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
        if name in self.buffers or self.is_kept(name):
            return self._losses(name) == 0
        if name.startswith(DRAFT):
            return self.guard.was_whole and self.guard.losses == 0
        return self.guard.loaded_at == self.guard.losses

    def has_copy(self, name: str) -> bool:
        """Return True if there is a copy of what was last there of a tensor."""
        copy = self._record.copies.get(name)
        return copy is not None and copy.other_writes == self.guard.other_writes

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
                self._note(name, self._losses(name))

    def begin(self, names: Iterable[str]) -> None:
        """Note that a refit begins to write these tensors."""
        for name in names:
            self._record.copies.pop(name, None)
            self._note(name, HALF_WRITTEN)

    def end(self, names: Iterable[str]) -> None:
        """Note that a refit has written these tensors to the end."""
        for name in names:
            self._note(name, self._losses(name))

    def _note(self, name: str, losses: int) -> None:
        self._record.written[name] = _Written(losses, self.guard.loads)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of these names whose tensors are not whole, and have no copies."""
        return sorted(name for name in names if not self.is_whole(name) and not self.has_copy(name))

    def check(self, names: Iterable[str], load: str, lose: str) -> None:
        """Raise ReshardError if tensors that no refit is to bring are neither whole nor restored by one. `load` is what
        loads the model's again, and `lose` what the engine does when it loses tensors."""
        missing = self.missing(names)
        if not missing:
            return
        engine = self.guard.engine
        drafter = [name for name in missing if name.startswith(DRAFT)]
        if drafter:
            what = "drafter"
            again = f"start {engine} again, and connect before it {lose}"
        else:
            what, again = listed(missing, 2), f"load {load}"
        it, is_not, was = (
            ("it", "is not", "was") if drafter or len(missing) == 1 else ("them", "are not", "were")
        )
        they = "they" if it == "them" else it
        written = self._written((drafter or missing)[0])
        if written is not None and written.losses == HALF_WRITTEN:
            why = f"a refit of {it} failed"
        elif written is None and not self.guard.losses:
            why = f"{they} may have been lost in sleep before reshard was connected"
        else:
            why = f"{they} {was} lost in sleep"
        lacks = "has no drafter" if drafter else f"does not bring {it}"
        raise ReshardError(
            f"this {engine}'s {what} {is_not} whole, since {why}, and the trainer {lacks}: refit {it} from a trainer "
            f"that has {it}, or {again}"
        )


def left_alone(
    tensors: Mapping[str, torch.Tensor], accounts: Mapping[str, Account]
) -> dict[str, torch.Tensor]:
    """Return those of these tensors that a refit leaves alone by their accounts."""
    return {name: tensor for name, tensor in tensors.items() if accounts[name].what == LEFT_ALONE}
