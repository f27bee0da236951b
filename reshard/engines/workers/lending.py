"""An engine that hands on what it serves to another, while it serves: the methods that its workers get.

The engine that comes late connects as to a trainer. That the weights which arrive are those of the version, whole, is
proven twice: digests of both sides are compared, and the count of writes of the weights that are read
(`reshard.refit.guard.Guard`) has to be at the end what it was when the version was read. Whatever is about to write
into these weights, or to take their memory away, ends the handing on first. Weights that are quantized, or arranged
for kernels, go as they are to an engine that serves them alike (`reshard.refit.twins`).
"""

import logging
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

from reshard.comm.group import RefitGroup, check_rank
from reshard.comm.hosts import parsed
from reshard.comm.secret import given_secret
from reshard.core.errors import ReshardError
from reshard.core.limits import check_number
from reshard.core.placement import LocalTensor
from reshard.device.memory import Region
from reshard.engines.workers.refits import WorkerOptions, with_short_traceback
from reshard.models.model import Model
from reshard.refit.connecting import connect
from reshard.refit.holder import Holder
from reshard.refit.lora.sides import AdaptedEngine
from reshard.refit.options import ConnectOptions
from reshard.refit.served import ServedWeights
from reshard.refit.twins import handed_on_by

if TYPE_CHECKING:
    from reshard.refit.engine import Engine

LAST_VERSION = (1 << 63) - 1
END_SECONDS = 10.0  # that a write waits for the end of a handing on that it has stopped
LEAST_SECONDS = 0.1  # of the first try to stop one; each further one takes twice as long
log = logging.getLogger("reshard")


class Lent(Holder):
    """What an engine's rank serves of one `version`, as the source of refits, as long as nothing writes into it.

    Raises ReshardError if the rank serves something else.
    """

    def __init__(self, served: ServedWeights, version: int) -> None:
        served.check_current()
        served.check_as_published()
        held = served.guard.version
        if held is None or held != version:
            what = "weights of no version" if held is None else f"version {held}"
            raise ReshardError(
                f"this {served.guard.engine} serves {what}, and cannot hand on version {version}"
            )
        self.served, self.version, self.writes = served, version, served.guard.writes
        self.origin = served.guard.origin

    @property
    def memory(self) -> list[Region]:
        return self.served.memory

    @property
    def device(self) -> torch.device:
        """The device on which the engine's rank computes."""
        return self.served.device

    def publish(self, model: Model) -> list[LocalTensor]:
        """Return what the engine serves, where it is as it was published."""
        return self.served.publish(model)

    def facts(self) -> bytes | None:
        """Return in which form the engine serves them, where that is not what was published."""
        return self.served.facts()

    def check_model(self, model: Model) -> None:
        """Raise ReshardError unless both engines serve the same model."""
        self.served.check_model(model)

    def name_of(self, index: int) -> str:
        """Return the engine's own name of a tensor."""
        return self.served.name_of(index)

    def addresses(self) -> list[int]:
        """Return the addresses now."""
        return self.served.addresses()

    def check_current(self) -> None:
        """Raise ReshardError once anything may have written into the weights."""
        guard = self.served.guard
        if guard.writes != self.writes:
            raise ReshardError(
                f"this {guard.engine} has got other weights than version {self.version}, which it was handing on"
            )
        self.served.check_current()


class LentBelow(Lent):
    """The weights below an adapter, with the `adapter`: what an engine's rank serves by its `name` as one `version`.

    Raises ReshardError if requests for that get another version, or none.
    """

    def __init__(self, engine: "Engine", name: str, version: int) -> None:
        if not isinstance(engine, AdaptedEngine):
            raise ReshardError(f"this {engine.guard.engine} serves no adapters that it could hand on")
        self.adapter = engine.adapter(name).lent(version)
        below = engine.guard.version  # which the weights have had since they were sent last
        if below is None:
            raise ReshardError(
                f"this {engine.guard.engine} serves weights of no version below adapter {name!r}"
            )
        super().__init__(handed_on_by(engine), below)
        self.version, self.origin = version, self.adapter.origin
        self.adapter.check_below = self.check_current

    def split_adapter(self) -> tuple[Holder, Holder]:
        """Return the weights below the adapter, and the adapter."""
        return self, self.adapter


