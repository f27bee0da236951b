"""The pieces that inference ranks ask a trainer's rank for (``pieces/RANK``), and its answer (``asked``)."""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.refit.codecs import CODEC_ROUNDINGS, CODECS, IN_BLOCKS, PLAIN
from reshard.refit.copying.addresses import (
    BLOCK_REQUEST_COLUMNS,
    COLUMN_COUNT,
    DESTINATION,
    DESTINATION_SHAPE,
    FIRST_COLUMN,
    FIRST_ROW,
    REQUEST_CODEC,
    REQUEST_COLUMNS,
    ROW_COUNT,
    SHARD,
    STAGED_ROUND,
    UNSTAGED,
)
from reshard.refit.protocol.encoding import DIGEST_BYTES, inflated, pack_array, readable, unpack_array
from reshard.refit.protocol.held import DTYPE_NUMBERS, ShardSizes

# Above all that is of use: an engine's local tensors, its rounds, and how often one member wants a
# rank's elements.
MOST_TENSORS = 1 << 20
MOST_ROUNDS = 1 << 14
MOST_TIMES = 64
CODEC_SOURCES = np.array([DTYPE_NUMBERS[codec.source.name] for codec in CODECS])


class PieceRequest(NamedTuple):
    """The pieces that an inference rank wants, behind the digest of what it has read that the
    trainer's rank holds."""

    held_digest: bytes
    pieces: np.ndarray

    @staticmethod
    def key(trainer: int) -> str:
        """Return the key of what a trainer's rank is asked for."""
        return f"pieces/{trainer}"

    def encode(self) -> bytes:
        """Return its bytes."""
        return self.held_digest + pack_array(self.pieces)

    @staticmethod
    def decode(payload: bytes, who: str) -> "PieceRequest":
        """Return the request in a message of `who`."""
        pieces = unpack_array(
            payload[DIGEST_BYTES:], f"what {who} asks for", (REQUEST_COLUMNS, BLOCK_REQUEST_COLUMNS)
        )
        return PieceRequest(payload[:DIGEST_BYTES], pieces)


class RequestsRead(NamedTuple):
    """A trainer's rank's answer: digests of its `TrainerMemory`, of its cuts (`protocol.cuts`), and of the requests of
    the inference ranks, one after the other. Replicas ask for the same, so that nearly nothing of the digests of a
    large fleet travels to each."""

    memory_digest: bytes
    cuts_digest: bytes
    request_digests: bytes

    def of(self, position: int) -> bytes:
        """Return the digest of the request of the inference rank at this place among them."""
        return self.request_digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]

    def encode(self) -> bytes:
        """Return its bytes."""
        return self.memory_digest + self.cuts_digest + zlib.compress(self.request_digests, 1)

    @staticmethod
    def decode(payload: bytes, engines: int, who: str) -> "RequestsRead":
        """Return the answer of `who` to so many inference ranks. Raises ReshardError where it has
        another size."""
        size = engines * DIGEST_BYTES
        with readable(f"the answer of {who}"):
            digests = inflated(payload[2 * DIGEST_BYTES :], size)
            if len(digests) != size:
                raise ValueError(f"{len(digests):,} bytes of digests, and not {size:,}")
        return RequestsRead(payload[:DIGEST_BYTES], payload[DIGEST_BYTES : 2 * DIGEST_BYTES], digests)


