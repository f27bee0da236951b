"""The digest of the weights that a verified refit has brought, as `reshard.digest` gives it.

Each engine's rank reads what it serves once more, as a verification's own sums are of pieces in words of 8 bytes, and
cannot be added to that of a tensor. A record for each box goes to the first of these ranks, which adds them. An engine
that has not the packages that read checkpoints is refitted all the same, and no digest is known then.
"""

import json
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.agreement import Agreement
from reshard.refit.receiver import Receiver


class RefitDigest:
    """The digest that all members of a link know of a verified refit: `text` is its short form; None where the last
    refit was not verified, or what engines serve has no digest."""

    def __init__(self, group: RefitGroup, agreed: Agreement, receiver: Receiver | None) -> None:
        self.group, self.agreed, self.receiver = group, agreed, receiver
        self.text: str | None = None
        self._told = b""  # the records that this rank has told
        self._served: Any = None  # the `ServedRecords` that these are of

    def forget(self) -> None:
        """Say nothing of what is written from now on."""
        self.text = None

    def exchange(self) -> None:
        """Find the digest of what has arrived; every member calls this, within a verified refit.

        Raises ReshardError, naming the tensor, if ranks serve different numbers of it: then trainers' replicas differ.
        """
        engines = self.agreed.engines
        if self.receiver is not None:
            with self.group.reporting_alive():
                self._told = self._of_now()
            self.group.post("served", self._told)
        verdict: dict[str, Any] = {}
        if engines and self.group.rank == engines[0]:
            payloads = self.group.read_all("served", engines)
            if all(payloads):
                from reshard.refit.reporting.records import added

                verdict = added(payloads, [self.group.names[rank] for rank in engines])
        texts = self.group.gather("digest", json.dumps(verdict).encode())
        verdict = json.loads(texts[engines[0]]) if engines else {}
        if (tensor := verdict.get("differs")) is not None:
            name = self._served.name_of(tensor) if self._served is not None else "a tensor"
            raise ReshardError(
                f"ranks serve different numbers of {name}: replicas of it differ in the trainer"
            )
        self.text = verdict.get("text")

    def now(self) -> str | None:
        """Return the digest of what engines serve, as far as this engine's rank can tell: it reads what it serves, and
        says nothing if that is not what it has told of the last refit. A trainer's rank cannot know."""
        if self.text is None or self.receiver is None or not self.receiver.engine.ready:
            return None
        self.receiver.engine.refresh_regions()
        return self.text if self._of_now() == self._told else None

    def _of_now(self) -> bytes:
        """Return the records of this rank; none if what it serves has no digest, or it cannot take it."""
        assert self.receiver is not None
        engine = self.receiver.engine
        addresses = engine.written_addresses()
        try:
            engine.check_kept()
            served = self._served
            if served is None or served.addresses != addresses or served.placement is not engine.placement:
                from reshard.refit.reporting.records import ServedRecords

                self._served = ServedRecords(engine, addresses)
        except (ReshardError, ImportError):
            return b""
        records: bytes = self._served.take()
        return records
