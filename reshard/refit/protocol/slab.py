"""The slab in which a member has pieces that others read (``slab/TRANSPORT``), and what members of a line tell each
other before, to cut it alike (``lines/TRANSPORT``)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.protocol.encoding import MOST_ADDRESS, check_own, is_number, pack_json, unpack_json


class LineLoad(NamedTuple):
    """What a member has to do with lines: in how many it has slots of its own, and the bytes of the largest in which it
    gets what several ranks want."""

    slots: int
    relayed: int


def exchange_loads(
    group: RefitGroup, transport: str, own: LineLoad, ranks: Collection[int]
) -> dict[int, LineLoad]:
    """Tell others what this member has to do with lines; return what these ranks, of which it is one, say. Raises
    ReshardError if what one says makes no sense."""
    key, payload = f"lines/{transport}", pack_json([*own])
    group.post(key, payload)
    loads = {}
    for rank, said in zip(ranks, group.read_all(key, ranks), strict=True):
        if rank == group.rank:
            check_own(group, key, payload, said)
        fields = unpack_json(said, f"'{key}' of {group.names[rank]}")
        if (
            not isinstance(fields, list)
            or len(fields) != 2
            or not is_number(fields[0], 0, MOST_ADDRESS)
            or not is_number(fields[1], 0, MOST_ADDRESS)
        ):
            raise ReshardError(f"{group.names[rank]} says {fields!r:.80} of its lines, which makes no sense")
        loads[rank] = LineLoad(*fields)
    return loads


@dataclass(frozen=True)
class SlabLocation:
    """A slab that other processes find by `handle`: the slots of each line that others read here, one line's after the
    other's, as (reader, bytes of a slot) in `lines`. `number` tells it from an earlier slab with the same handle."""

    number: int
    handle: str
    lines: list[tuple[int, int]]

    def size(self, slots: int) -> int:
        """Return the bytes of all lines together, each of so many slots."""
        return slots * sum(limit for _, limit in self.lines)

    def starts(self, reader: int, slots: int) -> list[int]:
        """Return where the slots of each line start that a member reads."""
        starts = accumulate((slots * limit for _, limit in self.lines), initial=0)
        return [start for start, (rank, _) in zip(starts, self.lines, strict=False) if rank == reader]

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
        limits: Sequence[int],
        may_have: Callable[[str], bool],
        who: str,
    ) -> "SlabLocation":
        """Return the slab of a member from which `rank` of `size` members reads.

        `limits` are the bytes of a slot of each line that it reads there, and `may_have` says whether that process
        may have a handle. Raises ReshardError where the slab is not cut as both ends cut it.
        """
        lines = fields.get("lines") if isinstance(fields, dict) else None
        if not isinstance(lines, list) or not lines:
            raise ReshardError(f"{who} does not say what its slab is")
        are_pairs = all(
            isinstance(pair, list)
            and len(pair) == 2
            and is_number(pair[0], 0, size - 1)
            and is_number(pair[1], 1, MOST_ADDRESS)
            for pair in lines
        )
        if not are_pairs or [limit for reader, limit in lines if reader == rank] != [*limits]:
            raise ReshardError(
                f"{who} says that its slab has slots of {lines!r:.80} (reader, bytes), which is not how they are cut"
            )
        number: Any = fields.get("number")
        handle: Any = fields.get("handle")
        if not is_number(number, 0, MOST_ADDRESS) or not isinstance(handle, str) or not may_have(handle):
            raise ReshardError(f"{who} names its slab {handle!r:.80}, which is none of its memory")
        return SlabLocation(number, handle, [(reader, limit) for reader, limit in lines])
