"""The Triton kernels, under Triton's interpreter, against plain copies; and how copies are cut into
tiles."""

import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from reshard.refit.codecs import CODECS, IN_BLOCKS, PLAIN, codec_between
from reshard.refit.copying.copies import CopyTable, copy_on_host, of_copy_engines, wait_for_all_streams
from reshard.refit.copying.digests import Digests, word_tiles
from reshard.refit.copying.kernels import expected_compilation
from reshard.refit.copying.tables import (
    CODEC,
    DST,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    bytes_of,
    interleaved,
    joined,
    pack_into_rounds,
    table_of,
    tiles_of,
)
from reshard.refit.copying.transposes import Transpose

# rows, width, source pitch, destination pitch, shift of both ends; in bytes
SHAPES = [
    (1, 1, 1, 1, 0),
    (1, 200_000, 0, 0, 16),
    (7, 192, 768, 192, 0),
    (130, 96, 96, 96, 32),
    (3, 150_000, 150_016, 150_032, 0),
    (5, 6, 10, 12, 2),
    (9, 3, 5, 7, 1),
    (64, 4096, 4096, 8192, 48),
    (40, 64, 0, 64, 0),
    (6, 48, 50, 52, 2),
]


def make_copies(shapes=SHAPES, seed: int = 0):
    """Random bytes, a destination full of 0xEE, a table over both, and what the destination should
    become."""
    rng = np.random.default_rng(seed)
    span = 600_000
    src = torch.from_numpy(rng.integers(0, 256, span * len(shapes), dtype=np.uint8))
    dst = torch.full((span * len(shapes),), 0xEE, dtype=torch.uint8)
    expected, rows = dst.clone(), []
    for i, (n, width, src_pitch, dst_pitch, shift) in enumerate(shapes):
        start = i * span + shift
        rows.append((src.data_ptr() + start, dst.data_ptr() + start, n, width, src_pitch, dst_pitch))
        for row in range(n):
            a, b = start + row * src_pitch, start + row * dst_pitch
            expected[b : b + width] = src[a : a + width]
    return src, dst, table_of(rows), expected


def test_a_table_on_the_host_copies_each_byte_to_its_place():
    src, dst, table, expected = make_copies()
    CopyTable(tiles_of(table)[0], torch.device("cpu")).run()
    assert torch.equal(dst, expected)
    assert not torch.equal(dst, src)


def test_tiles_that_follow_each_other_are_joined_for_the_copy_engines():
    _source, dst, table, expected = make_copies()
    tiles = tiles_of(table)[0]
    copies = joined(tiles, tiles[:1, SRC])
    # One copy for each, and one for each row of those whose rows are longer than a tile.
    assert len(copies) == len(SHAPES) - 1 + 3 < len(tiles)
    copy_on_host(copies)
    assert torch.equal(dst, expected)
    assert len(joined(tiles[::-1], tiles[:1, SRC])) == len(tiles), (
        "the control: in another order nothing follows"
    )
    [longest] = np.flatnonzero(copies[:, WIDTH] == copies[:, WIDTH].max())
    begins = tiles[np.flatnonzero(tiles[:, SRC] == copies[longest, SRC])[0] + 1, SRC]
    apart = joined(tiles, np.array([tiles[0, SRC], begins]))
    assert len(apart) == len(copies) + 1 and begins in apart[:, SRC], (
        "none reads from two allocations at once"
    )
    short = np.isin(copies[:, WIDTH], [64, 6, 3, 48, 192]) & (copies[:, ROWS] > 1)
    assert of_copy_engines(copies).tolist() == (~short).tolist() and short.any()


