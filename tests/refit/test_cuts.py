"""Replicas at other layouts pass on what overlaps of their boxes: pieces are cut so that this is alike, each element is
in one part, and leaves the trainer once."""

import math
from itertools import pairwise
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.refit import receiver, sender
from reshard.refit.copying.addresses import (
    BLOCK_REQUEST_COLUMNS,
    FIRST_COLUMN,
    FIRST_ROW,
    NO_SLOT,
    PART_COLUMNS,
    REQUEST_CODEC,
    Pieces,
)
from reshard.refit.copying.tables import TILE_BYTES
from reshard.refit.cuts import CUT_AT, LEAST_PART_BYTES, OF_ROWS, cuts_among, no_cuts, parts_of
from reshard.refit.protocol.cuts import NO_CUTS, post_cuts, read_cuts
from reshard.refit.protocol.encoding import digest, pack_array
from reshard.refit.relays import alike_in, numbered
from reshard.refit.transports import nccl
from tests.megatron.test_logits import PP
from tests.refit.test_pulled_relays import count_packed, members
from tests.refit.test_relays import sent_by_each
from tests.refit.test_transports import COLUMNS, OneShard, OneTensor
from tests.starting.ranks import caught
from tests.tools.refits import refit

BF16, FP32 = 0, 2  # codecs of pieces of bf16: as it is, and made fp32
SIZES = np.full(4, 2)


def elements_of(piece: np.ndarray) -> list[tuple[int, ...]]:
    """The elements of the shard in a piece, with its codec."""
    shard, top, left, height, width, codec = piece.tolist()
    columns = range(left, left + width)
    return [(shard, codec, row, column) for row in range(top, top + height) for column in columns]


def borders(rng, extent: int) -> list[int]:
    return sorted({0, extent, *rng.integers(0, extent + 1, rng.integers(0, 4)).tolist()})


def random_layout(rng) -> list[np.ndarray]:
    """The pieces that the ranks of an engine want: each shard in a grid, whose boxes the ranks share."""
    ranks: list[list] = [[] for _ in range(rng.integers(1, 4))]
    codec = rng.choice([BF16, BF16, FP32])
    for shard, (height, width) in enumerate(((7, 1), (12, 10), (5, 9))):
        rows, columns = borders(rng, height), borders(rng, width)
        for top, bottom in pairwise(rows):
            for left, right in pairwise(columns):
                for rank in set(rng.integers(0, len(ranks), 2).tolist()):
                    ranks[rank].append((shard, top, left, bottom - top, right - left, codec))
    return [np.array(of, np.int64).reshape(-1, 6)[rng.permutation(len(of))] for of in ranks if of]


def sharing(requests: dict[int, np.ndarray]) -> dict[int, dict[tuple, set[int]]]:
    """By rank and element: which ranks want the piece that it is in as this one does."""
    alike = alike_in(requests, {rank: of.tobytes() for rank, of in requests.items()})
    return {
        rank: {
            element: {*alike[rank].ranks[number]}
            for piece, number in zip(of, alike[rank].sets, strict=True)
            for element in elements_of(piece)
        }
        for rank, of in requests.items()
    }


def test_each_element_is_in_one_part_and_all_who_want_it_have_it_in_the_same():
    rng, cut_cases, whole_pieces_shared_less = np.random.default_rng(11), 0, 0
    for _ in range(150):
        layouts = [random_layout(rng) for _ in range(rng.integers(1, 4))]
        requests = dict(enumerate(of for layout in layouts for of in layout))
        distinct = {of.tobytes(): of for of in requests.values()}
        cuts = cuts_among([*distinct.values()], SIZES, 1)
        parts = {rank: parts_of(of, cuts) for rank, of in requests.items()}
        wants: dict[tuple, set[int]] = {}
        for rank, of in requests.items():
            assert np.all(np.diff(parts[rank].origin) >= 0)
            for number, piece in enumerate(of):
                own = [
                    e
                    for part in parts[rank].requests[parts[rank].origin == number]
                    for e in elements_of(part)
                ]
                assert sorted(own) == elements_of(piece), "each element of a piece is in one of its parts"
                for element in own:
                    wants.setdefault(element, set()).add(rank)
        after = sharing({rank: part.requests for rank, part in parts.items()})
        assert all(ranks == wants[element] for of in after.values() for element, ranks in of.items())
        before = sharing(requests)
        cut_cases += bool(len(cuts))
        whole_pieces_shared_less += before != after
        assert bool(len(cuts)) == (before != after), "nothing is cut in vain"
    assert cut_cases == whole_pieces_shared_less > 50


