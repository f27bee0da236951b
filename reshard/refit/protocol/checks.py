"""Checks of what other members have said, before anything is allocated, read or written by it: every number against what
was published. Each raises a ReshardError that names the member, the tensor, and what is out of bounds.

A message that says something valid, but not what its sender said, is found by the answer to it: whoever asks says what it
has heard (`wire.digest`), and is told what was asked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.core.limits import MOST_BUCKET_BYTES
from reshard.core.placement import LocalTensor
from reshard.device.cuda import HANDLE_BYTES
from reshard.quantization.fp8_blocks import ROUNDINGS
from reshard.refit.addresses import (
    ASKED,
    AT_ONCE,
    COLUMN,
    COUNT,
    ELEMENTS,
    ENCODED,
    EXTENT,
    ROUND,
    ROW,
    SHARD,
    WHERE,
    two,
)
from reshard.refit.codecs import BLOCKWISE, CODECS, PLAIN
from reshard.refit.protocol.encoding import pack_json, unpack_json
from reshard.refit.routes import BACKENDS

if TYPE_CHECKING:
    from reshard.comm.group import RefitGroup

# Above all that is of use: local tensors of an engine's rank, rounds in which an engine makes what it serves, buckets of
# such a round, and how often a rank's elements are asked for by one other.
MOST_TENSORS = 1 << 20
MOST_ROUNDS = 1 << 14
MOST_BUCKETS = 1 << 20
MOST_TIMES = 64
MOST_ADDRESS = 1 << 62
MOST_WORD = 200  # characters of a name
MOST_FIELDS = 1000  # of a config that are ignored
MOST_SENTENCE = 400
ROLES = ("trainer", "inference")
DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
CODEC_SOURCES = np.array([DTYPE_NUMBERS[codec.source.name] for codec in CODECS])
CODEC_ROUNDINGS = np.array([[*ROUNDINGS, None].index(getattr(codec, "rounding", None)) for codec in CODECS])


class Extents(NamedTuple):
    """How large the shards of a trainer's rank are: rows and columns ``[shards, 2]``, and the number of each one's dtype in `DTYPES`."""

    shapes: np.ndarray
    dtypes: np.ndarray

    @staticmethod
    def of(tensors: Sequence[LocalTensor], dtypes: Sequence[str]) -> "Extents":
        """Those of local tensors and their dtypes; a vector is one row, and of what has more than two dims nothing can be asked."""
        shapes = {shape: _as_matrix(shape) for shape in {tensor.shape for tensor in tensors}}
        rows = np.array([shapes[tensor.shape] for tensor in tensors], np.int64).reshape(-1, 2)
        return Extents(rows, np.array([DTYPE_NUMBERS[name] for name in dtypes], np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of an element of each shard."""
        sizes: np.ndarray = np.array([dtype.size for dtype in DTYPES.values()])[self.dtypes]
        return sizes


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) > 2:
        return 0, 0
    return two(shape, 1)


def gathered(members: "RefitGroup", key: str, value: Any) -> list[Any]:
    """Publish JSON, and read what all members have published, by rank. Raises ReshardError where this member's own is not
    there as it was said, since the others then go by something else."""
    mine = pack_json(value)
    payloads = members.gather(key, mine)
    if payloads[members.rank] != mine:
        raise ReshardError(_garbled(members.names[members.rank], key))
    return [
        unpack_json(payload, f"'{key}' of {members.names[rank]}") for rank, payload in enumerate(payloads)
    ]


def check_own(members: "RefitGroup", key: str, said: bytes, heard: bytes) -> None:
    """Raise ReshardError where what others have heard of this member is not what it has said."""
    if said != heard:
        raise ReshardError(_garbled(members.names[members.rank], key))


def _garbled(name: str, key: str) -> str:
    return f"'{key}' of {name} did not arrive as it was sent: connect again"


def check_greeting(peer: Any, rank: int) -> None:
    """Raise ReshardError where a member has said no protocol and no name, the only things that all versions have said alike."""
    if not isinstance(peer, dict) or type(peer.get("protocol")) is not int or not _is_word(peer.get("name")):
        raise ReshardError(
            f"rank {rank} does not say who it is, and of which version: give all members the same reshard"
        )


