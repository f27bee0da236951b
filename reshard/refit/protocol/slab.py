"""The slab in which a trainer's rank packs pieces for others to read (``slab/TRANSPORT``)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.core.errors import ReshardError
from reshard.refit.protocol.encoding import MOST_ADDRESS, is_number, pack_json, unpack_json


@dataclass(frozen=True)
class SlabLocation:
    """A slab that other processes find by `handle`: slots of `limit` bytes, several for each reader
    one after the other, where each reader's begin as (rank, bytes) in `starts`. `number` tells it
    from an earlier slab with the same handle."""

    number: int
    handle: str
    limit: int
    starts: list[tuple[int, int]]

    def encode(self) -> bytes:
        """Return its bytes."""
        return pack_json(vars(self))

    @staticmethod
    def decode(payload: bytes, who: str, **expected: Any) -> "SlabLocation":
        """Return the slab that `who` describes (`checked`)."""
        return SlabLocation.checked(unpack_json(payload, f"what {who} says of its slab"), who=who, **expected)

    @staticmethod
    def checked(
        fields: Any,
        *,
        rank: int,
        size: int,
        slots: int,
        limit_of: Callable[[int], int],
        may_have: Callable[[str], bool],
        who: str,
    ) -> "SlabLocation":
        """Return the slab of a trainer's rank from which `rank` of `size` members reads.

        `limit_of` returns the bytes of a slot by how many read, and `may_have` whether that process
        may have a handle. Raises ReshardError where the slab is not cut as both ends cut it.
        """
        if not isinstance(fields, dict) or not isinstance(fields.get("starts"), list) or not fields["starts"]:
            raise ReshardError(f"{who} does not say what its slab is")
        starts, limit = fields["starts"], fields.get("limit")
        are_pairs = all(
            isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
            for pair in starts
        )
        readers = [pair[0] for pair in starts] if are_pairs else []
        in_order = are_pairs and len(starts) <= size and readers == sorted({*readers})
        if (
            not in_order
            or type(limit) is not int
            or limit != limit_of(len(starts))
            or [pair[1] for pair in starts] != [slots * limit * index for index in range(len(starts))]
        ):
            raise ReshardError(
                f"{who} says that its slab has slots of {limit!r:.40} bytes at {starts!r:.80}, "
                f"which is not how they are cut"
            )
        number: Any = fields.get("number")
        handle: Any = fields.get("handle")
        if not is_number(number, 0, MOST_ADDRESS) or not isinstance(handle, str) or not may_have(handle):
            raise ReshardError(f"{who} names its slab {handle!r:.80}, which is none of its memory")
        if rank not in readers:
            raise ReshardError(f"{who} has no slots for this member in its slab")
        return SlabLocation(number, handle, limit, [(reader, start) for reader, start in starts])
