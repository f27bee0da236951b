"""The record of whether an engine's model holds whole weights; as long as it does not, the engine
refuses to serve."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakMethod

from reshard.core.errors import ReshardError

NEVER = -1  # of no count of losses


@dataclass
class Guard:
    """The state of a model's weights: `ready` if they are whole, and their `version`. Each model
    has one guard.

    An engine's serving path calls `check_ready` before each run of the model. `reason` completes
    "this `engine` holds" while the weights are not whole. `when_loaded` are methods to call when
    the engine has loaded all weights itself, `readers` those that end who reads the weights for others, before anything
    writes into them or takes their memory away; their owners may go away. `since` is the time from which on the
    weights are not whole. `origin` tells whose `version` it is (`reshard.refit.options.ConnectOptions`), empty if
    nobody has said that. `shared`: requests of this engine run through weights of others, too, as experts of data
    parallel ones, so that it refuses where those may be half-written.

    `losses` counts how often weights were lost, `buffer_losses` how often buffers were lost with them. `loaded_at` is
    what `losses` was when the engine last loaded all weights itself, which it has done `loads` times since it started;
    `NEVER` if the weights may have been lost before the guard was made, which then `was_whole` denies. `writes` counts
    all that may have changed the weights: refits that were begun, losses, and what others wrote or the engine loaded;
    `other_writes` the last two. `moves` counts how often the engine itself has moved weights from one place to another.
    """

    engine: str
    ready: bool
    reason: str = ""
    version: int | None = None
    when_loaded: list[WeakMethod] = field(default_factory=list)
    readers: list[WeakMethod] = field(default_factory=list)
    losses: int = 0
    buffer_losses: int = 0
    was_whole: bool = True
    loads: int = 0
    loaded_at: int = field(init=False)
    writes: int = 0
    other_writes: int = 0
    moves: int = 0
    shared: bool = False
    origin: str = ""
    since: float = field(default_factory=time.time)
    _held: tuple[int, bytes, bytes] = (-1, b"", b"")  # `writes`, and the digests

    def __post_init__(self) -> None:
        self.loaded_at = self.losses if self.was_whole else NEVER

    def invalidate(self, reason: str) -> None:
        """Refuse to serve from now on. What is there then is of no version."""
        self.end_readers()
        if self.ready:
            self.since = time.time()
        self.ready, self.reason, self.writes = False, reason, self.writes + 1
        self.version, self.origin = None, ""

    def lose(self, reason: str) -> None:
        """Refuse to serve from now on: the engine has discarded or overwritten its weights."""
        self.invalidate(reason)
        self.losses += 1

    def loaded(self) -> None:
        """Serve again: the engine has loaded all weights itself, so no refit has brought them."""
        self.ready, self.version, self.origin, self.writes = True, None, "", self.writes + 1
        self.loads, self.loaded_at, self.other_writes = self.loads + 1, self.losses, self.other_writes + 1
        for method in [reference() for reference in self.when_loaded]:
            if method is not None:
                method()

    def altered(self) -> None:
        """Note that others are about to write some weights: they are of no version, and nothing may build on them."""
        self.end_readers()
        self.version, self.origin = None, ""
        self.writes, self.other_writes = self.writes + 1, self.other_writes + 1

    def moving(self) -> None:
        """Note that the engine is about to move weights, as experts by their load: who reads them for others would find
        some where others were."""
        self.end_readers()
        self.moves += 1

    def end_readers(self) -> None:
        """Have nobody read the weights for others from now on: they will be written, or lose their memory. Ends all
        readers, also where one of them raises."""
        readers, self.readers = self.readers, []
        with ExitStack() as ends:
            for method in [reference() for reference in reversed(readers)]:
                if method is not None:
                    ends.callback(method)

    def refitted(self, version: int) -> None:
        """Serve again: a refit has brought all weights, of this version."""
        self.ready, self.version = True, version

    def hold(self, digest: bytes, served: bytes) -> None:
        """Note the digests of the weights that a refit has just brought: as the trainer has them, and as the engine
        serves them."""
        self._held = self.writes, digest, served

    @property
    def held(self) -> bytes:
        """The digest, as the trainer has them, of the weights that a refit has brought; empty if none did, or something
        has written since."""
        return self._digests[0]

    @property
    def served(self) -> bytes:
        """The digest, as the engine serves them, of the weights that a refit has brought; empty as `held`."""
        return self._digests[1]

    @property
    def _digests(self) -> tuple[bytes, bytes]:
        writes, held, served = self._held
        return (held, served) if self.ready and writes == self.writes else (b"", b"")

    @property
    def refusal(self) -> str:
        """The sentence with which the engine refuses to serve; empty if the weights are whole."""
        return "" if self.ready else f"this {self.engine} holds {self.reason}: refit it before it serves"

    def check_ready(self) -> None:
        """Raise ReshardError if the weights are not whole."""
        if not self.ready:
            raise ReshardError(self.refusal)

    def state(self) -> dict[str, Any]:
        """Return the state of the weights: whether the engine is ``ready`` to serve them, and which ``version`` they
        are, of which ``origin``; if not, the ``refusal``, and ``since`` when (seconds of the epoch)."""
        since = None if self.ready else self.since
        state = {"ready": self.ready, "version": self.version, "origin": self.origin}
        return state | {"refusal": self.refusal, "since": since}


def call_after(method: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """Return a method that calls `after`, with the same arguments, whenever `method` has
    succeeded."""

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        after(*args, **kwargs)
        return result

    return called