def make_casts(number: int, rounds: bool = True):
    """fp32 numbers of every kind, or fp16's or bf16's; a destination; a table of casts between the
    two, all of rows of their own pitch; and what torch makes of them. Where nothing `rounds`, all
    are numbers of both dtypes."""
    source, destination = (
        getattr(torch, dtype.name) for dtype in (CODECS[number].source, CODECS[number].destination)
    )
    held = torch.from_numpy(
        np.random.default_rng(number).integers(-(2**31), 2**31, 4000, dtype=np.int32)
    ).view(source)
    held = torch.nan_to_num(held, nan=1.5, posinf=float("inf"), neginf=float("-inf"))  # a NaN has many bits
    held[1105] = float("inf")
    if not rounds:
        held = torch.where(
            held.float().abs() < 1e-37, 0, held.to(torch.bfloat16 if number == 1 else source).to(source)
        )
    into, expected, rows = torch.zeros(4000, dtype=destination), torch.zeros(4000, dtype=destination), []
    at = [(0, 3, 300, 310, 350), (1100, 1, 700, 0, 0), (1900, 40, 5, 5, 5), (2201, 9, 11, 12, 13)]
    for start, n, width, src_pitch, dst_pitch in at:
        ends = held.data_ptr() + start * source.itemsize, into.data_ptr() + (start + 1) * destination.itemsize
        rows.append(
            (
                *ends,
                n,
                width * destination.itemsize,
                src_pitch * source.itemsize,
                dst_pitch * destination.itemsize,
            )
        )
        for row in range(n):
            a, b = start + row * src_pitch, start + 1 + row * dst_pitch
            expected[b : b + width] = held[a : a + width].to(destination)
    table = table_of(rows)
    table[:, CODEC] = number
    return held, into, table, expected, np.array([width for _, _, width, *_ in at])


@pytest.mark.parametrize(
    "number",
    [n for n in range(len(CODECS)) if n != PLAIN and not IN_BLOCKS[n]],
    ids=lambda n: str(CODECS[n]),
)
@pytest.mark.parametrize("tile_bytes", [64, 1 << 16])
def test_a_codec_makes_of_every_element_what_torch_does(number, tile_bytes):
    held, into, table, expected, columns = make_casts(number)
    CopyTable(tiles_of(table, tile_bytes)[0], torch.device("cpu")).run()
    assert torch.equal(into.view(torch.int16), expected.view(torch.int16)) and into.any()
    assert torch.isinf(into).any() or (CODECS[number].source.name == "float32" and held.any())
    # What is digested at the source is what has arrived.
    destination = table.copy()
    destination[:, [SRC, SRC_PITCH]], destination[:, CODEC] = table[:, [DST, SRC_PITCH + 1]], PLAIN
    sent, arrived = (
        Digests(end, columns, torch.device("cpu")).result().tolist() for end in (table, destination)
    )
    assert sent == arrived
    into[1102] = -into[1102]
    assert Digests(destination, columns, torch.device("cpu")).result().tolist() != sent


def test_no_codec_makes_numbers_infinite_or_guesses():
    assert [
        codec_between(*pair)
        for pair in (("bfloat16", "float16"), ("float32", "float16"), ("int8", "bfloat16"))
    ] == [None] * 3


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 5000),
    st.integers(0, 64),
    st.integers(0, 64),
    st.sampled_from([64, 1000, 4096]),
)
def test_tiles_cover_a_copy_exactly_once(rows, width, more_src, more_dst, tile_bytes):
    table = table_of([(10_000_000, 50_000_000, rows, width, width + more_src, width + more_dst)])
    tiles, origin = tiles_of(table, tile_bytes)
    assert bytes_of(tiles) == rows * width and not origin.any()
    pairs = []
    for src, dst, n, wide, src_pitch, dst_pitch, _ in tiles.tolist():
        assert n * wide <= max(tile_bytes, 1)
        pairs += [(src + r * src_pitch + i, dst + r * dst_pitch + i) for r in range(n) for i in (0, wide - 1)]
    step = rows * width if more_src == more_dst == 0 else width + more_src
    starts = {10_000_000 + r * step for r in range(1 if more_src == more_dst == 0 else rows)}
    assert starts <= {a for a, _ in pairs}
    for a, b in pairs:
        row, byte = divmod(a - 10_000_000, width + more_src)
        assert b == 50_000_000 + row * (width + more_dst) + byte


