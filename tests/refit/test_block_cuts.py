"""What engines serve in fp8 blocks, passed on among ranks at one layout and at several: each block is made of all its
elements, wherever they come from, and leaves the trainer once."""

import math
from threading import Barrier

import numpy as np
import pytest
import torch

from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.quantization.fp8_blocks import encode
from reshard.refit import cuts, sender
from reshard.refit.copying import addresses
from reshard.refit.copying.addresses import BLOCK_REQUEST_COLUMNS, UNSTAGED
from reshard.refit.copying.tables import TILE_BYTES
from reshard.refit.cuts import OF_ROWS, no_cuts, parts_of
from reshard.refit.served import Scales
from reshard.refit.transports import nccl
from tests.refit.test_pulled_relays import count_packed, members
from tests.refit.test_relays import sent_by_each
from tests.refit.test_transports import OneShard, OneTensor
from tests.starting.ranks import caught

SHAPE = 1024, 512
WAYS = pytest.mark.parametrize("backend", ["nccl", "staged", "nixl"])


class Shard(OneShard):
    """A trainer's rank with half of the rows."""

    def __init__(self, rank: int, rows: int) -> None:
        super().__init__(rank, rows)
        self.weight = torch.randn(rows, SHAPE[1]).bfloat16()

    @property
    def memory(self):
        return [Region(self.weight, 0, SHAPE[1])]

    def publish(self, model):
        shape = self.rows, SHAPE[1]
        return [LocalTensor(0, shape, (Part("weight", Box((self.first, 0), shape), (0, 0)),))]


