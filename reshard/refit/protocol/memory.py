"""The memory of a trainer's rank's shards (``regions``, ``memory``), and which of it cannot be
mapped (``unmapped``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.device.cuda import HANDLE_BYTES
from reshard.refit.copying.addresses import SHARD
from reshard.refit.protocol.encoding import (
    MOST_ADDRESS,
    digest,
    exchange_json,
    is_number,
    pack_array,
    pack_json,
    unpack_array,
    unpack_json,
)
from reshard.refit.protocol.held import ShardSizes
from reshard.refit.protocol.requests import first_row

MOST_SENTENCE = 400


@dataclass(frozen=True, eq=False)
class TrainerMemory:
    """The memory of a trainer's rank: (address, pitch in bytes) of each shard ``[shards, 2]``, the
    `allocations` that other processes may map, in the order of addresses as (first address, bytes,
    handle), and whether all that others read is `exported` so."""

    regions: np.ndarray
    allocations: Sequence[tuple[int, int, str]]
    exported: bool

    def post(self, group: RefitGroup) -> bytes:
        """Post it, and return its digest."""
        regions = pack_array(self.regions)
        memory = pack_json({"allocations": self.allocations, "exported": self.exported})
        group.post("regions", regions)
        group.post("memory", memory)
        return digest(regions, memory)

    @staticmethod
    def read(group: RefitGroup, expected_digests: Mapping[int, bytes]) -> dict[int, "TrainerMemory"]:
        """Read that of trainers' ranks. Raises ReshardError where it makes no sense, or has
        another digest than that rank said."""
        regions, memory = (group.read_all(key, expected_digests) for key in ("regions", "memory"))
        return {
            rank: TrainerMemory._decoded(*of_rank, expected_digests[rank], group.names[rank])
            for rank, of_rank in zip(expected_digests, zip(regions, memory, strict=True), strict=True)
        }

    @staticmethod
    def _decoded(regions: bytes, memory: bytes, expected_digest: bytes, who: str) -> "TrainerMemory":
        """Return the memory in the messages of `who`."""
        if digest(regions, memory) != expected_digest:
            raise ReshardError(f"what {who} says of its memory did not arrive as it was sent: connect again")
        what = f"what {who} says of its memory"
        return TrainerMemory.checked(unpack_json(memory, what), unpack_array(regions, what, [2]), who)

    @staticmethod
    def checked(fields: Any, regions: np.ndarray, who: str) -> "TrainerMemory":
        """Return the memory that a message of `who` describes. Raises ReshardError where its
        allocations make no sense."""
        allocations = fields.get("allocations") if isinstance(fields, dict) else None
        if not isinstance(allocations, list) or not isinstance(fields.get("exported"), bool):
            raise ReshardError(f"{who} does not say where its memory is")
        end = 1
        for allocation in allocations:
            if not isinstance(allocation, list | tuple) or len(allocation) != 3:
                raise ReshardError(f"{who} says {allocation!r:.80} of an allocation, which is none")
            base, size, handle = allocation
            numbers = is_number(base, end, MOST_ADDRESS) and is_number(size, 1, MOST_ADDRESS)
            if not numbers or not is_handle(handle):
                raise ReshardError(
                    f"{who} says that {size!r:.40} bytes at {base!r:.40} can be mapped as {handle!r:.80}"
                )
            end = base + size
        return TrainerMemory(
            regions, [(base, size, handle) for base, size, handle in allocations], fields["exported"]
        )


def is_handle(value: Any) -> bool:
    """Return True for a text of the form of a handle of CUDA memory (`reshard.device.cuda.exported`)."""
    return (
        isinstance(value, str)
        and len(value) == 2 * HANDLE_BYTES
        and all(c in "0123456789abcdef" for c in value)
    )


def check_regions(
    memory: TrainerMemory,
    requests: np.ndarray,
    held: ShardSizes,
    mapped: bool,
    who: str,
    names: Sequence[str],
) -> None:
    """Check where the shards lie that a trainer's rank is asked for; where its memory is `mapped`,
    that all lie in what it exports. `names` are the pieces', for the error."""
    regions = memory.regions
    if regions.shape != (len(held.shapes), 2):
        raise ReshardError(
            f"{who} says where {len(regions)} shards lie, and has published {len(held.shapes)}"
        )
    shards, where = np.unique(requests[:, SHARD], return_index=True)
    rows, columns = held.shapes[shards].T
    address, pitch = regions[shards].T
    width = columns * held.itemsizes[shards]
    ends = address.astype(np.float64) + (rows - 1.0) * pitch + width
    wrong = (address <= 0) | (pitch < 0) | ((rows > 1) & (pitch < width)) | (ends >= MOST_ADDRESS)
    last = np.where(wrong, 0, address + (rows - 1) * np.where(wrong, 0, pitch) + width)
    if mapped:
        bounds = np.array([(base, size) for base, size, _ in memory.allocations], np.int64).reshape(-1, 2)
        around = np.searchsorted(bounds[:, 0], address, "right") - 1
        wrong |= around < 0
        if len(bounds):
            wrong |= last > bounds[around].sum(1)
    row = first_row(wrong)
    if row is not None:
        name = names[where[row]] if names else f"shard {shards[row]}"
        lies = f"{rows[row]} rows of {width[row]} bytes, {pitch[row]} apart, at {address[row]:#x}"
        raise ReshardError(f"{who} says that {name} lies in {lies}, which leaves the memory that it shares")


def exchange_unmapped(
    group: RefitGroup, unmapped: Sequence[tuple[int, str]], trainers: Sequence[int]
) -> dict[tuple[int, int], str]:
    """Tell all members which trainers' ranks have memory that this one cannot map, and why. Returns
    that of all, by trainer's rank and inference rank."""
    return check_unmapped(exchange_json(group, "unmapped", unmapped), trainers, group.names)


def check_unmapped(
    lists: Sequence[Any], trainers: Sequence[int], names: Mapping[int, str]
) -> dict[tuple[int, int], str]:
    """Return the reasons in all members' lists by trainer's rank and inference rank. Raises
    ReshardError where one makes no sense."""
    unmapped = {}
    for rank, pairs in enumerate(lists):
        for pair in pairs if isinstance(pairs, list) else [None]:
            if (
                not isinstance(pair, list)
                or len(pair) != 2
                or pair[0] not in trainers
                or not isinstance(pair[1], str)
            ):
                raise ReshardError(
                    f"{names[rank]} says {pairs!r:.80} of memory that it cannot map, which makes no sense"
                )
            unmapped[pair[0], rank] = pair[1][:MOST_SENTENCE]
    return unmapped