def test_the_order_of_tiles_lets_the_peers_take_turns():
    order = interleaved(np.array([0] * 6 + [1] * 3))
    groups = np.array([0] * 6 + [1] * 3)[order]
    assert sorted(order.tolist()) == list(range(9))
    assert all(1 in groups[i : i + 4] for i in range(6))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 500), max_size=40), st.integers(512, 2000))
def test_rounds_hold_every_piece_within_their_limit(sizes, limit):
    rounds, offsets = pack_into_rounds(np.array(sizes, np.int64), limit)
    for index in set(rounds.tolist()):
        used = [(int(o), int(o) + s) for o, s, r in zip(offsets, sizes, rounds, strict=True) if r == index]
        assert (
            used == sorted(used)
            and all(a[1] <= b[0] for a, b in pairwise(used))
            and used[-1][1] <= limit + 16
        )
    assert rounds.tolist() == sorted(rounds.tolist())


def test_digests_do_not_depend_on_how_the_rows_lie_and_see_every_change():
    values = torch.arange(12 * 40, dtype=torch.int16).reshape(12, 40)
    wide = torch.zeros(12, 64, dtype=torch.int16)
    wide[:, :40] = values

    def of(tensor, pitch):
        return int(
            Digests(
                table_of([(tensor.data_ptr(), 0, 12, 80, pitch, 0)]), np.array([40]), torch.device("cpu")
            ).result()[0]
        )

    assert of(values, 80) == of(wide, 128)
    for change in ("value", "exchange", "nan bits"):
        other = values.clone()
        if change == "value":
            other[3, 7] += 1
        elif change == "exchange":
            other[2, 5], other[2, 6] = values[2, 6], values[2, 5]
        else:
            other[0, 0] = 0x7FC1
        assert of(other, 80) != of(values, 80), change


def digest_by_hand(values: list[int]) -> int:
    """The same in Python's whole numbers."""
    total = 0
    for position, value in enumerate(values):
        mixed = ((value + 1) * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F) % 2**64
        mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) % 2**64
        total += mixed ^ mixed >> 32
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [999, 1000])
def test_a_digest_is_what_whole_numbers_give(size, count):
    values = np.random.default_rng(0).integers(0, 2 ** (8 * size) - 1, count, dtype=f"u{size}", endpoint=True)
    table = table_of([(values.ctypes.data, 0, 1, values.nbytes, 0, 0)])

    def host_digest() -> list[int]:
        return Digests(table, np.array([count]), torch.device("cpu")).result().tolist()

    in_words = values.view("u8") if values.nbytes % 8 == 0 else values
    before = digest_by_hand(in_words.tolist())
    assert host_digest() == [before]
    values[500] ^= 1
    assert host_digest() != [before]


