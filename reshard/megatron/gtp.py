"""Weights that generalized tensor parallelism (GTP) splits, as Megatron-Core 0.19 and 0.20 save them.

GTP pads the rows that a tensor parallel rank has of a weight, at their end, and cuts them into one shard for each of
its own ranks. A key of a checkpoint has the shards of all tensor parallel ranks one after the other:

    40 rows at TP 2, GTP 2: 20 rows a rank, padded to 32. Rows 0 .. 15 of the key are rows 0 .. 15 of the weight,
    16 .. 19 are 16 .. 19, 20 .. 31 are padding, and 32 .. 51 are rows 20 .. 39.

Of SwiGLU's ``linear_fc1``, whose ranks have gate above up, the first half of *each shard* is stored where gate is
without GTP, the second half where up is. So the rows of a key follow from the sizes that it was saved at: Megatron's
own loader gets other weights from it at other sizes.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor
from reshard.formats.torch_dist import Key
from reshard.megatron.parameters import Parameter, parts_inside

# Rows that a shard's are a multiple of: ``pad_for_alignment``, which is 32 for MXFP8.
ALIGNMENTS = (16, 32)
# Of Megatron, by which it names the sizes of all weights but experts', and of experts'.
ARGUMENTS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
SHARDS_ARGUMENTS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
# Weights whose columns TP splits, so that only GTP splits their rows: of every kind of layer one.
_ROW_PARALLEL = (".linear_proj.weight", ".linear_fc2.weight", ".out_proj.weight")
_FINAL_NORMS = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")


class Gtp(NamedTuple):
    """The ranks of GTP for the weights of `experts`, and for all `others`
    (``expert_gtp_weight_remat_size`` and ``gtp_weight_remat_size``)."""

    others: int = 1
    experts: int = 1

    def of(self, p: Parameter) -> int:
        """Return how many ranks share a parameter."""
        return self.others if p.expert is None else self.experts

    def named(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return both sizes with the names that layouts have for them."""
        return ("gtp", self.others), ("egtp", self.experts)


WITHOUT_GTP = Gtp()


class Piece(NamedTuple):
    """`rows` rows of a chunk from row `at` on, which are those of a parameter from `row` on."""

    at: int
    row: int
    rows: int


class ShardedRows(NamedTuple):
    """The rows of a key, as those of a parameter.

    Each of `slices` tensor parallel ranks has `rows` of the parameter's rows, which are in `shards` chunks of
    `chunk_rows` each, `halves` chunks a shard. `half` is the one that the key has alone
    (``singleton_local_shards``).
    """

    slices: int
    rows: int
    shards: int
    chunk_rows: int
    halves: int
    half: int | None

    @property
    def key_rows(self) -> int:
        """All rows of the key."""
        return self.slices * self.shards * self.halves * self.chunk_rows

    def offset(self, rank: int, shard: int, half: int) -> int:
        """Return the first row of a chunk."""
        return ((half * self.slices + rank) * self.shards + shard) * self.chunk_rows

    def pieces(self, offset: int) -> Iterator[Piece]:
        """Yield the rows of the chunk at an offset that are the parameter's; the others are padding."""
        index, half = offset // self.chunk_rows, self.half
        if half is None:
            half, index = divmod(index, self.slices * self.shards)
        rank, shard = divmod(index, self.shards)
        first = (shard * self.halves + half) * self.chunk_rows  # among the rank's own rows, padding included
        # The rank's rows in the parameter: gate and up apart, or all in one.
        length = self.rows // self.halves
        for part in range(self.halves):
            low, high = max(first, part * length), min(first + self.chunk_rows, (part + 1) * length)
            if low < high:
                row = (part * self.slices + rank) * length + low - part * length
                yield Piece(low - first, row, high - low)