class Lending:
    """A thread of an engine's rank that hands on what is `lent`, once."""

    def __init__(self, lent: Lent, address: str, rank: int, size: int, options: WorkerOptions) -> None:
        self.lent, self.address, self.rank, self.size, self.options = lent, address, rank, size, options
        self._lock, self._stopped, self._met = Lock(), False, False
        self._is_done = False  # the other engine has all: only the connection is still to be closed
        self._thread = Thread(target=self._run, name="reshard-lending", daemon=True)

    def start(self) -> None:
        """Begin; who is about to write into the weights ends it from now on (`Guard.readers`)."""
        self.lent.served.guard.readers.append(WeakMethod(self.stop))
        self._thread.start()

    def _run(self) -> None:
        device = self.lent.device
        try:
            # A new thread would use the first GPU.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                self._hand_on()
        except ReshardError as error:
            log.warning("reshard: handing on version %s failed: %s", self.lent.version, error)

    def _hand_on(self) -> None:
        options, lent = self.options, self.lent
        group = RefitGroup.join(self.address, self.rank, self.size, options.timeout, options.secret)
        with ExitStack() as ends:
            ends.callback(group.close)
            with self._lock:
                self._met = not self._stopped
            if not self._met:
                raise ReshardError("it was stopped before it began")
            connecting = ConnectOptions(
                backend=options.backend,
                bucket_bytes=options.bucket_bytes,
                adapter=options.adapter,
                origin=lent.origin,
                name=options.name,
            )
            link = connect(group, lent, None, connecting)
            ends.callback(link.close)
            link.refit(lent.version, verify=True)
            self._is_done = True

    def is_in(self, address: str, secret: str | None) -> bool:
        """Return True while it takes part in the meeting at an address with a secret, or is about to."""
        own = self.address, given_secret(self.options.secret)
        return own == (address, given_secret(secret)) and self._thread.is_alive() and not self._is_done

    def stop(self) -> None:
        """End it, for all that take part: for who is about to write into the weights. What the other engine has by then
        is whole, or it refuses to serve that."""
        with self._lock:
            self._stopped = True
        if not self._met or not self._thread.is_alive():
            return  # it has read nothing, and will not, or has ended
        reason = f"the {self.lent.served.guard.engine} that hands on its weights is about to get others or to move them"
        deadline, seconds = time.monotonic() + END_SECONDS, LEAST_SECONDS
        try:
            # The meeting may be over, and its port closed: then the thread ends by itself, which is waited for alone.
            while self._thread.is_alive() and time.monotonic() < deadline:
                RefitGroup.abort(self.address, reason, seconds, self.options.secret)
                self._thread.join(seconds)
                seconds *= 2
        finally:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                log.warning(
                    "reshard: handing on version %s has not ended within %g s, and the %s gets other weights now: the "
                    "engine that reads these finds that by their digests, and refuses to serve",
                    self.lent.version,
                    END_SECONDS,
                    self.lent.served.guard.engine,
                )


class LendingMethods:
    """The method of a worker that hands on what it serves."""

    _reshard_lending: Lending | None = None

    if TYPE_CHECKING:

        def _reshard_engine_side(self) -> "Engine": ...

        def _reshard_rank(self) -> int: ...

    def _reshard_check_other(self, address: str, secret: str | None) -> None:
        """Raise ReshardError if this worker hands on in the meeting at this address: it would take its own weights."""
        lending = self._reshard_lending
        if lending is not None and lending.is_in(address, secret):
            raise ReshardError(
                f"this {lending.lent.served.guard.engine} is the one that hands on version {lending.lent.version} at "
                f"{address}, and takes nothing from itself: remove one of its two names from the fleet"
            )

    @with_short_traceback
    def reshard_lend(self, address: str, first_rank: int, size: int, version: int, **options: Any) -> None:
        """Hand on the weights of a version, which this engine serves, to engines that connect at an address; for a call
        that all of its workers get. It returns at once, and goes on serving. With an ``adapter`` it is a version of
        that, which is handed on with the weights below it.

        The arguments are those of ``reshard_connect``. Raises ReshardError if this worker serves another version, or
        is about to hand on to others.
        """
        parsed(address)
        check_number(version, "version", LAST_VERSION, 0)
        rank = self._reshard_rank()
        check_rank(first_rank + rank, size)
        connecting = WorkerOptions.of_call(**options).checked()
        connecting = replace(connecting, **connecting.of_worker(rank))
        if self._reshard_lending is not None:
            self._reshard_lending.stop()
        engine, adapter = self._reshard_engine_side(), connecting.adapter
        lent = LentBelow(engine, adapter, version) if adapter else Lent(handed_on_by(engine), version)
        self._reshard_lending = Lending(lent, address, first_rank + rank, size, connecting)
        self._reshard_lending.start()