@pytest.mark.parametrize("kernel", ["copy", "codec", "digest", "transpose"])
def test_the_kernel_does_what_the_host_does(kernel):
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.refit.test_kernels", kernel],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def transposed() -> None:
    """Matrices between rows of others are transposed, aligned and not, and an element that differs is found."""
    from reshard.refit.copying.transpose_kernels import transpose

    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4), (torch.uint8, 1)):
        for rows, columns, aligned in ((1, 1, False), (96, 144, True), (70, 129, False), (3, 200, False)):
            source = torch.randint(0, 255, (2, rows, columns + 16 // size), dtype=torch.uint8).to(dtype)
            target = torch.full((2, columns, rows + 32 // size), 7, dtype=torch.uint8).to(dtype)
            sizes = rows, columns, source.stride(1), target.stride(1), size
            made = [Transpose(source[i].data_ptr(), target[i].data_ptr(), *sizes) for i in range(2)]
            assert all(one.is_aligned for one in made) == aligned
            table = torch.tensor([one[:-1] for one in made])
            how = size, aligned, -(-rows // 64) * -(-columns // 64)
            transpose(table, *how, None)
            expected = torch.full_like(target, 7)
            expected[:, :, :rows] = source[:, :, :columns].transpose(1, 2)
            assert torch.equal(target, expected)
            differing = torch.zeros(2, dtype=torch.int32)
            transpose(table, *how, differing)
            assert differing.tolist() == [0, 0]
            target[1, columns - 1, rows - 1] += 1
            transpose(table, *how, differing)
            assert differing.tolist() == [0, 1]


def interpret(kernel: str) -> None:
    from reshard.refit.copying.kernels import copy_tiles, digest_tiles

    if kernel == "transpose":
        transposed()
        return
    small = [
        (n, min(width, 3000), min(a, 3016) if a else a, min(b, 3032) if b else b, shift)
        for n, width, a, b, shift in SHAPES
    ]
    src, dst, table, expected = make_copies(small)  # the table holds addresses: both tensors must live
    tiles, _ = tiles_of(table, 4096)
    if kernel == "codec":
        for number in np.flatnonzero(~IN_BLOCKS)[1:].tolist():
            # The interpreter does not round, as GPUs do, and loses bf16's smallest numbers.
            held, into, table, expected, columns = make_casts(number, rounds=False)
            size = CODECS[number].destination.size
            group = tiles_of(table, 256)[0]
            group[:, [WIDTH, 5]] //= size
            group[:, SRC_PITCH] //= CODECS[number].source.size
            copy_tiles(torch.from_numpy(group[:, :CODEC].copy()), size, codec=number)
            assert torch.equal(into.view(torch.int16), expected.view(torch.int16)) and held.any()
            out = torch.zeros(len(table), dtype=torch.int64)
            for (word, unit, codec), rows in word_tiles(table, columns, 256).items():
                digest_tiles(torch.from_numpy(rows), out, word, unit, codec)
            assert out.tolist() == Digests(table, columns, torch.device("cpu")).result().tolist()
        return
    if kernel == "copy":
        bits = np.bitwise_or.reduce(tiles[:, [SRC, DST, WIDTH, 4, 5]], axis=1)
        left = np.ones(len(tiles), bool)
        for unit in (16, 8, 4, 2, 1):
            chosen = left & (bits % unit == 0)
            left &= ~chosen
            group = tiles[chosen, :CODEC].copy()
            group[:, [WIDTH, 4, 5]] //= unit
            if len(group):
                copy_tiles(torch.from_numpy(group), unit)
        assert torch.equal(dst, expected) and not torch.equal(dst, src)
        return
    even = table[(table[:, WIDTH] % 2 == 0) & (table[:, SRC] % 2 == 0) & (table[:, 4] % 2 == 0)]
    assert len(even) > 4
    wanted = Digests(even, even[:, WIDTH] // 2, torch.device("cpu")).result().tolist()
    out = torch.zeros(len(even), dtype=torch.int64)
    kinds = word_tiles(even, even[:, WIDTH] // 2, 4096)
    # words of 8 bytes at once, words of 8 in elements of 2, and elements where a row is not made of
    # such words
    assert kinds.keys() == {(8, 8, PLAIN), (8, 2, PLAIN), (2, 2, PLAIN)}
    for (word, unit, _), rows in kinds.items():
        digest_tiles(torch.from_numpy(rows), out, word, unit)
    assert out.tolist() == wanted
    assert len(set(wanted)) == len(even) and src.any()


if __name__ == "__main__":
    interpret(sys.argv[1])


def test_who_watches_for_compilation_is_not_told_of_what_connect_compiles(monkeypatch):
    """Watch for compilation by Triton's hook, as vLLM's jit_monitor does, on GPUs only."""

    def watching(**what):
        raise AssertionError(what)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", watching)
    with pytest.raises(KeyError), expected_compilation():
        assert knobs.runtime.jit_post_compile_hook is None
        raise KeyError
    assert knobs.runtime.jit_post_compile_hook is watching


def test_a_gpu_that_is_never_done_is_waited_for_as_long_as_said(monkeypatch):
    gpu, done = torch.device("cuda", 0), threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.wait(60))
    assert not wait_for_all_streams(gpu, 0.05)
    done.set()
    assert wait_for_all_streams(gpu, 60) and wait_for_all_streams(gpu, None)
