"""What ranks of engines tell of the weights that they serve, for the digest of a verified refit: a record for each
tensor, and one for each box.

Numbers count in the dtype of most, as with a ``dtype`` of `reshard.digest`: an engine may hold a router in another than
the trainer.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import xxhash

from reshard.core.dtypes import DTYPES, Dtype, dtype_named
from reshard.core.errors import ReshardError
from reshard.digests.numbers import MASK, seed_of, start_of
from reshard.digests.result import short_dtype, short_form
from reshard.refit.engine import Engine
from reshard.refit.reporting.served_parts import ServedParts, served_parts
from reshard.storage.io.boxes import Rows

_NAMES = sorted(DTYPES)
# Of a box: hashes of its tensor's name and of the box, the dtype in which it counts, its sum and elements. A tensor has
# such a record too, without a box, with what it counts as without elements, and so many elements less.
RECORD = np.dtype(
    [("tensor", "<u8"), ("box", "<u8"), ("dtype", "<i8"), ("value", "<u8"), ("elements", "<i8")]
)
_ODD = np.uint64(0x9E3779B97F4A7C15)  # by which hashes of tensors are told apart from those of boxes


class ServedRecords:
    """The records of one rank, which serves tensors at these `addresses`. All but the sums is made once.

    Raises ReshardError if what it serves has no digest."""

    def __init__(self, engine: Engine, addresses: list[int]) -> None:
        self.addresses, self.placement = addresses, engine.placement
        self.parts = served_parts(engine, _dtype_of(engine))
        self.sums, self._known = self.parts.sums(), _without_sums(self.parts)

    def take(self) -> bytes:
        """Return the records of what the rank serves now."""
        records = self._known.copy()
        records["value"][len(self.parts.tensors) :] = np.array(self.sums.take(), np.uint64)
        return records.tobytes()

    def name_of(self, tensor: int) -> str:
        """Return the name of a tensor, given its hash."""
        return next((name for name in self.parts.tensors if _hash_of(name) == tensor), "a tensor")


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


def added(payloads: Sequence[bytes], names: Sequence[str]) -> dict[str, Any]:
    """Return the short form of a digest (``text``), of what all ranks, of these names, tell; without it if it is not
    known; or the hash of a tensor that ``differs`` between ranks. Raises ReshardError for a message of another kind."""
    records = np.concatenate(list(map(_records, payloads, names)))
    # Plain numbers, since structures of them take a hundred times as long to sort.
    place = records["tensor"] * _ODD + records["box"]
    order = np.argsort(place, kind="stable")
    place, records = place[order], records[order]
    again = np.flatnonzero(place[1:] == place[:-1]) + 1
    later, earlier = records[again], records[again - 1]
    in_two_forms = later["dtype"] != earlier["dtype"]
    differs = ~in_two_forms & (later["value"] != earlier["value"])
    if differs.any():
        return {"differs": int(later["tensor"][differs][0])}
    if in_two_forms.any():
        return {}
    records = np.delete(records, again)
    tensors, of_tensor = np.unique(records["tensor"], return_inverse=True)
    left = np.bincount(of_tensor, records["elements"], len(tensors))  # exact: of fewer than 2^53 elements
    if left.any():  # engines split tensors in several ways
        return {}
    whole = records[records["box"] == 0]
    elements = {
        short_dtype(DTYPES[_NAMES[dtype]]): -int(whole["elements"][whole["dtype"] == dtype].sum())
        for dtype in np.unique(whole["dtype"])
    }
    return {"text": short_form(elements, int(records["value"].sum(dtype=np.uint64)) & MASK)}


def _hash_of(text: str) -> int:
    """Return a hash that is not 0."""
    return xxhash.xxh3_64_intdigest(text.encode()) or 1
