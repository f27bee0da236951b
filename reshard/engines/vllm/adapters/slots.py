"""The slots of a vLLM in which a trainer's adapter is, and the requests that they serve.

An adapter has two slots, if vLLM has two (``max_loras``): a refit writes into the one that does not serve
new requests, and these are served from it once all has arrived. Requests that run end with the version that
they began with. Each version has a name of its own, by which vLLM's prefix cache tells them apart.
"""

from collections.abc import Callable
from typing import Any
from zlib import crc32

from reshard.core.errors import ReshardError
from reshard.engines.vllm.adapters.compat import (
    free,
    free_slots,
    release,
    renumbered,
    request_for,
    reserve,
    running_adapters,
    touch,
    with_request,
    worker_manager_of,
)

MOST_SLOTS = 2


def slots_of(name: str, manager: Any, unfit: Callable[[], str]) -> "AdapterSlots":
    """Return the slots of an adapter, the same as before: they are kept at vLLM's `manager`, which outlasts
    connections; see `AdapterSlots`."""
    known: dict[str, AdapterSlots] = vars(manager).setdefault("reshard_slots", {})
    if name not in known:
        known[name] = AdapterSlots(name, manager, unfit)
    known[name].unfit = unfit
    return known[name]


class AdapterSlots:
    """The slots of the adapter `name`, given vLLM's `manager` of adapters.

    `unfit` says why the engine must not serve it, or nothing. Requests for the adapter by its name go to
    its newest version; those by `request` to the one that was the newest then. Between `take` and `release`
    it keeps its slots; after that it is served until vLLM needs them for other adapters, or is asked to
    remove it.
    """

    def __init__(self, name: str, manager: Any, unfit: Callable[[], str]) -> None:
        self.name, self.manager, self.unfit = name, manager, unfit
        self.id_of: dict[int, int] = {}
        self._keeps = False  # its slots
        self.versions: dict[int, int] = {}  # by slot, of whole adapters
        self.current: int | None = None
        # Trainers that ask for an adapter by a number look for that among the ids that vLLM lists, and would ask
        # for the model alone where it is missing: it is there before the first version, and requests are refused.
        self.named_id = int(name) if name.isascii() and name.isdecimal() else None
        self._watched: list[Any] = []  # what serves requests from the slots already

    def take(self) -> None:
        """Take slots that no adapter has.

        Raises ReshardError if other adapters have all.
        """
        self._forget_evicted()
        first = crc32(self.name.encode()) >> 2 | 1 << 29  # far from the ids that people give
        ids = [first + index for index in range(MOST_SLOTS) if first + index not in self.id_of.values()]
        self.id_of |= dict(zip(reversed(free_slots(self.manager)), ids, strict=False))
        if not self.id_of:
            raise ReshardError(
                f"all {len(self.manager.lora_index_to_id)} slots of this vLLM have other adapters: start it with a larger max_loras"
            )
        self._keeps = True
        self._reserve()

    def release(self) -> None:
        """Let vLLM have the slots once it needs them; those without a whole version at once."""
        self._keeps = False
        for slot, identity in list(self.id_of.items()):
            if slot in self.versions:
                release(self.manager, identity)
            else:
                free(self.manager, self.id_of.pop(slot))

    def _forget_evicted(self) -> None:
        """Hold no version any more in slots that vLLM has given to other adapters."""
        for slot, identity in list(self.id_of.items()):
            if self.manager.lora_index_to_id[slot] != identity:
                del self.id_of[slot]
                self.versions.pop(slot, None)
                self.current = None if self.current == slot else self.current

    def _remove(self, identity: int) -> bool:
        """Remove the adapter, unless it keeps its slots; return whether it was removed."""
        if self._keeps:
            return False
        held = [slot for slot, own in self.id_of.items() if identity in (own, self.named_id)]
        for slot in held:
            free(self.manager, self.id_of[slot])
        self._forget_evicted()
        return bool(held)

    def _reserve(self) -> None:
        for slot, identity in self.id_of.items():
            reserve(self.manager, slot, identity)

    # Writing

    def begin(self, front: Any) -> int:
        """Return the slot that a refit may write into, which from now on holds nothing whole.

        Raises ReshardError if requests that are not done are served from it.
        """
        slot = next((one for one in self.id_of if one != self.current), None)
        if slot is None:
            slot = next(iter(self.id_of))
        if slot in self.versions:
            running = sum(name == self._versioned(slot) for name in running_adapters(front))
            if running:
                raise ReshardError(
                    f"version {self.versions[slot]} of adapter {self.name!r} still serves {running} unfinished requests, and "
                    f"this refit would write over it: let them finish, or abort them"
                )
        self.versions.pop(slot, None)
        if slot == self.current:
            self.current = None
        return slot

    def forget(self) -> None:
        """Hold no version any more: vLLM has lost what was in the slots."""
        self.versions.clear()
        self.current = None

    def end(self, slot: int, version: int) -> None:
        """Serve new requests from this slot, which has the whole of this version."""
        for other in [other for other, held in self.versions.items() if held == version and other != slot]:
            del self.versions[other]  # a version that was refitted once more
        self.versions[slot], self.current = version, slot

    # Requests

    def request(self) -> Any:
        """Return vLLM's ``LoRARequest`` for the newest version. Raises ReshardError if no version may be
        served."""
        return self._request(self._newest())

    def _newest(self) -> int:
        self._forget_evicted()
        reason = self.unfit() or ("no version of it" if self.current is None else "")
        if reason:
            raise ReshardError(
                f"adapter {self.name!r} cannot be served, since this vLLM holds {reason}: refit it first"
            )
        assert self.current is not None
        return self.current

    def _request(self, slot: int) -> Any:
        return request_for(self._versioned(slot), self.id_of[slot])

    def _versioned(self, slot: int) -> str:
        return f"{self.name}@{self.versions[slot]}"

    def slot_of(self, request: Any) -> int | None:
        """Return the slot that serves a request; None for another adapter's.

        Raises ReshardError for this adapter's where it may not be served, or its version is gone.
        """
        self._forget_evicted()
        name, _, version = request.lora_name.partition("@")
        if name != self.name:
            if self._owns(request.lora_int_id):
                raise ReshardError(
                    f"adapter {request.lora_name!r} has the id of {self.name!r}, which a trainer refits: give it another id"
                )
            return None
        slots = [slot for slot, held in self.versions.items() if str(held) == version]
        if slots and not self.unfit():
            return slots[0]
        newest = self._newest()
        if not version:
            return newest
        raise ReshardError(
            f"this vLLM no longer holds version {version} of adapter {self.name!r}, but "
            f"{' and '.join(str(held) for held in sorted(self.versions.values()))}: send the request again"
        )

    def _owns(self, identity: int) -> bool:
        """Return True for an id by which this adapter is asked for."""
        return identity == self.named_id or identity in self.id_of.values()

    def _listed(self) -> set[int]:
        """Return the ids under which vLLM lists this adapter."""
        self._forget_evicted()
        if self.named_id is not None:
            return {self.named_id} if self._keeps or self.versions else set()
        return {self.id_of[slot] for slot in self.versions}

    def as_served(self, request: Any) -> Any:
        """Return a request for an adapter as the slots serve it: another adapter's as it is."""
        slot = self.slot_of(request)
        return request if slot is None else self._request(slot)

    # vLLM's own ways to adapters

    def watch(self, worker: Any, front: Any) -> None:
        """Serve requests for the adapter from its slots from now on, in this worker or in the engine of this
        process (`front`); either may be None."""
        if front is not None and front not in self._watched:
            self._watched.append(front)
            front.add_request = with_request(front.add_request, self.as_served)
        loader = worker_manager_of(worker)
        if loader is None or loader in self._watched:
            return
        self._watched.append(loader)
        add, remove, listed = loader.add_adapter, loader.remove_adapter, loader.list_adapters
        activate, remove_all = loader.set_active_adapters, loader.remove_all_adapters

        def set_active_adapters(requests: set[Any], mapping: Any) -> None:
            served = {request: self.as_served(request) for request in requests}
            ids = {one.lora_int_id: other.lora_int_id for one, other in served.items()}
            for identity in set(self.id_of.values()) & set(ids.values()):
                touch(self.manager, identity)
            activate(set(served.values()), renumbered(mapping, ids))

        def remove_all_adapters() -> None:
            remove_all()
            if self._keeps:
                self._reserve()

        loader.set_active_adapters, loader.remove_all_adapters = set_active_adapters, remove_all_adapters
        loader.add_adapter = lambda request: True if self.slot_of(request) is not None else add(request)
        loader.remove_adapter = lambda one: self._remove(one) if self._owns(one) else remove(one)
        loader.list_adapters = lambda: listed() | self._listed()