def check_ignored_fields(peer: Mapping[str, Any]) -> None:
    """Raise ReshardError where a member does not name its version and the fields of a config that it ignores."""
    fields = peer.get("ignored")
    named = isinstance(fields, list) and len(fields) <= MOST_FIELDS and all(map(_is_word, fields))
    if not named or not _is_word(peer.get("reshard")):
        raise ReshardError(
            f"{peer['name']} does not name its version, or the fields of a config that it ignores"
        )


def check_hello(peer: Mapping[str, Any]) -> None:
    """Raise ReshardError where a member has said something of itself that makes no sense (`agreement.hello`)."""
    roles = peer.get("roles")
    valid = {
        "roles": isinstance(roles, list) and all(r in ROLES for r in roles) and len({*map(str, roles)}) == len(roles),
        "backend": isinstance(peer.get("backend"), str) and peer["backend"] in BACKENDS,
        "bucket_bytes": _is_number(peer.get("bucket_bytes"), 1, MOST_BUCKET_BYTES),
        "keep_mapped": isinstance(peer.get("keep_mapped"), bool),
        **{key: _is_number(peer.get(key), 0, MOST_ADDRESS) for key in ("user", "pid")},
        **{key: _is_word(peer.get(key)) for key in ("reshard", "device", "host", "gpu", "namespaces")},
    }  # fmt: skip
    for key, holds in valid.items():
        if not holds:
            raise ReshardError(
                f"{peer['name']} says {key} {peer.get(key)!r:.80} of itself, which makes no sense"
            )


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_WORD and (value.isprintable() or not value)


