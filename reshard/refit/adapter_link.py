"""The connection of a LoRA adapter, with that of the weights below it."""

import json
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.refit.link import Link
from reshard.refit.receiver import Receiver
from reshard.refit.report import RefitReport
from reshard.refit.sender import Sender


class AdapterLink:
    """A connection that `connect` makes with `adapter`.

    `weights` and `adapters` are the connections of both. The weights are refitted before the first adapter,
    and again where an engine has lost them or loaded others, and are verified then.
    """

    def __init__(self, weights: Link, adapters: Link) -> None:
        self.weights, self.adapters = weights, adapters
        self._losses: int | None = None  # of the engine's weights, when they were last refitted

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

        Where it fails, an engine goes on serving the version before, if it has two slots for the adapter.
        """
        if self._weights_are_wanted():
            version = self.weights.refit(version, verify=True).version
            if self.weights.receiver is not None:
                self._losses = self.weights.receiver.engine.guard.losses
        return self.adapters.refit(version, verify)

    def _weights_are_wanted(self) -> bool:
        """Return True, on all members, where an engine's rank does not have the trainer's weights."""
        what = "the look at the weights below the adapter"
        with self.group.one_call("refit"), self.group.transaction(what):
            self.group.post("weights", json.dumps(self._lacks_weights()).encode())
            answers = self.group.read_all("weights", self.weights.agreed.engines)
            self.group.commit()
        return any(payload != b"false" for payload in answers)

    def _lacks_weights(self) -> bool:
        if self.weights.receiver is None:
            return False
        guard = self.weights.receiver.engine.guard
        return not guard.ready or guard.version is None or guard.losses != self._losses

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