def test_parts_go_where_their_piece_goes():
    rng = np.random.default_rng(5)
    for _ in range(40):
        [one, *_], [other, *_] = random_layout(rng), random_layout(rng)
        into = np.stack([np.arange(len(one)), *rng.integers(0, 50, (2, len(one)))], 1)
        pieces = Pieces(
            [f"tensor {n}" for n in range(len(one))], one, into, np.full((len(one), PART_COLUMNS), NO_SLOT)
        )
        cut = pieces.cut(*parts_of(one, cuts_among([one, other], SIZES, 1)))

        def goes(of: Pieces) -> list:
            return sorted(
                (
                    name,
                    *element,
                    tensor,
                    top + element[2] - piece[FIRST_ROW],
                    left + element[3] - piece[FIRST_COLUMN],
                )
                for name, piece, (tensor, top, left) in zip(
                    of.names, of.requests, of.destinations, strict=True
                )
                for element in elements_of(piece)
            )

        assert goes(cut) == goes(pieces) and len(cut.parts) == len(cut.requests)
        assert not np.shares_memory(cut.destinations, into), "what is planned stays"


def test_columns_are_cut_only_where_others_begin_and_end_there():
    whole = np.array([[0, 0, 0, 8, 6, BF16]])
    by_rows = [np.array([[0, row, 0, 4, 6, BF16]]) for row in (0, 4)]
    by_columns = [np.array([[0, 0, column, 4, 3, BF16]]) for column in (0, 3)]
    assert cuts_among([whole, *by_rows], SIZES, 1).tolist() == [[0, BF16, OF_ROWS, 4]]
    cuts = cuts_among([whole, *by_columns], SIZES, 1)
    assert cuts.tolist() == [[0, BF16, OF_ROWS, 4], [0, BF16, 0, 3]]
    assert parts_of(whole, cuts).requests[:, :5].tolist() == [
        [0, 0, 0, 4, 3],
        [0, 0, 3, 4, 3],
        [0, 4, 0, 4, 6],
    ]


