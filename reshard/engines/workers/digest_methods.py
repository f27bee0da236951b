"""The method of an engine's worker that says what it serves."""

import json
import logging
from typing import TYPE_CHECKING, Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line

if TYPE_CHECKING:
    from reshard.refit.engine import Engine

log = logging.getLogger("reshard")


class DigestMethods:
    """A method of a worker by which `reshard.digest` learns what an engine serves."""

    def _reshard_engine_side(self) -> "Engine":
        raise NotImplementedError

    def reshard_digest(self, dtype: str | None = None) -> dict[str, Any]:
        """Return what this worker's boxes add to the digest of the weights (`digest_parts`); ``{"error": sentence}``
        where it cannot: an engine that waits for several workers would leave what others answer to its next call."""
        from reshard.refit.reporting.served_parts import digest_parts

        try:
            return digest_parts(self._reshard_engine_side(), dtype)
        except ReshardError as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("a digest failed")
            return {"error": f"{type(error).__name__}: {first_line(error)}"}


def say(
    address: str, rank: int, size: int, answer: dict[str, Any], timeout: float, secret: str | None
) -> None:
    """Say an answer, as a scheduler, to the process that asks for a digest at `address`."""
    group = RefitGroup.join(address, rank + 1, size + 1, timeout, secret)
    with group.transaction("a digest"):
        group.gather("digest", json.dumps(answer).encode())
        group.commit()