def ranks_of_weight(p: Parameter, gtp: Gtp) -> int:
    """Return among how many ranks GTP splits a parameter: linear layers' weights and those of the vocabulary are
    split, routers, norms and biases are not."""
    is_weight = len(p.shape) == 2 and p.name.endswith(".weight") and not p.name.endswith("router.weight")
    return gtp.of(p) if is_weight else 1


def padded_rows(p: Parameter, slices: int, shards: int) -> ShardedRows:
    """Return the rows that Megatron gives a key of a parameter which this many tensor parallel ranks and ranks of GTP
    share."""
    own = p.shape[0] // slices
    rows = -(-own // (ALIGNMENTS[0] * shards)) * ALIGNMENTS[0]
    return ShardedRows(slices, own, shards, rows // p.halves, p.halves, None)


def rows_of_key(
    p: Parameter, box: Box, rows: int, chunk: tuple[int, ...], gtp: int, where: str
) -> ShardedRows | None:
    """Return how the rows of a key, and those of each of its chunks, are those of a parameter, of which the key
    has `box`; None where they are as without GTP. Raises ReshardError where GTP does not save such a parameter so."""
    halved = p.halves == 2
    if gtp == 1 or len(p.shape) != 2 or not chunk[0] or (rows == p.shape[0] and not halved):
        return None
    alone = box.lengths != p.shape
    halves, half = (2 if halved else 1), (int(box.offsets[0] > 0) if alone else None)
    count, rest = divmod(rows, chunk[0] * (1 if alone else halves))
    slices, other = divmod(count, gtp)
    stored = chunk[0] * halves * gtp  # rows of a slice
    if not rest and not other and slices and not p.shape[0] % slices:
        own = p.shape[0] // slices
        if stored == own or any(stored == -(-own // (n * gtp)) * n * gtp for n in ALIGNMENTS):
            return ShardedRows(slices, own, gtp, chunk[0], halves, half)
    raise ReshardError(
        f"{where} has {rows} rows in chunks of {chunk[0]}: GTP {gtp} does not save the parameter's {p.shape[0]} so"
    )


def local_tensor_of_rows(
    p: Parameter, id: Any, rows: ShardedRows, offsets: tuple, sizes: tuple
) -> LocalTensor:
    """Return a chunk under GTP as a local tensor with the parameter's dims."""
    parts, fills, at = [], [], 0
    for piece in sorted(rows.pieces(offsets[0])):
        found, padding = parts_inside(p, Box((piece.row, *offsets[1:]), (piece.rows, *sizes[1:])))
        parts += [part._replace(at=(part.at[0] + piece.at, *part.at[1:])) for part in found]
        fills += [Box((box.offsets[0] + piece.at, *box.offsets[1:]), box.lengths) for box in padding]
        at = piece.at + piece.rows
    if at < sizes[0]:
        fills.append(Box((at, *(0 for _ in sizes[1:])), (sizes[0] - at, *sizes[1:])))
    return LocalTensor(id, sizes, tuple(parts), tuple(fills))


def says_gtp(args: Mapping[str, Any]) -> bool:
    """Return True if a trainer's arguments say at which sizes it ran: by name, or as those of Megatron-LM before 0.19,
    which has none."""
    return "num_layers" in args or names_gtp(args)


def names_gtp(settings: Mapping[str, Any]) -> bool:
    """Return True if settings have a size of GTP."""
    return any(settings.get(name) is not None for name in (*ARGUMENTS, *SHARDS_ARGUMENTS))


def gtp_of(keys: Mapping[str, Key], said: Mapping[str, Any] | None, where: object) -> Gtp:
    """Return the sizes that a checkpoint was saved at, by what its trainer's arguments or config have `said`.

    Raises ReshardError if the chunks contradict that, and if nothing is said and they are cut as by GTP: in which order
    gate and up lie, they do not show.
    """
    found = gtp_of_keys(keys)
    if said is None:
        if found == WITHOUT_GTP:
            return found
        raise ReshardError(
            f"{where} has weights cut into rows as by GTP {found.others} and, of experts, {found.experts}, and no args "
            f"or run_config.yaml that say whether it was saved under GTP: convert it where its run_config.yaml is "
            f"beside it"
        )
    named = named_gtp(said, where)
    if not any(".experts." in key for key in keys):
        named = named._replace(experts=1)  # of no weight
    if named not in (found, WITHOUT_GTP):
        raise ReshardError(
            f"{where} has args of GTP {named.others} and, of experts, {named.experts}, but weights that GTP "
            f"{found.others} and {found.experts} has cut: it is not whole, or was changed afterward"
        )
    return named


def named_gtp(args: Mapping[str, Any], where: object) -> Gtp:
    """Return the sizes that a trainer's arguments say: by the numbers of shards, which Megatron goes by, else
    themselves; 1 where they say none. Raises ReshardError where the two contradict each other."""
    tp = args.get("tensor_model_parallel_size") or 1
    sizes = []
    for name, shards, own in zip(
        ARGUMENTS, SHARDS_ARGUMENTS, (tp, args.get("expert_tensor_parallel_size") or tp), strict=True
    ):
        size = (args.get(shards) or 0) // own or args.get(name) or 1
        if (args.get(name) or 1) not in (1, size):
            raise ReshardError(
                f"{where} was saved with {shards} {args[shards]} and {name} {args[name]}, which contradict each other: "
                "correct the one that is wrong"
            )
        sizes.append(size)
    return Gtp(*sizes)


def gtp_of_keys(keys: Mapping[str, Key]) -> Gtp:
    """Return the sizes that a checkpoint was saved at, by its chunks: no tensor parallel rank has only some rows of
    an output projection. Megatron's FSDP2 splits the rows of all tensors, norms too, and is none of GTP."""
    if any(key in keys and len(keys[key].chunks) > 1 for key in _FINAL_NORMS):
        return WITHOUT_GTP
    found: dict[bool, set[int]] = {False: set(), True: set()}
    for key, entry in keys.items():
        name, numbers, _ = key.partition(".weight")
        if not f"{name}{numbers}".endswith(_ROW_PARALLEL) or not key.startswith(("decoder.", "mtp.")):
            continue
        chunk = next((sizes for _, sizes in entry.chunks if all(sizes)), None)
        if chunk is not None and len(chunk) > 1:
            expert = ".experts." in key
            found[expert].add(entry.shape[-2] // chunk[-2])
    # GTP cuts them all alike; what limits a chunk's bytes does not.
    return Gtp(*(sizes.pop() if len(sizes) == 1 else 1 for sizes in (found[False], found[True])))


def vocabulary_of(stored: int, chunk_rows: int, gtp: int, padded_vocab: Any, where: object) -> int:
    """Return the vocabulary rows of a model whose embedding is saved with `stored` rows under GTP, in chunks of
    `chunk_rows`: `padded_vocab` of the trainer's arguments. Raises ReshardError if it does not say them."""
    slices = stored // (chunk_rows * gtp) if gtp > 1 else 1
    if slices <= 1:
        return stored  # what GTP pads follows what is padding anyhow
    own = padded_vocab // slices if type(padded_vocab) is int and padded_vocab > 0 else 0
    if own * slices != padded_vocab or stored // slices not in {
        -(-own // (n * gtp)) * n * gtp for n in ALIGNMENTS
    }:
        raise ReshardError(
            f"{where} was saved under GTP {gtp}, which has padded the {stored // slices} vocabulary rows of each of "
            f"{slices} tensor parallel ranks: its args do not say padded_vocab_size, without which a row of the "
            "vocabulary cannot be told from padding (save it with Megatron-LM's arguments, or at TP 1)"
        )
    return int(padded_vocab)


def elements_of(entry: Key) -> int:
    """Return how many elements the chunks of a key hold."""
    return sum(prod(sizes) for _, sizes in entry.chunks)
