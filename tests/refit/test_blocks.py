"""Blocks of fp8 on their way into an engine: arithmetic, geometry, and the kernel."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.core.dtypes import DTYPES
from reshard.quantization.fp8_blocks import BLOCK, FP8, ROUNDINGS, encode
from reshard.refit.codecs import BEFORE_BLOCKS, CODECS, PLAIN, block_codec, codec_between
from reshard.refit.codecs.places import PLACES, places_of_requests
from reshard.refit.copying.addresses import (
    BLOCK_REQUEST_COLUMNS,
    DESTINATION,
    DESTINATION_SHAPE,
    NO_SLOT,
    PART_COLUMNS,
    REQUEST_CODEC,
    UNSTAGED,
    Pieces,
)
from reshard.refit.copying.digests import Digests
from reshard.refit.copying.flows import Incoming, Outgoing, Placed
from reshard.refit.copying.packing import PackedPair, PackedRound
from reshard.refit.copying.tables import (
    CODEC,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    empty_table,
)
from reshard.refit.fp8_blocks import split
from reshard.refit.fp8_blocks.items import (
    BF16,
    cut,
    digest_items_on_host,
    digest_on_host,
    items_of,
    quantize_on_host,
    size_of,
    spans_of,
)
from reshard.refit.fp8_blocks.packed import Fp8BlockDigests
from reshard.refit.fp8_blocks.tables import (
    CODES,
    ELEMENT_BYTES,
    ITEM_BLOCKS,
    NO_PIECE,
    BlockKernel,
)


def pieces_of(
    values: np.ndarray, cuts: list[tuple[int, int, int, int]], shift: int = 0, sources=("bfloat16",)
):
    """A table of pieces (row, column, rows, columns) of a matrix, each copied to memory of its own
    with a pitch of its own, in these dtypes in turn; into; what must live as long."""
    table, into, held = empty_table(len(cuts)), np.zeros((len(cuts), 3), np.int64), []
    for number, (row, column, rows, columns) in enumerate(cuts):
        source = sources[number % len(sources)]
        table[number, CODEC] = block_codec("fp32", source)
        memory = np.full((rows, columns + 8 * (number % 3) + shift), 1e30, DTYPES[source].numpy())
        memory[:, :columns] = values[row : row + rows, column : column + columns]
        held.append(memory)
        table[number, [SRC, SRC_PITCH, ROWS, WIDTH]] = memory.ctypes.data, memory.strides[0], rows, columns
        into[number] = 0, row, column
    return table, into, held


def places_for(shape: tuple[int, int], rounding: str = "fp32"):
    """An engine's tensor in blocks of this rounding, full of other things, with a pitch of its own; codes and scales
    within it."""
    rows, columns = shape
    codes = np.full((rows, columns + 48), 0xEE, np.uint8)
    scales = np.full((-(-rows // BLOCK), -(-columns // BLOCK)), -1, np.float32)
    places = np.zeros((1, PLACES), np.int64)
    at = codes.ctypes.data, scales.ctypes.data, codes.strides[0], scales.shape[1], rows, columns
    places[0] = *at, block_codec(rounding)
    return places, codes, scales


SOURCES = [("bfloat16",), ("float32",), ("float32", "bfloat16")]


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """bf16 of fp32, as torch and with it vLLM's loader make it."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(BF16.numpy())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 1500),
    st.lists(st.integers(1, 399), max_size=4),
    st.lists(st.integers(1, 1499), max_size=3),
    st.sampled_from(SOURCES),
)
def test_whatever_the_pieces_and_their_dtypes_each_block_is_made_of_bf16_of_all_of_its_own(
    rows, columns, row_cuts, column_cuts, sources
):
    values, places = weights(rows, columns), places_for((rows, columns))
    edges = sorted({0, rows, *(cut for cut in row_cuts if cut < rows)})
    sides = sorted({0, columns, *(cut for cut in column_cuts if cut < columns)})
    cuts = [(top, left, bottom - top, right - left) for top, bottom in pairwise(edges)
            for left, right in pairwise(sides)]  # fmt: skip
    table, into, held = pieces_of(values, cuts, sources=sources)
    strips = items_of(table, into, np.arange(len(cuts)), places[0])
    quantize_on_host(strips.items, strips.fragments)
    codes, scales = encode(rounded(values), "fp32")
    assert np.array_equal(places[1][:, :columns], codes.view(np.uint8)) and np.array_equal(places[2], scales)
    assert (places[1][:, columns:] == 0xEE).all() and len(held) == len(cuts)


