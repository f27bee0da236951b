"""Weights that are handed on as they are served: the memory of tensors of any order, and who gets them."""

from dataclasses import replace

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.engines.layout import EngineRank
from reshard.engines.placing.twins import part_of_model, runs
from reshard.refit.twins import (
    TWINS,
    Arrangement,
    Twin,
    arrangements_in,
    bytes_of,
    handed_on_by,
    rows_of,
    without_views,
)
from tests.engines.test_lending import Newcomer, Worker, handed_on
from tests.refit.test_transports import COLUMNS

PLACE = "TP 0 of 1"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that engines serve from."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (3, 40, 33), dtype=torch.uint8, generator=random)
    padded = torch.randint(0, 256, (17, 48), dtype=torch.uint8, generator=random)
    return {
        "codes": codes.view(torch.float8_e4m3fn),
        "turned": torch.randn(24, 64, generator=random).bfloat16().T,
        "padded": padded.view(torch.float8_e4m3fn)[:, :33],
        "padded and turned": padded.clone()[:, :33].T,
        "of all": torch.randn(1, generator=random).expand(7, 1),
        "none": torch.empty(0),
        "a number": torch.randn((), generator=random),
        "flags": torch.randint(0, 2, (5,), generator=random).bool(),
        "exponents": torch.randint(0, 256, (9,), dtype=torch.uint8, generator=random).view(
            torch.float8_e8m0fnu
        ),
    }


class Arranged(Newcomer):
    """An engine that serves something else than what was published."""

    def __init__(self, seed: int = 0, rank: str = PLACE, **facts: str) -> None:
        super().__init__(1 << 12)
        self.weight.copy_(torch.randn(1 << 12, COLUMNS, generator=torch.Generator().manual_seed(seed)))
        self.own, self.rank, self.told, self.restored = tensors(seed), rank, {"kernel": "Marlin"} | facts, 0

    def not_as_published(self) -> list[str]:
        return ["codes"]

    def arranged_tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "a view": self.weight[3:5], **self.own}

    def arrangement(self) -> Arrangement:
        return Arrangement(self.rank, self.told)

    def restore_left_alone(self) -> None:
        self.restored += 1
        self.after()


def lender() -> Worker:
    worker = Worker()
    worker.engine = Arranged(seed=1)
    worker.engine.guard.refitted(3)
    return worker


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(one: Arranged, other: Arranged) -> bool:
    both = zip(one.arranged_tensors().values(), other.arranged_tensors().values(), strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in both)


@pytest.mark.parametrize("backend", ["auto", "staged", "nixl"])
def test_a_twin_gets_every_byte_whatever_it_means_and_in_whatever_order_it_lies(backend):
    worker, newcomer = lender(), Arranged()
    gaps = [newcomer.own["padded"].as_strided((17, 15), (48, 1), 33).clone()]
    assert not same(newcomer, worker.engine)
    assert handed_on(worker, newcomer, backend) == ["no error", "no error"]
    assert same(newcomer, worker.engine) and (newcomer.ready, newcomer.version, newcomer.restored) == (
        True,
        3,
        1,
    )
    gaps.append(newcomer.own["padded"].as_strided((17, 15), (48, 1), 33))
    assert torch.equal(*(gap.view(torch.uint8) for gap in gaps)), "what lies between rows belongs to others"


def turned(engine: Arranged) -> None:
    engine.own["turned"] = engine.own["turned"].contiguous()


def other_dtype(engine: Arranged) -> None:
    engine.own["codes"] = engine.own["codes"].view(torch.int8)


def more(engine: Arranged) -> None:
    engine.own["more"] = torch.zeros(3)


def apart(engine: Arranged) -> None:
    rows = engine.weight[3:5].clone()
    tensors = engine.arranged_tensors
    engine.arranged_tensors = lambda: tensors() | {"a view": rows}


def elsewhere(engine: Arranged) -> None:
    tensors = engine.arranged_tensors
    engine.arranged_tensors = lambda: tensors() | {"a view": engine.weight[5:7]}


def as_published(engine: Arranged) -> None:
    engine.not_as_published = list


def one_more_view(engine: Arranged) -> None:
    tensors = engine.arranged_tensors
    engine.arranged_tensors = lambda: tensors() | {"another view": engine.weight[9:11].T}


def in_a_gap(engine: Arranged) -> None:
    codes = engine.own["padded"]
    engine.own["flags"] = codes.as_strided((5,), (1,), codes.storage_offset() + 48 + 33).view(torch.bool)


DIFFERENT = [
    ({"kernel": "Cutlass"}, None, "kernel is Cutlass here, and Marlin there"),
    ({"input_scale": "0.5"}, None, "input_scale is 0.5 here, and nothing there"),
    ({"rank": "TP 0 of 2"}, None, "this rank has TP 0 of 2, and no rank there has that, but TP 0 of 1"),
    (
        {},
        turned,
        "turned is bfloat16 [64, 24] with strides [24, 1] here, and bfloat16 [64, 24] with strides [1, 64]",
    ),
    ({}, other_dtype, "codes is int8 [3, 40, 33]"),
    ({}, more, "more is float32 [3] with strides [1] here, and nothing there"),
    ({}, apart, "a view is bfloat16 [2, 8] with strides [8, 1] here, and nothing there"),
    ({}, elsewhere, "a view is bfloat16 [2, 8] with strides [8, 1] at byte 80 of weight here, and bfloat16 [2, 8] with "
     "strides [8, 1] at byte 48 of weight there"),
    ({}, one_more_view, "another view is bfloat16 [8, 2] with strides [1, 8] at byte 144 of weight here, and nothing"),
    ({"rank": "TP 0 of 1, layers 4-7"}, as_published, "this rank has TP 0 of 1, layers 4-7 as it was published, or no "
     "tensor, and no rank there has that in a form of its own; engines that have one on some ranks alone hand on"),
    ({}, in_a_gap, "flags is bool [5] with strides [1] at byte 81 of padded here, and nothing there"),
]  # fmt: skip