class InBlocks(OneTensor):
    """An engine's rank that serves boxes of the tensor, one below the other, in fp8 blocks."""

    def __init__(self, boxes: list[Box], tp: int = 1) -> None:
        super().__init__()
        self.boxes, self.tp = boxes, tp
        rows, columns = sum(box.lengths[0] for box in boxes), boxes[0].lengths[1]
        self.codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        self.scales_of = torch.zeros(-(-rows // 128), -(-columns // 128))
        self.regions = {"weight": Region(self.codes, 0, columns)}
        self.scales = {"weight": Scales(Region(self.scales_of, 0, self.scales_of.shape[1]), "fp32")}
        parts, row = [], 0
        for box in boxes:
            parts.append(Part("weight", box, (row, 0)))
            row += box.lengths[0]
        self.placement = Placement(
            {"weight": SHAPE}, {"weight": LocalTensor("weight", (rows, columns), tuple(parts))}
        )

    def wrong(self, whole: torch.Tensor) -> int:
        """How many codes and scales are others than those of the whole tensor's boxes."""
        boxes = [
            whole[
                box.offsets[0] : box.offsets[0] + box.lengths[0],
                box.offsets[1] : box.offsets[1] + box.lengths[1],
            ]
            for box in self.boxes
        ]
        codes, scales = encode(torch.cat(boxes).float().numpy())
        own = self.codes.view(torch.uint8).numpy(), self.scales_of.numpy()
        return sum(
            int((np.asarray(a).view(b.dtype) != b).sum()) for a, b in zip((codes, scales), own, strict=True)
        )


def refits_of(engines: list[InBlocks], backend: str, relays: str, trainers: int = 1, **options):
    """The bytes that the trainer's ranks sent in each of three refits, of which the second is verified. All engines are
    compared after each."""
    sources = [Shard(rank, SHAPE[0] // trainers) for rank in range(trainers)]
    together = Barrier(trainers + len(engines))
    sides = [*((source, None) for source in sources), *((None, engine) for engine in engines)]

    def work(link):
        sent = sent_by_each(link) if backend == "nccl" else count_packed(link, backend)
        seen, wrong = [], []
        for version in (1, 2, 3):
            if link.group.rank < trainers:
                weight = sources[link.group.rank].weight
                weight.copy_(torch.randn(weight.shape) * (1 + torch.arange(SHAPE[1]) / 50))
            before = len(sent)
            link.refit(version, verify=version == 2)
            seen.append(sum(sent[before:]))
            together.wait(60)
            whole = torch.cat([source.weight for source in sources])
            wrong += [engine.wrong(whole) for engine in engines]
            together.wait(60)
        return seen, wrong

    results = members(sides, backend=backend, relays=relays, **options)(work)
    assert all(not any(wrong) for _, wrong in results), results
    return [sum(of_step) for of_step in zip(*(seen for seen, _ in results[:trainers]), strict=True)]


def rows(first: int, count: int) -> Box:
    return Box((first, 0), (count, SHAPE[1]))


@WAYS
def test_a_block_of_rows_of_which_ranks_share_some_is_made_of_all_of_them(backend):
    """As of heads of keys that two ranks repeat, beside heads of queries that each has alone, in one block."""
    engines = [InBlocks([rows(64 * rank, 64), rows(512, 192)], tp=2) for rank in range(2)]
    refits_of(engines, backend, "always", bucket_bytes=2 << 20)


def columns(first: int, count: int) -> Box:
    return Box((0, first), (SHAPE[0], count))


def at_layouts() -> list[InBlocks]:
    """Engines at TP 1, with its rows in two orders, at TP 2 by columns, and at TP 4 by rows."""
    half, quarter = SHAPE[1] // 2, SHAPE[0] // 4
    return [
        InBlocks([rows(0, SHAPE[0])]),
        InBlocks([rows(512, 512), rows(0, 512)]),
        *(InBlocks([columns(half * rank, half)], tp=2) for rank in range(2)),
        *(InBlocks([rows(quarter * rank, quarter)], tp=4) for rank in range(4)),
    ]


@WAYS
@pytest.mark.parametrize("trainers", [1, 2])
def test_blocks_that_engines_at_several_layouts_want_leave_the_trainer_once(backend, trainers, monkeypatch):
    monkeypatch.setattr(nccl, "LEAST_BUCKET", TILE_BYTES)
    options = {"trainers": trainers, "bucket_bytes": 2 << 20}
    alone = refits_of(at_layouts()[:1], backend, "always", **options)
    cut = refits_of(at_layouts(), backend, "always", **options)
    monkeypatch.setattr(sender, "cuts_among", lambda *_: no_cuts())
    whole = refits_of(at_layouts(), backend, "always", **options)
    for one, once, again in zip(alone, cut, whole, strict=True):
        assert math.isclose(once, one, rel_tol=0.02) and again > 2.5 * one, (one, once, again)


MISPLACED = [
    [InBlocks([rows(0, 768)]), InBlocks([rows(0, 192)]), InBlocks([rows(192, 192)])],  # borders within blocks
    [InBlocks([rows(0, 512)]), InBlocks([rows(640, 64), rows(0, 512)])],  # other blocks of the same rows
    [
        InBlocks([rows(0, 192), rows(512, 64)]),
        InBlocks([rows(0, 192)]),
    ],  # a block that ends the tensor, or does not
]


@WAYS
@pytest.mark.parametrize("case", range(len(MISPLACED)))
def test_what_lies_otherwise_in_blocks_is_made_for_each_engine(case, backend):
    refits_of(MISPLACED[case], backend, "always", bucket_bytes=2 << 20)


@pytest.mark.parametrize("case", range(len(MISPLACED)))
def test_blocks_that_were_taken_for_whole_ones_would_be_found(case, monkeypatch):
    """The control."""
    monkeypatch.setattr(addresses, "of_whole_blocks", lambda requests: np.ones(len(requests), bool))
    monkeypatch.setattr(cuts, "_within_blocks", lambda pieces, parts: np.zeros(len(parts), bool))
    said = caught(lambda: refits_of(MISPLACED[case], "staged", "always", bucket_bytes=2 << 20, timeout=5))
    assert said != "no error"


def test_a_piece_of_which_a_cut_would_leave_a_block_in_two_parts_stays_whole(monkeypatch):
    """As of an engine that passes nothing on, whose blocks lie otherwise than those of the ones that are cut alike."""

    def within(self, digests):
        return np.array([[0, self.requests[1][0, 5], OF_ROWS, 64]])

    monkeypatch.setattr(sender.Sender, "_cuts", within)
    engines = [InBlocks([rows(0, 512)]) for _ in range(2)]
    refits_of(engines, "nccl", "always")


def test_parts_of_requests_say_where_each_goes():
    rng = np.random.default_rng(7)
    for _ in range(50):
        count = int(rng.integers(1, 8))
        whole = rng.integers(0, 3, (count, BLOCK_REQUEST_COLUMNS))
        whole[:, [3, 4]] = rng.integers(1, 20, (count, 2))
        whole[:, 5], whole[:, 11] = 0, rng.choice([UNSTAGED, UNSTAGED, 0, 2], count)
        at_rows = np.array([[shard, 0, OF_ROWS, at] for shard in range(3) for at in rng.integers(1, 20, 3)])
        parts = parts_of(whole, at_rows)
        for number, piece in enumerate(whole):
            own = parts.requests[parts.origin == number]
            staged = piece[11] != UNSTAGED
            assert len(own) == 1 if staged else own[:, 3].sum() == piece[3]
            assert (own[:, 7] - own[:, 1] == piece[7] - piece[1]).all(), "as far behind the piece's begin"
            assert (own[:, [0, 2, 4, 5, 6, 8, 9, 10, 11]] == piece[[0, 2, 4, 5, 6, 8, 9, 10, 11]]).all()
