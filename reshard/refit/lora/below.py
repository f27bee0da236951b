"""The connection of the weights below a LoRA adapter, which go where an engine does not have the trainer's."""

import json
import secrets

from reshard.refit.link import Link
from reshard.refit.lora.base_digest import BaseDigest, ServedDigest
from reshard.refit.lora.sides import AdapterEngine
from reshard.refit.protocol.encoding import digest

ATTEMPT_BYTES = 8


class Below:
    """The weights below the adapter that the link `adapters` brings, in a connection of their own, `link`.

    They are refitted before the first adapter, and again where an engine holds others than the trainer now has,
    and are verified then. Whether an engine's bits are still those that it got is looked at where a refit of
    the adapter is verified.
    """

    def __init__(self, link: Link, adapters: Link) -> None:
        self.link, self.adapters = link, adapters
        self._base = BaseDigest(link.sender) if link.sender is not None else None
        self._served = ServedDigest(link.receiver.engine) if link.receiver is not None else None
        adapters.log.what = "adapter's refit"

    def follow(self, version: int | None, verify: bool) -> int | None:
        """Bring the weights where an engine's rank does not have them; return the version of the adapter that
        comes next. Every member calls this before the refit of the adapter."""
        held, is_wanted, attempt = self._compare_weights(verify)
        if is_wanted:
            version = self.link.refit(version, verify=True).version
            if self._served is not None:
                self._served.engine.guard.hold(held, self._served.take())
        if self.adapters.receiver is not None:
            engine = self.adapters.receiver.engine
            assert isinstance(engine, AdapterEngine)
            engine.attempt = attempt
        return version

    def _compare_weights(self, verify: bool) -> tuple[bytes, bool, bytes]:
        """Return a digest of the trainer's weights below the adapter, whether an engine's rank has others, and what
        tells this attempt from all others; the same on all members."""
        group, agreed = self.link.group, self.link.agreed
        with group.one_call("refit"), group.transaction("the look at the weights below the adapter"):
            if self.adapters.sender is not None:  # before the weights move
                self.adapters.sender.source.check_current()
            if self._base is not None:
                group.post("base", self._base.take())
                group.post("attempt", secrets.token_bytes(ATTEMPT_BYTES))
            held = digest(*group.read_all("base", agreed.trainers))
            is_verified = any(group.gather("verify", b"1" if verify else b""))
            if self._served is not None:
                with group.reporting_alive():
                    has_others = self._has_others(self._served, held, is_verified)
                group.post("weights", json.dumps(has_others).encode())
            answers = group.read_all("weights", agreed.engines)
            attempt = group.read("attempt", agreed.trainers[0])
            group.commit()
        return held, any(payload != b"false" for payload in answers), attempt

    @staticmethod
    def _has_others(served: ServedDigest, held: bytes, verify: bool) -> bool:
        """Return True if an engine's rank does not have the weights that the trainer has; with `verify` its bits
        decide."""
        guard = served.engine.guard
        if guard.held != held:
            return True
        return verify and not (guard.served and served.take() == guard.served)
