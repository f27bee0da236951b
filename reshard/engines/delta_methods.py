"""Methods of an engine's worker by which deltas of a chain are written into it."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from reshard.core.errors import ReshardError, first_line

if TYPE_CHECKING:
    from reshard.engines.base import Engine
    from reshard.engines.deltas import EngineDeltas

log = logging.getLogger("reshard")


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method answer ``{"error": sentence}`` instead of raising: an engine that waits for several workers would
    leave what the others answer to the next call."""

    @wraps(method)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except ReshardError as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("a delta failed")
            return {"error": f"{type(error).__name__}: {first_line(error)}"}

    return answering


class DeltaMethods:
    """Methods of an engine's worker by which `reshard.delta.apply_deltas` writes deltas into it. They answer
    with ``{"error": sentence}`` where they cannot."""

    _reshard_deltas: "EngineDeltas | None" = None

    def _reshard_engine_side(self) -> "Engine":
        raise NotImplementedError

    @_answering
    def reshard_delta_digests(self, chain: str, anew: bool = False) -> str | list[list[Any]]:
        """Return the digest of the weights where a delta was the last to write them, unless it is asked for
        `anew`; else what each box of this worker adds to it."""
        from reshard.engines.deltas import EngineDeltas  # which needs more packages than a refit does

        engine = self._reshard_engine_side()
        if self._reshard_deltas is None or self._reshard_deltas.engine is not engine:
            self._reshard_deltas = EngineDeltas(engine)
        deltas = self._reshard_deltas
        deltas.open(chain)
        # Anew is asked where weights were written that an engine of several stages does not serve yet.
        if not anew:
            engine.guard.check_ready()
        digest, writes = deltas.left
        return digest if writes == engine.guard.writes and not anew else deltas.digests()

    @_answering
    def reshard_delta_prepare(self, held: str, version: int, digest: str) -> None:
        """Fetch and check the deltas from weights with digest `held` to a version, whose weights have this
        `digest`."""
        self._reshard_opened().prepare(held, version, digest)

    @_answering
    def reshard_delta_write(self, version: int, digest: str) -> None:
        """Write the prepared deltas, and serve as this version, whose weights have this digest."""
        self._reshard_opened().write(version, digest)

    def reshard_delta_invalidate(self) -> None:
        """Refuse to serve: the weights are not those of a version."""
        self._reshard_opened().engine.guard.invalidate("other weights than a delta was to bring")

    def _reshard_opened(self) -> "EngineDeltas":
        if self._reshard_deltas is None:
            raise ReshardError("no chain is open: call reshard_delta_digests first")
        return self._reshard_deltas
