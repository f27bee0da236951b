"""The digest of the weights that a verified refit has brought, as `reshard.digest` gives it.

Each engine's rank reads what it serves once more, as a verification's own sums are of pieces in words of 8 bytes, and
cannot be added to that of a tensor. Numbers count in the dtype of most, as with a ``dtype`` of `reshard.digest`: an
engine may hold a router in another than the trainer. A record for each box goes to the first of these ranks, which
adds them.
"""

import json
from collections import Counter
from math import prod
from typing import Any

import numpy as np
import xxhash

from reshard.comm.group import RefitGroup
from reshard.core.dtypes import DTYPES, Dtype, dtype_named
from reshard.core.errors import ReshardError
from reshard.device.digests import Sums
from reshard.digests.numbers import seed_of, start_of, total_of
from reshard.digests.result import short_dtype, short_form
from reshard.refit.agreement import Agreement
from reshard.refit.engine import Engine
from reshard.refit.receiver import Receiver
from reshard.refit.reporting.served_parts import ServedParts, served_parts
from reshard.storage.io.boxes import Rows

_NAMES = sorted(DTYPES)
# Of a box: hashes of its tensor's name and of the box, the dtype in which it counts, its sum and elements. A tensor has
# such a record too, without a box, with what it counts as without elements, and so many elements less.
RECORD = np.dtype(
    [("tensor", "<u8"), ("box", "<u8"), ("dtype", "<i8"), ("value", "<u8"), ("elements", "<i8")]
)


class RefitDigest:
    """The digest that all members of a link know of a verified refit: `text` is its short form; None where the last
    refit was not verified, or what engines serve has no digest."""

    def __init__(self, group: RefitGroup, agreed: Agreement, receiver: Receiver | None) -> None:
        self.group, self.agreed, self.receiver = group, agreed, receiver
        self.text: str | None = None
        self._records = np.zeros(0, RECORD)  # that this rank has told
        # Behind the addresses that they are of, with the records but for the sums.
        self._served: tuple[list[int], ServedParts, Sums, np.ndarray] | None = None

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
                self._records = self._of_now()
            self.group.post("served", self._records.tobytes())
        verdict: dict[str, Any] = {}
        if engines and self.group.rank == engines[0]:
            payloads = self.group.read_all("served", engines)
            names = [self.group.names[rank] for rank in engines]
            verdict = _added(list(map(_records, payloads, names)))
        texts = self.group.gather("digest", json.dumps(verdict).encode())
        verdict = json.loads(texts[engines[0]]) if engines else {}
        if (tensor := verdict.get("differs")) is not None:
            raise ReshardError(
                f"ranks serve different numbers of {self._name_of(tensor)}: replicas of it differ in the trainer"
            )
        self.text = verdict.get("text")

    def now(self) -> str | None:
        """Return the digest of what engines serve, as far as this engine's rank can tell: it reads what it serves, and
        says nothing if that is not what it has told of the last refit. A trainer's rank cannot know."""
        if self.text is None or self.receiver is None or not self.receiver.engine.ready:
            return None
        self.receiver.engine.refresh_regions()
        return self.text if np.array_equal(self._of_now(), self._records) else None

    def _of_now(self) -> np.ndarray:
        """Return the records of this rank; none if what it serves has no digest."""
        assert self.receiver is not None
        engine = self.receiver.engine
        made_for = engine.written_addresses()
        if self._served is None or self._served[0] != made_for:
            try:
                parts = served_parts(engine, _dtype_of(engine))
            except ReshardError:
                return np.zeros(0, RECORD)
            self._served = made_for, parts, parts.sums(), _without_sums(parts)
        _, parts, sums, known = self._served
        records = known.copy()
        records["value"][len(parts.tensors) :] = np.array(sums.take(), np.uint64)
        return records

    def _name_of(self, tensor: int) -> str:
        names = self._served[1].tensors if self._served is not None else {}
        return next((name for name in names if _hash_of(name) == tensor), "a tensor")


def _without_sums(parts: ServedParts) -> np.ndarray:
    """Return the records of a rank: of its tensors, then of its boxes, whose sums are left at 0."""
    of_tensors = [
        (_hash_of(name), 0, _NAMES.index(info.dtype.name), start_of(seed_of(name, info)), -prod(info.shape))
        for name, info in parts.tensors.items()
    ]
    of_boxes = [
        (_hash_of(box.name), _hash_of(str(Rows.of(box.box))), _NAMES.index(box.dtype.name), 0, box.box.volume)
        for box in parts.boxes
    ]
    return np.array(of_tensors + of_boxes, RECORD)


def _dtype_of(engine: Engine) -> Dtype | None:
    """Return the dtype of most elements that a rank serves; None if codes are among them."""
    if engine.scales:
        return None
    counts: Counter[Dtype] = Counter()
    for region in engine.regions.values():
        counts[dtype_named(region.tensor.dtype)] += region.tensor.numel()
    dtype = max(counts, key=lambda one: counts[one], default=None)
    return dtype if dtype is not None and dtype.floating and dtype.size > 1 else None


def _records(payload: bytes, who: str) -> np.ndarray:
    """Return the records in a message. Raises ReshardError if it holds something else."""
    if len(payload) % RECORD.itemsize == 0:
        records = np.frombuffer(payload, RECORD)
        if ((records["dtype"] >= 0) & (records["dtype"] < len(_NAMES))).all():
            return records
    raise ReshardError(
        f"{who} sends {len(payload):,} bytes that are no sums of boxes: is it of the same version?"
    )


def _added(of_ranks: list[np.ndarray]) -> dict[str, Any]:
    """Return the short form of a digest (``text``), of what all ranks tell; without it if it is not known; or the hash
    of a tensor that ``differs`` between ranks."""
    if not all(len(records) for records in of_ranks):
        return {}
    records = np.unique(np.concatenate(of_ranks))  # in the order of tensors, boxes and dtypes
    boxes, first = np.unique(records[["tensor", "box"]], return_index=True)
    if len(boxes) < len(records):
        again = np.setdiff1d(np.arange(len(records)), first)
        alike = records["dtype"][again] == records["dtype"][again - 1]
        return {"differs": int(records["tensor"][again[alike][0]])} if alike.any() else {}  # in two forms
    tensors, of_tensor = np.unique(records["tensor"], return_inverse=True)
    left = np.zeros(len(tensors), np.int64)
    np.add.at(left, of_tensor, records["elements"])
    if left.any():  # engines split tensors in several ways
        return {}
    elements: dict[str, int] = {}
    for dtype, count in records[["dtype", "elements"]][records["box"] == 0].tolist():
        short = short_dtype(DTYPES[_NAMES[dtype]])
        elements[short] = elements.get(short, 0) - count
    return {"text": short_form(elements, total_of(records["value"].tolist()))}


def _hash_of(text: str) -> int:
    """Return a hash that is not 0."""
    return xxhash.xxh3_64_intdigest(text.encode()) or 1