def check_pieces(requests: np.ndarray, held: ShardSizes, who: str, name_of: Callable[[int], str]) -> None:
    """Check the pieces that `who` asks this trainer's rank for (`addresses.Pieces.requests`)
    against its shards."""
    shard, count = requests[:, SHARD], len(held.shapes)
    row = first_row((shard < 0) | (shard >= count))
    if row is not None:
        raise ReshardError(f"{who} asks for shard {shard[row]} of {count}, which are numbered from 0")
    shapes, begins, lengths = (
        held.shapes[shard],
        requests[:, [FIRST_ROW, FIRST_COLUMN]],
        requests[:, [ROW_COUNT, COLUMN_COUNT]],
    )
    row = first_row(_leaves(begins, lengths, shapes))
    if row is not None:
        box = f"{lengths[row].tolist()} elements at {begins[row].tolist()}"
        raise ReshardError(
            f"{who} asks for {box} of {name_of(int(shard[row]))}, of which this rank has {shapes[row].tolist()}"
        )
    times_over = lengths.astype(np.float64).prod(1).sum() / max(
        1.0, held.shapes.astype(np.float64).prod(1).sum()
    )
    if times_over > MOST_TIMES:
        raise ReshardError(f"{who} asks for {times_over:.0f} times all elements that this rank has")
    codec, dtypes = requests[:, REQUEST_CODEC], held.dtypes[shard]
    row = first_row((codec < 0) | (codec >= len(CODECS)))
    if row is None:
        row = first_row(
            (codec != PLAIN) & (CODEC_SOURCES[codec] != dtypes)
            | (IN_BLOCKS[codec] & (requests.shape[1] == REQUEST_COLUMNS))
        )
    if row is not None:
        has = list(DTYPES)[dtypes[row]]
        raise ReshardError(
            f"{who} asks for {name_of(int(shard[row]))} by codec {codec[row]}, which none of {has} is"
        )
    if requests.shape[1] > REQUEST_COLUMNS:
        _check_destinations(requests, who)


def _check_destinations(requests: np.ndarray, who: str) -> None:
    """Check where pieces go that are made into blocks on their way, and the rounds of all."""
    numbers = requests[:, STAGED_ROUND]
    row = first_row((numbers < UNSTAGED) | (numbers >= MOST_ROUNDS))
    if row is not None:
        raise ReshardError(
            f"{who} asks for pieces in round {numbers[row]}, and there are at most {MOST_ROUNDS:,}"
        )
    blocks = requests[IN_BLOCKS[requests[:, REQUEST_CODEC]]]
    tensor, begins, extents = (
        blocks[:, DESTINATION.start],
        blocks[:, DESTINATION][:, 1:],
        blocks[:, DESTINATION_SHAPE],
    )
    row = first_row((tensor < 0) | (tensor >= MOST_TENSORS))
    if row is not None:
        raise ReshardError(
            f"{who} asks for blocks of its tensor {tensor[row]}, and there are at most {MOST_TENSORS:,}"
        )
    row = first_row((extents < 1).any(1) | _leaves(begins, blocks[:, [ROW_COUNT, COLUMN_COUNT]], extents))
    if row is not None:
        box = f"{blocks[row, [ROW_COUNT, COLUMN_COUNT]].tolist()} elements at {begins[row].tolist()}"
        raise ReshardError(
            f"{who} asks for blocks of {box} of its tensor {tensor[row]}, which has {extents[row].tolist()}"
        )
    # One tensor has one shape, and its blocks one rounding.
    of_tensors = np.zeros((int(tensor.max(initial=-1)) + 1, 3), np.int64)
    of_blocks = np.concatenate([extents, CODEC_ROUNDINGS[blocks[:, REQUEST_CODEC]][:, None]], 1)
    of_tensors[tensor] = of_blocks
    row = first_row((of_tensors[tensor] != of_blocks).any(1))
    if row is not None:
        raise ReshardError(f"{who} asks for blocks of its tensor {tensor[row]} in two shapes or roundings")


def _leaves(begins: np.ndarray, lengths: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return a mask of boxes that are empty or leave their tensor, also where sums would overflow."""
    outside: np.ndarray = (
        (begins < 0) | (begins > shapes) | (lengths < 1) | (lengths > shapes - begins)
    ).any(1)
    return outside


def first_row(wrong: np.ndarray) -> int | None:
    """Return the index of the first row that is wrong, None where none is."""
    return int(wrong.argmax()) if wrong.any() else None
