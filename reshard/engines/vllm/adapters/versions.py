"""The versions of refitted adapters that a rank of vLLM can serve, each under an id and a name of its own.

vLLM's manager gives ids slots, and takes these back, as for the adapters that it loads from a path; where
that copies from its cache on the host, a version is copied from memory of ours. The name keys vLLM's prefix
cache. An id serves one version for life, and is never used again.

A request has an id when it comes here: `reshard.engines.vllm.requests.adapters` gives requests by an
adapter's plain name that of the newest version, where they enter the engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.adapters.compat import free, request_for, take_slot
from reshard.engines.vllm.adapters.stages import Stages

FIRST_ID, IDS = 1 << 29, 1 << 29  # far from the ids that people give, and in the 32 bits that vLLM has


def identity_of(attempt: bytes) -> int:
    """Return the id of what a refit brings, which all ranks derive from what was drawn for it."""
    return FIRST_ID + int.from_bytes(attempt[:4], "little") % IDS


@dataclass(eq=False)
class Version:
    """A version of the adapter `name`, whose requests ask for `lora_name` and `identity`.

    Its matrices are in `memory`, and as long as that is None where they arrived in `stages`. `writes` is the
    count of writes to the weights below when it was brought: on others it is not served. `origin` says whose number it
    is (`reshard.refit.options.ConnectOptions`).
    """

    name: str
    number: int
    lora_name: str
    identity: int
    stages: Stages
    writes: int
    memory: torch.Tensor | None = None
    origin: str = ""


class Versions:
    """All versions of all adapters that trainers refit, given vLLM's `manager` of adapters, the `guard` of the
    weights below, and vLLM's `wrappers` of layers by name. It outlasts connections."""

    def __init__(self, manager: Any, guard: Any, wrappers: Mapping[str, Any]) -> None:
        self.manager, self.guard, self.wrappers = manager, guard, wrappers
        self.held: dict[int, Version] = {}
        self.newest: dict[str, Version | None] = {}  # by the name of each adapter that was ever connected
        self._connected: set[str] = set()
        self._in_use: set[int] = set()  # ids that requests may have
        self._began = 0  # the id of the last refit that was begun
        self._filled: dict[int, Any] = {}  # by slot, what it has zeros around
        self._losses = guard.losses
        self._loader: Any = None  # which serves requests from here already
        self._activate = manager.activate_adapter
        manager.activate_adapter = self._activated

    # Connections

    def connect(self, name: str) -> None:
        """Keep the versions of an adapter until `disconnect`, whoever asks vLLM to remove it."""
        self.newest.setdefault(name, None)
        self._connected.add(name)

    def disconnect(self, name: str) -> None:
        """Let vLLM remove the adapter, which is served until then."""
        self._connected.discard(name)

    # Writing

    def begin(self, identity: int, stages: Stages) -> None:
        """Begin a refit that brings what will have this id into these stages: copy what arrived there before
        elsewhere.

        Raises ReshardError if another adapter has the id, by a chance of one in many millions.
        """
        if identity in self.held or identity in self.manager.list_adapters():
            raise ReshardError(
                f"another adapter has the id {identity} that was drawn for this one: refit again"
            )
        if self._began not in self.held:
            free(self.manager, self._began)  # of a refit that failed
        self._began = identity
        stages.prepare()
        for version in self.held.values():
            if version.stages is stages and version.memory is None:
                version.memory = stages.memory.clone()

    def fill(self, identity: int, stages: Stages, memory: torch.Tensor | None = None) -> int:
        """Return the slot that has these matrices under an id: the one that it has, or one that vLLM gives."""
        self._forget_lost()
        slot, is_new = take_slot(self.manager, identity)
        if is_new:
            if self._filled.pop(slot, None) != stages.kinds:
                for wrapper in self.wrappers.values():
                    wrapper.reset_lora(slot)
            stages.write(slot, memory)
            self._filled[slot] = stages.kinds
        return slot

    def add(self, version: Version) -> None:
        """Serve new requests with this version."""
        before = self.newest[version.name]
        self.held[version.identity] = self.newest[version.name] = version
        if before is not None and before.identity not in self._in_use:
            self._drop(before)

    def keep(self, identities: Iterable[int]) -> None:
        """Drop all versions but the newest, and those with these ids, which unfinished requests have.

        From then on requests may get the id of a version that is the newest now."""
        newest = {version.identity for version in self.newest.values() if version is not None}
        self._in_use = newest | set(identities)
        for version in [one for one in self.held.values() if one.identity not in self._in_use]:
            self._drop(version)

    @property
    def has_older(self) -> bool:
        """True if there are versions that `keep` may drop."""
        return len(self.held) > sum(version is not None for version in self.newest.values())

    def _drop(self, version: Version) -> None:
        free(self.manager, version.identity)
        del self.held[version.identity]

    def _forget_lost(self) -> None:
        """Have everything written again if vLLM has lost what was in its slots."""
        if self.guard.losses != self._losses:
            self._losses = self.guard.losses
            self._filled.clear()
            for identity in self.held:
                free(self.manager, identity)

    # Requests

    def state(self) -> dict[str, Any]:
        """Return, by the name of each adapter, what requests are to know: the ids of the versions that may be served
        by their names (``held``), the name of the ``newest``, its ``version`` and ``origin``, or why there is none
        (``refusal``), and by which other id vLLM lists the adapter (``listed``)."""
        states = {}
        for name, newest in self.newest.items():
            held = {
                version.lora_name: version.identity
                for version in self.held.values()
                if version.name == name and not self._unfit(version)
            }
            refusal = self.refusal(name)
            newest = None if refusal else newest
            states[name] = {
                "held": held,
                "newest": newest.lora_name if newest is not None else None,
                "version": newest.number if newest is not None else None,
                "origin": newest.origin if newest is not None else "",
                "refusal": refusal,
                "listed": listed_id(name),
            }
        return states

    def refusal(self, name: str) -> str:
        """Return the sentence with which new requests for an adapter are refused; empty if it may be served."""
        newest = self.newest.get(name)
        if newest is not None:
            reason = self._unfit(newest)
        else:
            reason = "no version of it" if self.guard.ready else str(self.guard.reason)
        return reason and f"adapter {name!r} cannot be served, since this vLLM holds {reason}: refit it first"

    def _unfit(self, version: Version) -> str:
        """Return what keeps a version from being served; empty if nothing does."""
        if not self.guard.ready:
            return str(self.guard.reason)
        return "" if self.guard.writes == version.writes else "other weights below it than it came with"

    def number(self, name: str) -> int | None:
        """Return the number of the newest version; None if none may be served."""
        newest = self.newest.get(name)
        return newest.number if newest is not None and not self._unfit(newest) else None

    def request(self, name: str) -> Any:
        """Return vLLM's ``LoRARequest`` for the newest version. Raises ReshardError if none may be served."""
        refusal, newest = self.refusal(name), self.newest.get(name)
        if refusal or newest is None:
            raise ReshardError(refusal)
        return request_for(newest.lora_name, newest.identity)

    # vLLM's own ways to adapters

    def serve(self, loader: Any) -> None:
        """Serve requests of the worker of this `loader` of adapters, which may be None, from now on."""
        if loader is None or loader is self._loader:
            return
        self._loader = loader
        plain = loader.add_adapter, loader.remove_adapter, loader.list_adapters, loader.set_active_adapters
        add, remove, listed, set_active = plain

        def add_adapter(request: Any) -> bool:
            if self._activate_held(request):
                return True
            if request.lora_name in self.newest and not self.refusal(request.lora_name):
                return True  # asked to load what a refit has brought
            self._check_foreign(request)
            return bool(add(request))

        def set_active_adapters(requests: set[Any], mapping: Any) -> None:
            for request in requests:
                if request.lora_int_id not in self.held:
                    self._check_foreign(request)
            set_active(requests, mapping)

        loader.add_adapter, loader.set_active_adapters = add_adapter, set_active_adapters
        loader.remove_adapter = lambda one: self._remove(one) if self._owns(one) else remove(one)
        loader.list_adapters = lambda: listed() | self._listed()

    def _activate_held(self, request: Any) -> bool:
        """Have a slot serve the version that a request asks for; return False if it asks for none of ours.

        Raises ReshardError if the version must not be served.
        """
        version = self.held.get(request.lora_int_id)
        if version is None or version.lora_name != request.lora_name:
            return False
        reason = self._unfit(version)
        if reason:
            raise ReshardError(f"this vLLM holds {reason}, and must not serve {version.lora_name!r}")
        self.fill(version.identity, version.stages, version.memory)
        return True

    def _check_foreign(self, request: Any) -> None:
        """Raise ReshardError for a request that only the gate before the engine could have turned into one of ours."""
        name = request.lora_name.partition("@")[0]
        if name in self.newest or self._owns(request.lora_int_id):
            raise ReshardError(
                self.refusal(name)
                or f"{request.lora_name!r} (id {request.lora_int_id}) is no version of an adapter that this "
                f"vLLM holds; its engine core has to load reshard's plugin (VLLM_PLUGINS)"
            )

    def _activated(self, identity: int) -> Any:
        """Activate an adapter of vLLM's own, in whose slot there are no zeros from here on."""
        result = self._activate(identity)
        if identity in self.manager.lora_index_to_id:
            self._filled.pop(self.manager.lora_index_to_id.index(identity), None)
        return result

    def _owns(self, identity: int) -> bool:
        """Return True for an id by which one of these adapters is asked for."""
        return identity in self.held or identity in map(listed_id, self.newest)

    def _listed(self) -> set[int]:
        """Return the ids under which vLLM lists these adapters: a trainer that looks for an adapter by a number finds
        it before the first version, since it would ask for the model alone if it did not."""
        ids = {one.identity for one in self.held.values() if listed_id(one.name) is None}
        names = {name for name in self.newest if name in self._connected or self.newest[name] is not None}
        return ids | {number for number in map(listed_id, names) if number is not None}

    def _remove(self, identity: int) -> bool:
        """Remove an adapter that no connection keeps; return whether it was there."""
        versions = [one for one in self.held.values() if identity in (one.identity, listed_id(one.name))]
        removed = [one for one in versions if one.name not in self._connected]
        for version in removed:
            self._drop(version)
            if self.newest[version.name] is version:
                self.newest[version.name] = None
        return bool(removed)


def listed_id(name: str) -> int | None:
    """Return the number that an adapter's name is; None if it is none."""
    return int(name) if name.isascii() and name.isdecimal() else None


def versions_of(manager: Any, guard: Any, wrappers: Mapping[str, Any]) -> Versions:
    """Return the versions of a model's adapters, which its guard keeps; see `Versions`."""
    if guard.adapters is None:
        guard.adapters = Versions(manager, guard, wrappers)
    versions: Versions = guard.adapters
    return versions