def _is_number(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def check_asked(asked: np.ndarray, extents: Extents, who: str, name_of: Callable[[int], str]) -> None:
    """Check the pieces that `who` asks this trainer's rank for (`addresses.Pieces.asked`) against its shards."""
    shard, count = asked[:, SHARD], len(extents.shapes)
    row = _first((shard < 0) | (shard >= count))
    if row is not None:
        raise ReshardError(f"{who} asks for shard {shard[row]} of {count}, which are numbered from 0")
    shapes, begins, lengths = extents.shapes[shard], asked[:, [ROW, COLUMN]], asked[:, [COUNT, ELEMENTS]]
    row = _first(_leaves(begins, lengths, shapes))
    if row is not None:
        box = f"{lengths[row].tolist()} elements at {begins[row].tolist()}"
        raise ReshardError(
            f"{who} asks for {box} of {name_of(int(shard[row]))}, of which this rank has {shapes[row].tolist()}"
        )
    times = lengths.astype(np.float64).prod(1).sum() / max(
        1.0, extents.shapes.astype(np.float64).prod(1).sum()
    )
    if times > MOST_TIMES:
        raise ReshardError(f"{who} asks for {times:.0f} times all elements that this rank has")
    codec, dtypes = asked[:, ENCODED], extents.dtypes[shard]
    row = _first((codec < 0) | (codec >= len(CODECS)))
    if row is None:
        row = _first(
            (codec != PLAIN) & (CODEC_SOURCES[codec] != dtypes)
            | (BLOCKWISE[codec] & (asked.shape[1] == ASKED))
        )
    if row is not None:
        has = list(DTYPES)[dtypes[row]]
        raise ReshardError(
            f"{who} asks for {name_of(int(shard[row]))} by codec {codec[row]}, which none of {has} is"
        )
    if asked.shape[1] > ASKED:
        _check_destinations(asked, who)


def _check_destinations(asked: np.ndarray, who: str) -> None:
    """Check where pieces go that are made into blocks on their way, and the rounds of all."""
    numbers = asked[:, ROUND]
    row = _first((numbers < AT_ONCE) | (numbers >= MOST_ROUNDS))
    if row is not None:
        raise ReshardError(
            f"{who} asks for pieces in round {numbers[row]}, and there are at most {MOST_ROUNDS:,}"
        )
    blocks = asked[BLOCKWISE[asked[:, ENCODED]]]
    tensor, begins, extents = blocks[:, WHERE.start], blocks[:, WHERE][:, 1:], blocks[:, EXTENT]
    row = _first((tensor < 0) | (tensor >= MOST_TENSORS))
    if row is not None:
        raise ReshardError(
            f"{who} asks for blocks of its tensor {tensor[row]}, and there are at most {MOST_TENSORS:,}"
        )
    row = _first((extents < 1).any(1) | _leaves(begins, blocks[:, [COUNT, ELEMENTS]], extents))
    if row is not None:
        box = f"{blocks[row, [COUNT, ELEMENTS]].tolist()} elements at {begins[row].tolist()}"
        raise ReshardError(
            f"{who} asks for blocks of {box} of its tensor {tensor[row]}, which has {extents[row].tolist()}"
        )
    # One tensor has one shape, and its blocks one rounding.
    known = np.zeros((int(tensor.max(initial=-1)) + 1, 3), np.int64)
    told = np.concatenate([extents, CODEC_ROUNDINGS[blocks[:, ENCODED]][:, None]], 1)
    known[tensor] = told
    row = _first((known[tensor] != told).any(1))
    if row is not None:
        raise ReshardError(f"{who} asks for blocks of its tensor {tensor[row]} in two shapes or roundings")


def _leaves(begins: np.ndarray, lengths: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Which boxes are empty, or leave their tensor; also where sums would overflow."""
    outside: np.ndarray = (
        (begins < 0) | (begins > shapes) | (lengths < 1) | (lengths > shapes - begins)
    ).any(1)
    return outside


def _first(wrong: np.ndarray) -> int | None:
    """The first row that is wrong."""
    return int(wrong.argmax()) if wrong.any() else None


def check_memory(memory: Any, who: str) -> None:
    """Check what a trainer's rank has said of the allocations that others may map (`addresses.memory_of`)."""
    allocations = memory.get("allocations") if isinstance(memory, dict) else None
    if not isinstance(allocations, list) or not isinstance(memory.get("exported"), bool):
        raise ReshardError(f"{who} does not say where its memory is")
    end = 1
    for allocation in allocations:
        if not isinstance(allocation, list) or len(allocation) != 3:
            raise ReshardError(f"{who} says {allocation!r:.80} of an allocation, which is none")
        base, size, handle = allocation
        if (
            not _is_number(base, end, MOST_ADDRESS)
            or not _is_number(size, 1, MOST_ADDRESS)
            or not is_handle(handle)
        ):
            raise ReshardError(
                f"{who} says that {size!r:.40} bytes at {base!r:.40} can be mapped as {handle!r:.80}"
            )
        end = base + size


def is_handle(value: Any) -> bool:
    """Whether a text has the form of a handle of CUDA memory (`live.cuda.exported`)."""
    return (
        isinstance(value, str)
        and len(value) == 2 * HANDLE_BYTES
        and all(c in "0123456789abcdef" for c in value)
    )


def check_regions(
    memory: Mapping[str, Any],
    asked: np.ndarray,
    extents: Extents,
    mapped: bool,
    who: str,
    names: Sequence[str],
) -> None:
    """Check where the shards of a trainer's rank lie that it is asked for; where its memory is `mapped`, that all lie in what it
    exports. `names` are the pieces', for the sentence."""
    regions = memory["regions"]
    if regions.shape != (len(extents.shapes), 2):
        raise ReshardError(
            f"{who} says where {len(regions)} shards lie, and has published {len(extents.shapes)}"
        )
    shards, where = np.unique(asked[:, SHARD], return_index=True)
    rows, columns = extents.shapes[shards].T
    address, pitch = regions[shards].T
    width = columns * extents.sizes[shards]
    ends = address.astype(np.float64) + (rows - 1.0) * pitch + width
    wrong = (address <= 0) | (pitch < 0) | ((rows > 1) & (pitch < width)) | (ends >= MOST_ADDRESS)
    last = np.where(wrong, 0, address + (rows - 1) * np.where(wrong, 0, pitch) + width)
    if mapped:
        bounds = np.array([entry[:2] for entry in memory["allocations"]], np.int64).reshape(-1, 2)
        around = np.searchsorted(bounds[:, 0], address, "right") - 1
        wrong |= around < 0
        if len(bounds):
            wrong |= last > bounds[around].sum(1)
    row = _first(wrong)
    if row is not None:
        name = names[where[row]] if names else f"shard {shards[row]}"
        lies = f"{rows[row]} rows of {width[row]} bytes, {pitch[row]} apart, at {address[row]:#x}"
        raise ReshardError(f"{who} says that {name} lies in {lies}, which leaves the memory that it shares")


def check_slab(
    slab: Any,
    rank: int,
    size: int,
    slots: int,
    limit_of: Callable[[int], int],
    handle: Callable[[str], bool],
    who: str,
) -> int:
    """Check what a trainer's rank has said of its slab, from which `rank` of `size` members reads; where this one's slots begin
    there, in bytes. `limit_of` gives the bytes of a slot by how many read."""
    if not isinstance(slab, dict) or not isinstance(slab.get("starts"), list) or not slab["starts"]:
        raise ReshardError(f"{who} does not say what its slab is")
    starts, limit = slab["starts"], slab.get("limit")
    pairs = all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in starts
    )
    readers = [pair[0] for pair in starts] if pairs else []
    dense = pairs and len(starts) <= size and readers == sorted({*readers}) and limit == limit_of(len(starts))
    if (
        not dense
        or type(limit) is not int
        or [pair[1] for pair in starts] != [slots * limit * i for i in range(len(starts))]
    ):
        raise ReshardError(
            f"{who} says that its slab has slots of {limit!r:.40} bytes at {starts!r:.80}, which is not how they are cut"
        )
    if (
        not _is_number(slab.get("number"), 0, MOST_ADDRESS)
        or not isinstance(slab.get("handle"), str)
        or not handle(slab["handle"])
    ):
        raise ReshardError(f"{who} names its slab {slab.get('handle')!r:.80}, which is none of its memory")
    if rank not in readers:
        raise ReshardError(f"{who} has no slots for this member in its slab")
    start: int = dict(starts)[rank]
    return start


def most_buckets(said: Sequence[Any], names: Mapping[int, str]) -> dict[int, int]:
    """How many buckets each of the engines' rounds takes, from what all members have said of their own, as pairs. The most
    is said by both ends of a pair, which cut the same pieces alike."""
    counts: dict[int, list[tuple[int, int]]] = {}
    for rank, pairs in enumerate(said):
        if (
            not isinstance(pairs, list)
            or len(pairs) > MOST_ROUNDS + 1
            or not all(map(_counts_buckets, pairs))
        ):
            raise ReshardError(f"{names[rank]} says {pairs!r:.80} of its buckets, which makes no sense")
        for number, count in pairs:
            counts.setdefault(number, []).append((count, rank))
    most = {}
    for number, of_members in counts.items():
        (largest, rank), *others = sorted(of_members, reverse=True)
        if largest and (not others or others[0][0] != largest):
            raise ReshardError(
                f"{names[rank]} alone fills {largest:,} buckets in round {number}: connect again"
            )
        most[number] = largest
    return most


def _counts_buckets(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return _is_number(pair[0], AT_ONCE, MOST_ROUNDS) and _is_number(pair[1], 0, MOST_BUCKETS)


def check_unmapped(
    said: Sequence[Any], trainers: Sequence[int], names: Mapping[int, str]
) -> dict[tuple[int, int], str]:
    """By a trainer's rank and an inference rank why the second cannot map the first one's memory, from what all members have said."""
    unmapped = {}
    for rank, pairs in enumerate(said):
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


def check_partners(said: Sequence[Any], names: Mapping[int, str]) -> None:
    """Check with how many others each member exchanges buckets."""
    for rank, count in enumerate(said):
        if not _is_number(count, 0, len(said)):
            raise ReshardError(
                f"{names[rank]} says that it exchanges buckets with {count!r:.40} of {len(said)} members"
            )


def check_digests(payload: bytes, count: int, who: str) -> np.ndarray:
    """The digests of so many pieces and parcels, as a trainer's rank has sent them."""
    if len(payload) != 8 * count:
        raise ReshardError(
            f"{who} sends {len(payload):,} bytes of digests, and not {8 * count:,}: is it of the same version?"
        )
    return np.frombuffer(payload, np.int64)
