"""The digest of a model's weights, as commands print it and compare it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from reshard.core.dtypes import DTYPES, SHORT_NAMES, Dtype
from reshard.core.errors import ReshardError
from reshard.core.printed import NoTruthValue, Printed
from reshard.digests.numbers import Described, text_of, total_of

SHOWN = 10  # names of a kind
_TEXT = re.compile(r"[a-z0-9_+]+:[0-9a-f]{16}")
_NUMBER = re.compile(r"[0-9a-f]{16}")
_SHORT = {name: short for short, name in SHORT_NAMES.items()}


def counted_dtype(name: str, dtype: Dtype, target: Dtype | None, fp32: frozenset[str]) -> Dtype:
    """Return the dtype in which a tensor counts where a digest is asked for in the `target`: every one of floating
    point in that, but for those that the family never casts down (`fp32`)."""
    if target is None or not dtype.floating:
        return dtype
    return DTYPES["float32"] if name in fp32 else target


def short_dtype(dtype: Dtype) -> str:
    """Return the name of a dtype in a digest.

    >>> short_dtype(DTYPES["bfloat16"]), short_dtype(DTYPES["float8_e4m3fn"])
    ('bf16', 'float8_e4m3fn')
    """
    return _SHORT.get(dtype.name, dtype.name)


def short_form(elements: Mapping[str, int], number: int) -> str:
    """Return a digest of so many elements by the short name of their dtype.

    >>> short_form({"fp32": 8, "bf16": 512}, 0x3F2A)
    'bf16+fp32:0000000000003f2a'
    """
    return f"{'+'.join(sorted(elements, key=lambda name: (-elements[name], name)))}:{text_of(number)}"


@dataclass
class Digest(Printed):
    """The digest of weights at a place.

    `text` is the whole of it, such as ``bf16:3f2a9c0d11e2b7f4``: the dtypes in which its tensors count, the one of most
    elements first, and the number. `tensors` are the numbers of each, by published name. `dtype` is the one that was
    asked for, None for each tensor's own.
    """

    where: str
    text: str
    dtype: str | None
    elements: int
    tensors: dict[str, str] = field(repr=False)
    notices: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        where: str,
        tensors: Mapping[str, Described],
        numbers: Mapping[str, int],
        dtype: str | None,
        notices: list[str] | None = None,
    ) -> "Digest":
        """Return the digest of tensors, in the dtypes in which they count, that have these numbers."""
        elements: dict[str, int] = {}
        total = 0
        for info in tensors.values():
            count = prod(info.shape)
            total += count
            if info.shape or len(tensors) == 1:  # not for the factors of an adapter
                short = short_dtype(info.dtype)
                elements[short] = elements.get(short, 0) + count
        texts = {name: text_of(numbers[name]) for name in tensors}
        text = short_form(elements, total_of(numbers.values()))
        return Digest(where, text, dtype, total, texts, notices or [])

    def to_dict(self) -> dict[str, Any]:
        """Return the digest as the object that ``--json`` prints."""
        return {
            "where": self.where,
            "digest": self.text,
            "dtype": self.dtype,
            "elements": self.elements,
            "tensors": self.tensors,
            "notices": self.notices,
        }

    @staticmethod
    def from_dict(fields: Any, place: str) -> "Digest":
        """Return the digest that ``--json`` printed. Raises ReshardError if it is none."""
        has = fields if isinstance(fields, dict) else {}
        tensors, dtype, elements = has.get("tensors"), has.get("dtype"), has.get("elements")
        if (
            not _TEXT.fullmatch(str(has.get("digest")))
            or type(elements) is not int
            or not (dtype is None or isinstance(dtype, str))
            or not isinstance(tensors, dict)
            or not all(_NUMBER.fullmatch(str(number)) for number in tensors.values())
        ):
            raise ReshardError(
                f"{place} is not what reshard digest --json prints: give that, or a checkpoint"
            )
        if total_of(int(number, 16) for number in tensors.values()) != int(
            has["digest"].rpartition(":")[2], 16
        ):
            raise ReshardError(f"{place} was altered: its tensors do not give its digest; print it again")
        return Digest(str(has.get("where", place)), has["digest"], dtype, elements, tensors)

    def lines(self) -> Iterator[str]:
        """Return the line of text."""
        yield f"{self.text}  {len(self.tensors):,} tensors, {self.elements:,} elements"

    def compare(self, other: "Digest") -> "DigestDiff":
        """Compare with another digest, tensor by tensor."""
        common = [name for name in self.tensors if name in other.tensors]
        return DigestDiff(
            self,
            other,
            [name for name in common if self.tensors[name] != other.tensors[name]],
            [name for name in self.tensors if name not in other.tensors],
            [name for name in other.tensors if name not in self.tensors],
            len(common),
            [*self.notices, *other.notices],
        )


@dataclass
class DigestDiff(NoTruthValue, Printed):
    """The outcome of a comparison of two digests: `different` are the tensors that both have, with other numbers."""

    a: Digest
    b: Digest
    different: list[str]
    only_a: list[str]
    only_b: list[str]
    compared: int
    notices: list[str] = field(default_factory=list)
    question = "equal"

    @property
    def equal(self) -> bool:
        """True where both are of the same weights, in the same dtypes."""
        return self.a.text == self.b.text and not (self.different or self.only_a or self.only_b)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as the object that ``--json`` prints."""
        return {
            "equal": self.equal,
            "a": self.a.where,
            "b": self.b.where,
            "digest_a": self.a.text,
            "digest_b": self.b.text,
            "tensors": self.compared,
            "different": self.different,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "notices": self.notices,
        }

    def lines(self, shown: int = SHOWN) -> Iterator[str]:
        """Return the lines of text, with at most so many names of a kind."""
        if self.equal:
            yield f"equal: {self.a.text}, {self.compared:,} tensors"
            return
        kinds = (
            ("differs", self.different),
            (f"only in {self.a.where}", self.only_a),
            (f"only in {self.b.where}", self.only_b),
        )
        for what, names in kinds:
            yield from (f"{what}: {name}" for name in names[:shown])
            if len(names) > shown:
                yield f"{what}: {len(names) - shown} more (--json has all)"
        yield f"{self.a.text}  {self.a.where}"
        yield f"{self.b.text}  {self.b.where}"
        if self.a.text.partition(":")[0] != self.b.text.partition(":")[0]:
            yield "the two hold other dtypes: give --dtype, such as bf16, to compare the numbers in that"
        lone = len(self.only_a) + len(self.only_b)
        yield f"{len(self.different):,} of {self.compared:,} tensors differ, {lone:,} are on one side only"
