"""The connection of a LoRA adapter, with that of the weights below it."""

import json
import secrets
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.refit.link import Link
from reshard.refit.lora.base_digest import BaseDigest, ServedDigest
from reshard.refit.protocol.encoding import digest
from reshard.refit.receiver import Receiver
from reshard.refit.report import RefitReport
from reshard.refit.sender import Sender

ATTEMPT_BYTES = 8


class AdapterLink:
    """A connection that `connect` makes with `adapter`.

    `weights` and `adapters` are the connections of both. The weights are refitted before the first adapter,
    and again where an engine holds others than the trainer now has, and are verified then. Whether an engine's
    bits are still those that it got is looked at where a refit of the adapter is verified.
    """

    def __init__(self, weights: Link, adapters: Link) -> None:
        self.weights, self.adapters = weights, adapters
        self._base = BaseDigest(weights.sender) if weights.sender is not None else None
        self._served = ServedDigest(weights.receiver.engine) if weights.receiver is not None else None
        adapters.log.what = "adapter's refit"

    @property
    def group(self) -> RefitGroup:
        """See `Link`."""
        return self.adapters.group

    @property
    def sender(self) -> Sender | None:
        """This member's side of the adapter's connection, if it is a trainer's rank."""
        return self.adapters.sender

    @property
    def receiver(self) -> Receiver | None:
        """This member's side of the adapter's connection, if it is an engine's rank."""
        return self.adapters.receiver

    @property
    def refits(self) -> int:
        """The number of refits of the adapter that were begun."""
        return self.adapters.refits

    @property
    def version(self) -> int | None:
        """The version of the adapter that the last refit brought; None before."""
        return self.adapters.version

    def refit(self, version: int | None = None, verify: bool = False) -> RefitReport:
        """Move the adapter, after the weights below it where an engine does not have the trainer's; return
        the adapter's report. For the rest see `Link.refit`.

        Where it fails, an engine goes on serving the version before.
        """
        held, is_wanted, attempt = self._compare_weights(verify)
        if is_wanted:
            version = self.weights.refit(version, verify=True).version
            if self._served is not None:
                self._served.engine.guard.hold(held, self._served.take())
        if self.adapters.receiver is not None:
            self.adapters.receiver.engine.attempt = attempt
        return self.adapters.refit(version, verify)

    def _compare_weights(self, verify: bool) -> tuple[bytes, bool, bytes]:
        """Return a digest of the trainer's weights below the adapter, whether an engine's rank has others, and what
        tells this attempt from all others; the same on all members."""
        what = "the look at the weights below the adapter"
        agreed = self.weights.agreed
        with self.group.one_call("refit"), self.group.transaction(what):
            if self.sender is not None:  # before the weights move
                self.sender.source.check_adapter()
            if self._base is not None:
                self.group.post("base", self._base.take())
                self.group.post("attempt", secrets.token_bytes(ATTEMPT_BYTES))
            held = digest(*self.group.read_all("base", agreed.trainers))
            is_verified = any(self.group.gather("verify", b"1" if verify else b""))
            if self._served is not None:
                with self.group.reporting_alive():
                    has_others = self._has_others(self._served, held, is_verified)
                self.group.post("weights", json.dumps(has_others).encode())
            answers = self.group.read_all("weights", agreed.engines)
            attempt = self.group.read("attempt", agreed.trainers[0])
            self.group.commit()
        return held, any(payload != b"false" for payload in answers), attempt

    @staticmethod
    def _has_others(served: ServedDigest, held: bytes, verify: bool) -> bool:
        """Return True if an engine's rank does not have the weights that the trainer has; with `verify` its bits
        decide."""
        guard = served.engine.guard
        if guard.held != held:
            return True
        return verify and not (guard.served and served.take() == guard.served)

    def release(self) -> None:
        """See `Link.release`; of both connections."""
        self.weights.release()
        self.adapters.release()

    def describe(self) -> dict[str, Any]:
        """Return what `Link.describe` says of the adapter's connection, and with ``weights`` that of the
        weights below it."""
        return self.adapters.describe() | {"weights": self.weights.describe()}

    def close(self) -> None:
        """See `Link.close`; of both connections."""
        try:
            self.adapters.close()
        finally:
            self.weights.close()
