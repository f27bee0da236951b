"""A record: what changed in a box of a canonical tensor, as `reshard.delta.encoding` encodes it, in a file
of a chain. Its name there says which box, in which form, and how many elements changed:
``model.norm.weight@0+64/offsets:12``."""

import re
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from reshard.core.extras import importing

with importing("megatron"):
    import torch

import numpy as np

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.delta.encoding import Decoded, Encoded, decode, encode
from reshard.delta.forms import Form
from reshard.digests.numbers import bits_of
from reshard.storage.io.boxes import Rows
from reshard.storage.io.streams import TensorInfo

RECORD_BYTES = 8 << 20  # of a box; larger ones are cut into rows
_NAME = re.compile(r"(.+)@([\d,]{0,200})\+([\d,]{0,200})/([a-z]+):([1-9]\d{0,17})")
_FORMS = {form.name.lower(): form for form in Form if form is not Form.NOTHING}


class Record(NamedTuple):
    """The change of `box` of tensor `name`: `changed` elements of it, encoded in this `form`."""

    name: str
    box: Box
    form: Form
    changed: int

    @property
    def key(self) -> str:
        """Its name in a file."""
        offsets, lengths = (",".join(map(str, numbers)) for numbers in self.box)
        return f"{self.name}@{offsets}+{lengths}/{self.form.name.lower()}:{self.changed}"

    @staticmethod
    def parse(key: str, tensors: Mapping[str, TensorInfo]) -> "Record":
        """Return the record of a name in a file. Raises ReshardError unless it is a box of one of the tensors."""
        match = _NAME.fullmatch(key)
        if match is None or match[4] not in _FORMS:
            raise ReshardError(f"{key[:200]!a} is not a record of a delta")
        name, form, changed = match[1], _FORMS[match[4]], int(match[5])
        offsets, lengths = (tuple(int(n) for n in text.split(",") if n) for text in match.group(2, 3))
        box, info = Box(offsets, lengths), tensors.get(name)
        if info is None:
            raise ReshardError(f"{name[:200]!a} is not a tensor of the base")
        dims = len(info.shape)
        if len(offsets) != dims or len(lengths) != dims or not whole(info.shape).contains(box):
            raise ReshardError(f"{key[:200]!a} lies outside of the tensor, whose shape is {list(info.shape)}")
        if dims > 2 and lengths[1:] != info.shape[1:]:
            raise ReshardError(f"{key[:200]!a} has not all of the dims after the first")
        return Record(name, box, form, changed)

    @property
    def rows(self) -> Rows:
        """Rows and columns of the box."""
        return Rows.of(self.box)


class Change(NamedTuple):
    """Changed elements of a box: `rows` and `columns` of its tensor (int64), and the bits of their new
    `values`, as signed integers."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray

    def within(self, start: int, stop: int) -> "Change":
        """Return the change in rows `start` .. `stop`."""
        first, last = np.searchsorted(self.rows, (start, stop))
        return Change(*(part[first:last] for part in self))


def row_box(info: TensorInfo, start: int, stop: int) -> Box:
    """Return the box of whole rows `start` .. `stop` of a tensor."""
    if not info.shape:
        return whole(info.shape)
    return Box((start, *(0,) * (len(info.shape) - 1)), (stop - start, *info.shape[1:]))


def encode_box(name: str, box: Box, old: np.ndarray, new: np.ndarray) -> tuple[Record, np.ndarray] | None:
    """Return the record of what changed in a box, given as arrays of one shape and dtype, and its bytes; None
    if nothing did."""
    encoded = encode(*(torch.from_numpy(bits_of(numbers)) for numbers in (old, new)))
    if encoded.form is Form.NOTHING:
        return None
    return Record(name, box, encoded.form, encoded.changed), encoded.payload.numpy()


def decode_record(record: Record, dtype: torch.dtype, payload: torch.Tensor) -> Decoded:
    """Return the changes in a record's bytes, on their device: positions in its box, and values. Raises
    ReshardError if they do not fit its box."""
    decoded = decode(Encoded(record.form, record.changed, payload), prod(record.box.lengths), dtype)
    if not bool(decoded.valid):
        raise ReshardError(f"the record {record.key} has changes outside of its box, or not in order")
    return decoded


def decode_box(record: Record, info: TensorInfo, payload: np.ndarray) -> Change:
    """Return the same as rows and columns of the tensor, on the host."""
    decoded = decode_record(record, getattr(torch, info.dtype.name), torch.from_numpy(payload))
    rows, columns = np.divmod(decoded.positions.numpy(), max(1, record.rows.columns))
    return Change(rows + record.rows.start, columns + record.rows.column, decoded.values.numpy())