def test_fp32_that_is_not_rounded_to_bf16_first_makes_other_codes_and_scales():
    values = weights(256, 256)
    for rounding in ROUNDINGS:
        (codes, scales), (first, factors) = (
            encode(values, rounding),
            encode(rounded(values), rounding),
        )
        assert (codes.view(np.uint8) != first.view(np.uint8)).any()
        assert (scales != factors).any() == (rounding in ("fp32", "stored"))


def test_blocks_that_no_piece_reaches_stay_as_they_are():
    values, places = weights(256, 1500), places_for((256, 1500))
    table, into, held = pieces_of(values, [(0, 0, 128, 256), (0, 512, 128, 988)])
    strips = items_of(table, into, np.arange(2), places[0])
    quantize_on_host(strips.items, strips.fragments)
    codes, scales = encode(rounded(values), "fp32")
    reached = np.ones((256, 1500), bool)
    reached[128:], reached[:, 256:512] = False, False
    assert np.array_equal(places[1][:, :1500][reached], codes.view(np.uint8)[reached]) and len(held) == 2
    assert (places[1][:, :1500][~reached] == 0xEE).all()
    assert np.array_equal(places[2] == -1, ~reached[::BLOCK, ::BLOCK]) and (scales >= 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_both_ends_of_a_pair_cut_alike_and_what_travels_is_what_is_made_in_place(seed):
    rng = np.random.default_rng(seed)
    tensors = [Sent.of(rng, tuple(rng.integers(1, 400, 2))) for _ in range(rng.integers(1, 5))]
    ends = [[], []]
    into, extents, places, held = [], [], [], []
    for number, tensor in enumerate(tensors):
        places.append(tensor.place)
        for piece in tensor.cuts:
            source = ("bfloat16", "float32")[rng.integers(2)]
            table, _, memory = pieces_of(tensor.values, [piece], sources=[source])
            row, column, rows, columns = piece
            codec, codes, _, pitch, *_ = block_codec(tensor.rounding, source), *tensor.place
            ends[0].append([table[0, SRC], 0, rows, columns, table[0, SRC_PITCH], 0, codec])
            ends[1].append([0, codes + row * pitch + column, rows, columns, 0, pitch, codec])
            into.append((number, row, column))
            extents.append(tensor.values.shape)
            held += memory
        ends[0].append(
            [tensor.plain.ctypes.data, 0, 5, tensor.plain.shape[1], tensor.plain.strides[0], 0, PLAIN]
        )
        ends[1].append(
            [0, tensor.arrived.ctypes.data, 5, tensor.plain.shape[1], 0, tensor.plain.strides[0], PLAIN]
        )
        into.append((0, 0, 0))
        extents.append((1, 1))
    order = rng.permutation(len(into))
    source, destination, where, shapes = (
        np.array(columns, np.int64)[order] for columns in (*ends, into, extents)
    )
    blocks, rounds = source[:, CODEC] != PLAIN, np.full(len(order), UNSTAGED)
    requests = np.zeros((len(order), BLOCK_REQUEST_COLUMNS), np.int64)
    requests[:, DESTINATION], requests[:, DESTINATION_SHAPE] = where, shapes
    requests[:, REQUEST_CODEC] = source[:, CODEC]
    asked = places_of_requests(requests)
    sends = PackedPair(Outgoing(source, rounds, where, asked), SRC, 1 << 16)
    receives = PackedPair(
        Incoming(destination, rounds, destination, where, {}, np.array(places)), DST, 1 << 16
    )
    assert sends.rounds == receives.rounds and np.array_equal(sends.sizes, receives.sizes)
    memory = np.zeros((1 << 16) + 16, np.uint8)
    start, cpu = memory.ctypes.data + -memory.ctypes.data % 16, torch.device("cpu")
    for index in range(sends.rounds):
        assert sends.bytes_of_round(index) == receives.bytes_of_round(index) <= 1 << 16
        # The tables are made for buffers elsewhere.
        packing, unpacking = (PackedRound.of([(pair, index, 1 << 20)], cpu) for pair in (sends, receives))
        packing.move(DST, start - (1 << 20))
        unpacking.move(SRC, start - (1 << 20))
        packing.run()
        unpacking.run()
    for tensor in tensors:
        codes, scales = encode(rounded(tensor.values), tensor.rounding)
        rows, columns = codes.shape
        assert np.array_equal(tensor.codes[:, :columns], codes.view(np.uint8)) and np.array_equal(
            tensor.plain, tensor.arrived
        )
        assert np.array_equal(tensor.scales, scales) and (tensor.codes[:, columns:] == 0xEE).all()
    there = Fp8BlockDigests(Placed(source[blocks], where[blocks]), asked, False, cpu)
    here = Fp8BlockDigests(Placed(destination[blocks], where[blocks]), np.array(places), True, cpu)
    made = digests_of(there)
    assert np.array_equal(made, digests_of(here)) and len(np.unique(made)) == len(made) and held
    for change in (lambda: tensors[0].scales.__imul__(2), lambda: tensors[-1].codes.__ixor__(1)):
        change()
        differing = there.tensors[made != digests_of(here)]
        assert 0 in differing and np.array_equal(there.tensors, here.tensors)
    assert len(tensors) - 1 in differing


def digests_of(blocks: Fp8BlockDigests) -> np.ndarray:
    blocks.begin()
    return blocks.result()


class Sent(NamedTuple):
    """A tensor that is served in blocks, the pieces in which it comes, and plain bytes beside it."""

    values: np.ndarray
    rounding: str
    cuts: list[tuple[int, int, int, int]]
    place: tuple[int, ...]
    codes: np.ndarray
    scales: np.ndarray
    plain: np.ndarray
    arrived: np.ndarray

    @staticmethod
    def of(rng: np.random.Generator, shape: tuple[int, int]) -> "Sent":
        rounding = list(ROUNDINGS)[rng.integers(len(ROUNDINGS))]
        values = weights(*shape, seed=int(rng.integers(1 << 30)))
        places, codes, scales = places_for(shape, rounding)
        rows, columns = (sorted({0, n, *rng.integers(0, n + 1, 3).tolist()}) for n in shape)
        cuts = [
            (top, left, bottom - top, right - left)
            for top, bottom in pairwise(rows)
            for left, right in pairwise(columns)
        ]
        plain = rng.integers(0, 255, (5, int(rng.integers(1, 70_000))), np.uint8)
        return Sent(
            values, rounding, cuts, tuple(places[0].tolist()), codes, scales, plain, np.zeros_like(plain)
        )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_pieces_are_cut_so_that_each_block_is_one_ranks_or_has_a_slot_and_slots_are_apart(seed):
    rng, limit = np.random.default_rng(seed), 1 << 17
    shapes = rng.integers(1, 700, (3, 2))
    requests: dict[int, list] = {rank: [] for rank in (4, 5, 9)}
    for tensor, shape in enumerate(shapes):
        rows, columns = (sorted({0, n, *rng.integers(0, n + 1, 2).tolist()}) for n in shape.tolist())
        for (top, bottom), (left, right) in product(pairwise(rows), pairwise(columns)):
            shard, row, column = rng.integers(100, 200, 3)
            codec = block_codec("fp32", ("bfloat16", "float32")[rng.integers(2)])
            asked = shard, row, column, bottom - top, right - left, codec
            requests[int(rng.choice([4, 5, 9]))].append((f"{tensor}", asked, (tensor, top, left)))
    requests = {rank: of_rank for rank, of_rank in requests.items() if of_rank}
    pieces = {
        rank: Pieces(
            [name for name, *_ in of_rank],
            np.array([asked for _, asked, _ in of_rank]),
            np.array([into for *_, into in of_rank]),
            np.full((len(of_rank), PART_COLUMNS), NO_SLOT),
        )
        for rank, of_rank in requests.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "SLAB_BYTES", limit)
        cut_pieces = split.split_pieces(pieces, shapes, 7)

    def elements(pieces: dict[int, Pieces]) -> set[tuple]:
        """Return what comes from where to where, element by element of every 13th."""
        seen = set()
        for rank, (names, asked, into, _) in pieces.items():
            for name, (shard, row, column, n, m, codec), (tensor, top, left) in zip(
                names, asked.tolist(), into.tolist(), strict=True
            ):
                assert name == f"{tensor}"
                for r, c in product(range(n), range(m)):
                    if (top + r) % 13 == 0 and (left + c) % 13 == 0:
                        assert (tensor, top + r, left + c) not in seen
                        seen |= {
                            (tensor, top + r, left + c),
                            (rank, tensor, shard, row + r, column + c, top + r, left + c, codec),
                        }
        return seen  # fmt: skip

    assert elements(pieces) == elements(cut_pieces) and cut_pieces.keys() == pieces.keys()
    assert (
        sum(int((p.requests[:, 3] * p.requests[:, 4]).sum()) for p in cut_pieces.values())
        == shapes.prod(1).sum()
    )
    blocks: dict[tuple, set] = {}
    slab: dict[int, np.ndarray] = {}
    widest = -(-shapes[:, 1].max() // BLOCK) * BLOCK * BLOCK * 2
    for rank, (_, asked, into, where) in cut_pieces.items():
        for (_, _, _, n, m, _), (tensor, top, left), (slot, number, at, pitch) in zip(
            asked.tolist(), into.tolist(), where.tolist(), strict=True
        ):
            ends = range(top // BLOCK, -(-(top + n) // BLOCK)), range(left // BLOCK, -(-(left + m) // BLOCK))
            for block in product((tensor,), *ends):
                blocks.setdefault(block, set()).add((slot, rank))
            if slot != NO_SLOT:
                assert number >= 7 and len(ends[0]) == 1
                taken = slab.setdefault(number, np.zeros(max(limit, widest), np.int64))
                spots = at + np.arange(n)[:, None] * pitch + np.arange(2 * m)
                taken[spots] += 1
    for holders in blocks.values():
        slots, ranks = ({one[i] for one in holders} for i in (0, 1))
        assert len(slots) == 1 and (slots == {NO_SLOT}) == (len(ranks) == 1)
    assert all((taken <= 1).all() for taken in slab.values())


def test_a_codec_of_blocks_is_none_of_single_elements():
    assert (
        codec_between("bfloat16", "float8_e4m3fn") is None
        and codec_between("float16", "float8_e4m3fn", "fp32") is None
    )
    numbers = [block_codec(rounding, source) for rounding in ROUNDINGS for source in ("bfloat16", "float32")]
    assert len({str(CODECS[number]) for number in numbers}) == 6 and len({*numbers}) == 8
    with pytest.raises(NotImplementedError):
        CODECS[numbers[0]].encode(np.zeros((1, 2), np.uint8))


def test_power_of_two_scales_round_up_and_rounding_twice_loses_more():
    values = rounded(weights(512, 512))
    error = {}
    for rounding in ROUNDINGS:
        codes, scales = encode(values, rounding)
        back = codes.astype(np.float32) * scales.repeat(BLOCK, 0).repeat(BLOCK, 1)
        error[rounding] = float(
            np.sqrt(
                np.square(back - values.astype(np.float32)).sum() / np.square(values.astype(np.float32)).sum()
            )
        )
        assert np.isfinite(codes.astype(np.float32)).all()
        if rounding in ("ue8m0", "twice"):
            assert (np.frexp(scales)[0] == 0.5).all()
    assert 0.02 < error["fp32"] < error["ue8m0"] * 1.02 < error["twice"] < 0.045


def test_the_kernel_makes_what_the_host_makes():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.refit.test_blocks"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parent.parent.parent,
    )
    assert done.returncode == 0 and done.stdout.count("equal") == 7, done.stdout + done.stderr[-2000:]


def interpret() -> None:
    from reshard.refit.fp8_blocks.kernels import compare_items, quantize_items

    # The interpreter does not round fp8 as GPUs do: these are numbers that become codes without.
    rng = np.random.default_rng(0)
    numbers = np.arange(256, dtype=np.uint8).view(FP8.numpy()).astype(np.float32)
    rows, columns = 170, 1168
    numbers = rng.choice(numbers[np.isfinite(numbers)], (rows, columns))
    numbers[::BLOCK, ::BLOCK] = 448
    power = rng.integers(-12, 4, (2, 10)).repeat(BLOCK, 0).repeat(BLOCK, 1)[:rows, :columns]
    values = np.ldexp(numbers, power).astype(BF16.numpy())
    # the last as what travels is made, a block at a time
    for rounding, shift, blocks, sources in [
        ("fp32", 0, ITEM_BLOCKS, SOURCES[0]),
        ("ue8m0", 0, ITEM_BLOCKS, SOURCES[1]),
        ("twice", 0, ITEM_BLOCKS, SOURCES[2]),
        ("fp32", 3, ITEM_BLOCKS, SOURCES[2]),
        ("stored", 0, ITEM_BLOCKS, SOURCES[0]),
        ("twice", 0, 1, SOURCES[1]),
    ]:
        cuts = [(0, 0, 128, 1024), (0, 1024, 128, 144), (128, 0, 20, columns), (148, 0, 22, 112 + shift),
                (148, 112 + shift, 22, columns - 112 - shift)]  # fmt: skip
        table, into, held = pieces_of(values, cuts, shift, sources)
        places, codes, scales = places_for((rows, columns), rounding)
        block_items = cut(table, into, np.arange(len(cuts)), places, blocks)
        kernel = BlockKernel(not shift, blocks, size_of(block_items.fragments[:, ELEMENT_BYTES]))
        tables = torch.from_numpy(block_items.items), torch.from_numpy(block_items.fragments)
        tiles, copied = tiles_to_copy(rng)
        quantize_items(*tables, kernel, torch.from_numpy(tiles))
        assert copied()
        expected, expected_scales = encode(values, rounding, divide=rounding == "stored")
        encoded = codes[:, :columns].view(FP8.numpy()).astype(np.float32)
        assert np.array_equal(scales, expected_scales) and np.array_equal(
            encoded, expected.astype(np.float32)
        )
        assert np.array_equal(np.signbit(encoded), np.signbit(expected.astype(np.float32)))
        assert (codes[:, columns:] == 0xEE).all() and len(held) == len(cuts)
        check_digests(tables, kernel, codes)
        if not shift:
            digests_are_equal(block_items, table, tables, kernel)
        print(rounding, "equal")
    # Of the last, a block at a time: nothing differs; then a code and a scale do.
    assert not compare_items(*tables, kernel).any()
    codes[150, 9] ^= 1
    scales[0, 1] *= 2
    differing = {tuple(at) for at in np.argwhere(compare_items(*tables, kernel).numpy())}
    of_code, of_scale = codes.ctypes.data + 128 * codes.strides[0], codes.ctypes.data + 128
    wanted = {of_code, of_scale}
    assert {int(block_items.items[index, CODES]) for (index,) in differing} == wanted
    scales_in_one_launch()
    from tests.tools.change_kernels import changes_by_the_kernels

    changes_by_the_kernels()


def check_digests(tables: tuple[torch.Tensor, torch.Tensor], kernel: BlockKernel, codes: np.ndarray) -> None:
    """Digests of items by the kernel: of what it makes those of what is served, and there those of the host; of an item
    with another code another."""
    from reshard.refit.fp8_blocks.kernels import digest_items

    def on_host() -> np.ndarray:
        return digest_items_on_host(*(table.numpy() for table in tables), served=True)

    made, served = (digest_items(*tables, kernel, served).numpy() for served in (False, True))
    assert np.array_equal(made, served) and np.array_equal(served, on_host()) and len({*made}) == len(made)
    codes[150, 9] ^= 1
    changed = digest_items(*tables, kernel, True).numpy()
    assert (changed != made).sum() == 1 and np.array_equal(changed, on_host())
    codes[150, 9] ^= 1


def tiles_to_copy(rng: np.random.Generator) -> tuple[np.ndarray, Callable[[], bool]]:
    """Tiles of 16-byte words, a single row and rows with a pitch; and what tells if they have been copied, and
    nothing around them."""
    source = rng.integers(-(1 << 62), 1 << 62, (24, 40, 2))
    out = np.zeros_like(source)
    tiles = np.zeros((2, CODEC), np.int64)
    tiles[0, [SRC, DST, ROWS, WIDTH]] = source.ctypes.data, out.ctypes.data, 1, 3 * 40
    tiles[1, [SRC, DST]] = source[5, 7].ctypes.data, out[5, 7].ctypes.data
    tiles[1, [ROWS, WIDTH, SRC_PITCH, DST_PITCH]] = 15, 21, 40, 40

    def copied() -> bool:
        expected = np.zeros_like(source)
        expected[:3], expected[5:20, 7:28] = source[:3], source[5:20, 7:28]
        return np.array_equal(out, expected)

    return tiles, copied


def scales_in_one_launch() -> None:
    """The scales of any numbers in blocks of all roundings are the host's: "stored" by a division, others by a
    product, and so unlike in the last bits of some."""
    from reshard.refit.fp8_blocks.kernels import quantize_items

    values = rounded(weights(256, 1024))
    placed = {rounding: places_for(values.shape, rounding) for rounding in ROUNDINGS}
    pieces, _, held = zip(*(pieces_of(values, [(0, 0, *values.shape)]) for _ in placed), strict=True)
    places = np.concatenate([at for at, *_ in placed.values()])
    into = np.array([(index, 0, 0) for index in range(len(placed))])
    items = items_of(np.concatenate(pieces), into, np.zeros(len(placed), np.int64), places)
    quantize_items(torch.from_numpy(items.items), torch.from_numpy(items.fragments), BlockKernel(True))
    made = {rounding: scales for rounding, (_, _, scales) in placed.items()}
    for rounding, scales in made.items():
        assert np.array_equal(scales, encode(values, rounding, divide=rounding == "stored")[1]) and held
    assert len({made[rounding].tobytes() for rounding in ("fp32", "ue8m0", "stored")}) == 3


def digests_are_equal(block_items, table: np.ndarray, tables: tuple, kernel: BlockKernel) -> None:
    """The digests that a check of blocks takes along, by the kernel and the host, against those of the pieces
    by themselves; of a piece that is padding there is none."""
    from reshard.refit.fp8_blocks.kernels import compare_items

    columns, plain = table[:, WIDTH], table.copy()
    plain[:, CODEC], plain[:, WIDTH] = BEFORE_BLOCKS[table[:, CODEC]], columns * BF16.size
    expected = Digests(plain, columns, torch.device("cpu")).result()
    owners = np.where(block_items.owners == 1, NO_PIECE, block_items.owners)
    expected[1] = 0
    spans, (_, fragments) = spans_of(block_items._replace(owners=owners), table), tables
    by_kernel, on_host = torch.zeros((2, len(table)), dtype=torch.int64)
    assert not compare_items(*tables, kernel, torch.from_numpy(spans), by_kernel).any()
    digest_on_host(fragments.numpy(), spans, on_host.numpy().view(np.uint64))
    assert by_kernel.tolist() == on_host.tolist() == expected.tolist() and len({*expected}) == len(table)


if __name__ == "__main__":
    interpret()