def test_what_is_small_or_goes_otherwise_is_left_whole():
    half = LEAST_PART_BYTES // 2  # elements of two bytes: a part of the least size
    whole = np.array([[0, 0, 0, 2 * half, 1, BF16]])
    halves = [np.array([[0, row, 0, half, 1, BF16]]) for row in (0, half)]
    assert len(cuts_among([whole, *halves], SIZES, LEAST_PART_BYTES)) == 1
    assert len(cuts_among([whole, *halves], SIZES, LEAST_PART_BYTES + 1)) == 0
    assert len(cuts_among([whole, *halves], SIZES // 2, LEAST_PART_BYTES)) == 0
    assert len(cuts_among(halves, SIZES, 1)) == len(cuts_among([whole], SIZES, 1)) == 0, "none overlap"
    as_fp32 = whole.copy()
    as_fp32[:, REQUEST_CODEC] = FP32
    assert len(cuts_among([as_fp32, *halves], SIZES, 1)) == 0, "they travel in another dtype"
    in_blocks = np.pad(whole, ((0, 0), (0, BLOCK_REQUEST_COLUMNS - 6)))
    assert len(cuts_among([in_blocks, *halves], SIZES, 1)) == 0
    cuts = cuts_among([whole, *halves], SIZES, 1)
    assert parts_of(in_blocks, cuts).requests is in_blocks and len(parts_of(whole, cuts).requests) == 2


def test_numbers_of_rows_are_in_their_order_however_large_they_are():
    rng = np.random.default_rng(3)
    for most in (3, 1 << 20, 1 << 40, (1 << 63) - 1):
        rows = rng.integers(-most, most, (60, 4))[rng.integers(0, 60, 200)]
        _, expected = np.unique(rows, axis=0, return_inverse=True)
        assert numbered(rows).tolist() == expected.ravel().tolist()
    assert numbered(np.zeros((0, 3), np.int64)).tolist() == []


def test_what_a_trainers_rank_says_of_cuts_is_checked():
    posted: dict[str, bytes] = {}

    def read(payload: bytes, expected: bytes):
        group = SimpleNamespace(
            names={1: "trainer rank 1"}, read_all=lambda key, ranks: [payload for _ in ranks]
        )
        return read_cuts(group, {1: expected})[1]

    group = SimpleNamespace(post=posted.__setitem__)
    cuts = np.array([[0, 0, OF_ROWS, 4], [3, 0, 4, 2]])
    said = post_cuts(group, cuts)
    assert read(posted["cuts"], said).tolist() == cuts.tolist() and said != NO_CUTS
    assert post_cuts(group, no_cuts()) == NO_CUTS and len(read(b"never read", NO_CUTS)) == 0
    with pytest.raises(
        ReshardError, match="did not arrive as it was sent"
    ):  # an answer whose bits have flipped
        read(posted["cuts"], bytes([1, *NO_CUTS[1:]]))
    with pytest.raises(ReshardError, match="what trainer rank 1 says of cuts did not arrive as it was sent"):
        read(pack_array(cuts + 1), said)
    for wrong in (cuts[:, :3], cuts - 5, cuts + (1 << 62)):
        payload = pack_array(wrong)
        with pytest.raises(ReshardError, match="what trainer rank 1 says of cuts cannot be read"):
            read(payload, digest(payload))


# Refits: two trainers' ranks with half of the rows each, and engines' ranks with boxes of all.

ROWS = 1 << 17  # 2 MiB, in several rounds


class OneBox(OneTensor):
    """An engine's rank that serves a box of the tensor."""

    def __init__(self, box: Box, tp: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(2 * ROWS)
        self.box, self.tp = box, tp
        self.weight = torch.zeros(box.lengths, dtype=dtype)
        self.regions = {"weight": Region(self.weight, 0, box.lengths[1])}
        tensor = LocalTensor("weight", box.lengths, (Part("weight", box, (0, 0)),))
        self.placement = Placement({"weight": (2 * ROWS, COLUMNS)}, {"weight": tensor})

    def holds(self, whole: torch.Tensor) -> bool:
        (top, left), (height, width) = self.box.offsets, self.box.lengths
        return torch.equal(self.weight, whole[top : top + height, left : left + width].to(self.weight.dtype))


def engines_at_layouts() -> list[OneBox]:
    """An engine at TP 1, one at TP 2 by columns, and one at TP 4 by rows."""
    half, quarter = COLUMNS // 2, ROWS // 2
    return [
        OneBox(Box((0, 0), (2 * ROWS, COLUMNS)), 1),
        *(OneBox(Box((0, half * rank), (2 * ROWS, half)), 2) for rank in range(2)),
        *(OneBox(Box((quarter * rank, 0), (quarter, COLUMNS)), 4) for rank in range(4)),
    ]


def refits_of(engines: list[OneBox], backend: str, choice: str, **options):
    """Three refits, the second with a verification; by rank the bytes that it sent in each, what it received, and how
    the link describes itself. All engines are compared with the trainers after each."""
    trainers = [OneShard(rank, ROWS) for rank in range(2)]
    together = Barrier(len(trainers) + len(engines))
    sides = [*((trainer, None) for trainer in trainers), *((None, engine) for engine in engines)]

    def work(link):
        sent = sent_by_each(link) if backend == "nccl" else count_packed(link, backend)
        seen = []
        for version in (1, 2, 3):
            if link.group.rank < 2:
                trainers[link.group.rank].weight.copy_(torch.randn(ROWS, COLUMNS))
            before = len(sent)
            report = link.refit(version, verify=version == 2)
            seen.append((sum(sent[before:]), report.received_bytes))
            together.wait(60)
            whole = torch.cat([trainer.weight for trainer in trainers])
            assert all(engine.holds(whole) for engine in engines)
            whole.view(torch.int16)[:: ROWS // 2] ^= 1
            assert not any(engine.holds(whole) for engine in engines)
            together.wait(60)
        return seen, link.describe()

    return members(sides, backend=backend, relays=choice, **options)(work)


WAYS = pytest.mark.parametrize("backend", ["nccl", "staged", "nixl"])


@WAYS
@pytest.mark.parametrize(("choice", "cut", "copies"), [
    ("always", True, 1), ("always", False, 3), ("never", True, 3),
])  # fmt: skip
def test_what_engines_at_three_layouts_want_leaves_the_trainer_once(
    backend, choice, cut, copies, monkeypatch
):
    monkeypatch.setattr(nccl, "LEAST_BUCKET", TILE_BYTES)
    if not cut:  # as if boxes that differ had nothing in common
        monkeypatch.setattr(sender, "cuts_among", lambda *_: no_cuts())
    results = refits_of(engines_at_layouts(), backend, choice, bucket_bytes=2 << 20)
    size = 2 * ROWS * COLUMNS
    for seen, _ in results[:2]:
        for sent, _ in seen:
            assert math.isclose(sent, copies * size, rel_tol=0.02, abs_tol=200), (sent / size, copies)
    relayed = [sum(received.get("relay", 0) for _, received in seen) for seen, _ in results[2:]]
    assert bool(sum(relayed)) == (copies == 1)
    through = {
        name for _, described in results[2:] for route in described["routes"] for name in route["through"]
    }
    assert bool(through) == (copies == 1)


def test_an_engine_that_connects_again_plans_from_whole_boxes():
    """What is planned is kept for the next connection, and is not what the last one has cut."""
    engines, size = engines_at_layouts()[:3], 2 * ROWS * COLUMNS
    for choice, copies in (("always", 1), ("never", 2), ("always", 1)):
        results = refits_of(engines, "nccl", choice, bucket_bytes=2 << 20)
        sent = [sent for seen, _ in results[:2] for sent, _ in seen]
        assert all(math.isclose(one, copies * size, rel_tol=0.02) for one in sent), (choice, sent)


def test_changes_go_down_lines_of_several_layouts(monkeypatch):
    monkeypatch.setattr(nccl, "LEAST_BUCKET", TILE_BYTES)
    results = refits_of(engines_at_layouts(), "nccl", "always", bucket_bytes=2 << 20, delta=True)
    assert all(any(received.get("relay", 0) for _, received in seen) for seen, _ in results[3:5])


@WAYS
def test_engines_in_another_dtype_get_their_own_bits(backend):
    """One at TP 1 in fp32, whose casts are not those of the ones at TP 1 and TP 2 in bf16."""
    whole, half = Box((0, 0), (2 * ROWS, COLUMNS)), Box((0, 0), (2 * ROWS, COLUMNS // 2))
    engines = [OneBox(whole, 1, torch.float32), OneBox(half, 2, torch.float32), *engines_at_layouts()[:3]]
    results = refits_of(engines, backend, "always", bucket_bytes=2 << 20)
    size = 2 * ROWS * COLUMNS
    assert [math.isclose(sent, 2 * size, rel_tol=0.02) for seen, _ in results[:2] for sent, _ in seen] == [
        True
    ] * 6


@WAYS
def test_engines_that_cut_otherwise_than_the_trainer_are_found(backend, monkeypatch):
    """The control: ends that do not cut alike end in an error on all members, never in a refit that counts."""

    def otherwise(requests, cuts):
        moved = cuts.copy()
        moved[:, CUT_AT] += 16
        return parts_of(requests, moved)

    monkeypatch.setattr(receiver, "parts_of", otherwise)
    engines = engines_at_layouts()[:3]
    sides = [*((OneShard(rank, ROWS), None) for rank in range(2)), *((None, engine) for engine in engines)]

    def work(link):
        return caught(lambda: link.refit(verify=True))

    said = caught(lambda: members(sides, timeout=5, backend=backend, relays="always")(work))
    assert "no error" not in said, said
    assert not any(engine.ready for engine in engines)


@WAYS
def test_one_may_get_more_lines_than_there_are_ends_to_them(backend):
    """Of 8 trainer's ranks, with engines at TP 1, 2 and 4: one in four lines from each, most of which it passes on."""
    rows, whole = ROWS // 4, (2 * ROWS, COLUMNS)
    trainers = [OneShard(rank, rows) for rank in range(8)]
    engines = [
        OneBox(Box((0, COLUMNS // tp * rank), (whole[0], COLUMNS // tp)), tp)
        for tp in (1, 2, 4)
        for rank in range(tp)
    ]
    sides = [*((trainer, None) for trainer in trainers), *((None, engine) for engine in engines)]

    def work(link):
        link.refit(1, verify=True)
        return len({name for route in link.describe()["routes"] for name in route["through"]})

    through = members(sides, backend=backend, relays="always")(work)
    weights = torch.cat([trainer.weight for trainer in trainers])
    assert all(engine.holds(weights) for engine in engines) and any(through)


def test_boxes_are_not_cut_where_buckets_would_get_too_small():
    """More lines share a member's buckets: without cuts there are fewer, and a connection comes about as before."""
    results = refits_of(engines_at_layouts(), "nccl", "always", bucket_bytes=1 << 20)
    size = 2 * ROWS * COLUMNS
    assert all(math.isclose(sent, 3 * size, rel_tol=0.02) for seen, _ in results[:2] for sent, _ in seen)


def test_with_auto_small_models_are_left_as_they_are():
    [*_, (_, described)] = refits_of(engines_at_layouts()[:3], "nccl", "auto")
    assert not any(route["through"] for route in described["routes"])


# Real models: a Megatron trainer of two ranks, and two vLLMs at once, at TP 1 and at TP 2.
# The last with heads of 64: blocks of two, which come in two pieces, leave the trainer once for each layout.
@pytest.mark.parametrize(("variant", "backend", "experts", "engine", "most"), [
    ("qwen3", "nccl", False, {}, 1.02), ("qwen3-moe", "nixl", True, {}, 1.02),
    ("served-moe-halves", "nccl", False, {"quantization": "fp8_per_block"}, 1.1),
])  # fmt: skip
def test_vllms_at_two_layouts_have_what_their_own_loader_makes_of_the_export(
    variant, backend, experts, engine, most, converted, tmp_path
):
    came = {}
    for cut in (True, False):
        engines = [{"tp": 1}, {"tp": 2, "enable_expert_parallel": experts}]
        folder = tmp_path / str(cut)
        reports = refit(
            converted(variant), f"{PP} 2", 2, engine, 3, False, folder, {"engines": engines, "uncut": not cut},
            backend=backend, relays="always", bucket_bytes=16 << 20,
        )  # fmt: skip
        last = [of_rank[-1] for of_rank in reports[-3:]]
        came[cut] = [
            tuple(report.get(f"received_bytes_{way}", 0) for way in (backend, "relay")) for report in last
        ]
    sent = {cut: sum(direct for direct, _ in of) for cut, of in came.items()}
    assert [sum(of_rank) for of_rank in came[True]] == [sum(of_rank) for of_rank in came[False]]
    whole = sum(came[True][0])
    assert sent[True] < most * whole < 1.25 * whole < sent[False], (came, sent, whole)