@pytest.mark.parametrize("options, change, sentence", DIFFERENT)
def test_an_engine_of_another_arrangement_gets_nothing_and_hears_what_differs(options, change, sentence):
    worker, newcomer = lender(), Arranged(**options)
    newcomer.guard.refitted(1)
    if change is not None:
        change(newcomer)
    before = newcomer.weight.clone()
    for said in handed_on(worker, newcomer):
        assert "serves weights in a form of its own, which only an engine gets that serves them alike" in said
        assert sentence in said and "\n" not in said
    assert torch.equal(newcomer.weight, before) and (newcomer.ready, newcomer.version) == (True, 1)


def test_an_engine_that_serves_what_was_published_gets_no_codes():
    worker, newcomer = lender(), Newcomer(1 << 12)
    for said in handed_on(worker, newcomer):
        assert "takes no weights in the form in which another engine serves them" in said


def test_a_bit_that_did_not_arrive_is_found():
    worker, newcomer = lender(), Arranged()
    newcomer.after = lambda: newcomer.own["padded"].view(torch.uint8)[16].bitwise_xor_(1)
    for said in handed_on(worker, newcomer):
        assert "1 tensors did not arrive as they are in the trainer: TP 0 of 1: padded" in said
    assert not newcomer.ready and newcomer.version is None


def test_an_engine_that_is_written_meanwhile_ends_it():
    worker, newcomer = lender(), Arranged()
    newcomer.after = lambda: worker.engine.guard.invalidate("half of a model")
    for said in handed_on(worker, newcomer):
        assert "the engine that hands on its weights is about to get others" in said
    assert not newcomer.ready


def test_tensors_that_moved_are_followed():
    engine = Arranged()
    twin = Twin(engine)
    for name in ("turned", "codes"):
        engine.own[name] = engine.own[name].clone()
    twin.refresh_regions()
    addresses = {name: region.address for name, region in twin.regions.items()}
    assert addresses["turned"] == engine.own["turned"].data_ptr()
    assert addresses["codes"] == engine.own["codes"].data_ptr()
    for change in (apart, elsewhere, lambda engine: engine.own.pop("codes")):
        engine = Arranged()
        twin = Twin(engine)
        change(engine)
        with pytest.raises(ReshardError, match="keeps its weights in other tensors than at connect"):
            twin.refresh_regions()


def test_memory_that_is_no_rows_is_refused_by_name():
    numbers = torch.zeros(4, 6, 8)
    assert rows_of("a", numbers) == (1, 768, 768) and rows_of("a", numbers[:, :3]) == (4, 96, 192)
    assert rows_of("a", numbers[..., :5]) == (24, 20, 32) and rows_of("a", numbers.permute(2, 0, 1)) == (
        1,
        768,
        768,
    )
    assert bytes_of(numbers[..., :5], rows_of("a", numbers[..., :5])).shape == (756,)
    for broken in (numbers[:, :3, :5], numbers.view(-1).as_strided((4, 4), (2, 1))):
        with pytest.raises(ReshardError, match="the weight has shape .* which are no rows"):
            rows_of("the weight", broken)


def test_what_several_names_are_of_is_copied_once():
    one = torch.zeros(8, 4)
    named = {"a row": one[2], "all": one, "again": one, "a column": one[:, 1], "other": torch.zeros(2)}
    assert [*without_views(named)] == ["all", "other"]


def test_facts_that_are_no_arrangement_are_none_and_broken_ones_are_refused():
    from reshard.refit.protocol.encoding import pack_json

    tensor = ["uint8", [1, 2], [2, 1]]
    views = {"b": [*tensor, 3, "a"]}
    arrangement = Arrangement(PLACE, {"kernel": "Marlin"}, {"a": tensor}, ["model.visual"], views)
    assert [*arrangements_in(arrangement.encode(), "one")] == [arrangement]
    assert [*arrangements_in(pack_json({"drafter": {}}), "one")] == []
    for broken in ({"rank": PLACE}, [], 7, {"rank": 1, "facts": {}, "tensors": {"a": 3}, "optional": []}):
        with pytest.raises(ReshardError, match="what one says of its weights cannot be read"):
            [*arrangements_in(TWINS + pack_json(broken), "one")]


def test_an_engine_hands_on_what_was_published_where_it_has_that():
    engine = Newcomer(1 << 12)
    assert handed_on_by(engine) is engine and isinstance(handed_on_by(Arranged()), Twin)


def test_ranks_that_hold_other_parts_of_a_model_are_told_apart():
    rank = EngineRank(2, 0, 1, 0, tuple(range(64)), tuple(range(24)), frozenset())
    assert part_of_model(rank) == "TP 0 of 2, layers 0-23, experts 0-63"
    others = [
        replace(rank, tp=1),
        replace(rank, tp_rank=1),
        replace(rank, moe_tp=2, moe_tp_rank=1),
        replace(rank, experts=tuple(range(64, 128))),
        replace(rank, layers=tuple(range(24, 48))),
    ]
    assert len({part_of_model(one) for one in [rank, *others]}) == 6


def test_numbers_are_told_as_runs():
    assert runs(range(48)) == "0-47" and runs([]) == "none" and runs([3]) == "3"
    many = [runs(range(start, 128, 2)) for start in (0, 1)]
    assert many[0] != many[1] and all(one.startswith("(64, ") for one in many)
