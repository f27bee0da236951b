"""A version of a live model that was begun: what changed on this rank, packed in host memory, on its way to a chain."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import numpy as np
import torch

from reshard.comm.background import in_background
from reshard.core.errors import ReshardError, first_line
from reshard.delta.disk import DeltaReport
from reshard.delta.encoding import Encoded, apply
from reshard.delta.records import Record
from reshard.device.live_boxes import Slab

log = logging.getLogger("reshard")


class Kept(NamedTuple):
    """Rows of a box as they were in the newest version: the bits of the published numbers, on the host."""

    slab: Slab
    bits: np.ndarray


class Packed(NamedTuple):
    """The changes of what is kept: a record, and its bytes."""

    kept: Kept
    record: Record
    payload: np.ndarray

    def keep(self) -> None:
        """Write the changes into what is kept."""
        encoded = Encoded(self.record.form, self.record.changed, torch.from_numpy(self.payload))
        apply(encoded, torch.from_numpy(self.kept.bits))


class BegunSave:
    """A version that was begun with `DeltaWriter.begin_save`. `packed_bytes` of host memory on this rank are what
    changed, until the version is there."""

    def __init__(self, add: Callable[[], DeltaReport], packed: Sequence[Packed]) -> None:
        self.packed_bytes = sum(len(one.payload) for one in packed)
        self._is_told = False

        def added() -> DeltaReport | str:
            try:
                return add()
            except Exception as error:
                log.error("the version that was begun failed: %s", first_line(error))
                if not isinstance(error, ReshardError):
                    raise
                return str(error)  # and not what its traceback keeps

        # A program that ends waits for its last version.
        self._outcome: Future[DeltaReport | str] = in_background(added, outlasts=True)

    @property
    def is_done(self) -> bool:
        """True once it is known what has become of it."""
        return self._outcome.done()

    def settle(self) -> None:
        """Wait until it is known what has become of it."""
        wait([self._outcome])

    def wait(self) -> DeltaReport:
        """Return the report of the version once it is in the chain. Raises ReshardError if it has failed: then it is in
        no chain, and the next save brings its changes."""
        self.settle()
        self._is_told = True
        outcome = self._outcome.result()
        if isinstance(outcome, str):
            raise ReshardError(outcome)
        return outcome

    def tell(self) -> None:
        """Wait, and raise ReshardError if it has failed and nobody has been told."""
        self.settle()
        if self._is_told:
            return
        try:
            self.wait()
        except Exception as error:
            raise ReshardError(f"the last version was begun, and failed: {error}") from error
