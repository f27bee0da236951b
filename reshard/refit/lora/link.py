"""The connection of a LoRA adapter, with that of the weights below it."""

import json
import secrets
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.refit.link import Link
from reshard.refit.lora.base_digest import BaseDigest
from reshard.refit.protocol.encoding import digest
from reshard.refit.receiver import Receiver
from reshard.refit.report import RefitReport
from reshard.refit.sender import Sender

ATTEMPT_BYTES = 8


class AdapterLink:
    """A connection that `connect` makes with `adapter`.

    `weights` and `adapters` are the connections of both. The weights are refitted before the first adapter,
    and again where an engine holds others than the trainer now has, and are verified then.
    """

    def __init__(self, weights: Link, adapters: Link) -> None:
        self.weights, self.adapters = weights, adapters
        self._base = BaseDigest(weights.sender) if weights.sender is not None else None
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
        held, is_wanted, attempt = self._compare_weights()
        if is_wanted:
            version = self.weights.refit(version, verify=True).version
            if self.weights.receiver is not None:
                self.weights.receiver.engine.guard.hold(held)
        if self.adapters.receiver is not None:
            self.adapters.receiver.engine.attempt = attempt
        return self.adapters.refit(version, verify)

    def _compare_weights(self) -> tuple[bytes, bool, bytes]:
        """Return a digest of the trainer's weights below the adapter, whether an engine's rank has others, and what
        tells this attempt from all others; the same on all members."""
        what = "the look at the weights below the adapter"
        agreed, receiver = self.weights.agreed, self.weights.receiver
        with self.group.one_call("refit"), self.group.transaction(what):
            if self.sender is not None:  # before the weights move
                self.sender.source.check_adapter()
            if self._base is not None:
                self.group.post("base", self._base.take())
                self.group.post("attempt", secrets.token_bytes(ATTEMPT_BYTES))
            held = digest(*self.group.read_all("base", agreed.trainers))
            if receiver is not None:
                self.group.post("weights", json.dumps(receiver.engine.guard.held != held).encode())
            answers = self.group.read_all("weights", agreed.engines)
            attempt = self.group.read("attempt", agreed.trainers[0])
            self.group.commit()
        return held, any(payload != b"false" for payload in answers), attempt

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
