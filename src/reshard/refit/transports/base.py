"""The interface of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Outgoing(NamedTuple):
    """What a trainer's rank sends to one inference rank: the copies with the source's end filled in; and for what
    travels in blocks of fp8 where each goes (`addresses.Pieces.into`), and the local tensors there
    (`parcels.places_asked`)."""

    table: np.ndarray
    into: np.ndarray
    places: np.ndarray


class Incoming(NamedTuple):
    """What an inference rank gets from one trainer's rank: the copies with the destination's end filled in,
    the pieces as that rank was asked for them and where they go (`addresses.Pieces`), what it has said of its
    memory (`sides.TrainerSide.tell`), and where blocks of fp8 are served from (`blocks.places_of`)."""

    table: np.ndarray
    asked: np.ndarray
    into: np.ndarray
    memory: Mapping[str, Any]
    places: np.ndarray


class Transport(ABC):
    """One way of bytes. Which pairs it serves is said by `routes.way_between`.

    `prepare` is called whenever one of the ends has moved: `outgoing` is what goes out by inference rank,
    `incoming` what comes by trainer's rank. Both ends of a pair see the same
    pieces in the same order. `run` carries all out, at most enqueued on the current stream when it returns,
    and raises ReshardError or RuntimeError where a partner dies or is late.
    """

    received_bytes = 0  # by this rank, in each refit
    launches = 0  # kernels in each refit that are not within `run`'s own rounds

    @abstractmethod
    def prepare(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Make ready for copies between these places."""

    @abstractmethod
    def run(self) -> None:
        """Carry out all copies."""

    def release(self) -> None:  # noqa: B027
        """At the end of a refit: unmap others' memory, so that they may free it."""

    def close(self) -> None:  # noqa: B027
        """Give everything back; nobody reads from this member any more."""
