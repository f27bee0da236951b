"""What pipeline stages of an engine tell one another of a model without a table, and which ranks are of one engine. The
refits themselves are in `test_without_table`, but for that of an engine with a stage that has nothing."""

import pytest

from reshard import ReshardError
from reshard.refit.protocol.encoding import pack_json, unpack_json
from reshard.refit.protocol.stages import TakenTensors, exchange_taken
from reshard.refit.stages import ranks_of_engine
from tests.tools.refits import refit

NAMES = [f"layers.{number}.weight" for number in range(11)]
OWN = TakenTensors(1, 2, 0, frozenset(NAMES[:6]))


class Group:
    """Ranks 3 and 5, of which 3 is here; the other's message is what it has said, `change`d."""

    rank, names = 3, {3: "inference rank 3", 5: "inference rank 5"}

    def __init__(self, change=lambda payload: payload, own=lambda payload: payload) -> None:
        self.change, self.own = change, own

    def post(self, key: str, payload: bytes) -> None:
        self.payload = payload

    def read_all(self, key: str, ranks: list[int]) -> list[bytes]:
        return [self.own(self.payload), self.change(self.payload)]


def test_each_rank_hears_what_the_others_take():
    taken = exchange_taken(Group(), [3, 5], NAMES, OWN)
    assert taken == {3: OWN, 5: OWN}
    assert exchange_taken(Group(), [3, 5], NAMES, OWN._replace(names=frozenset()))[5].names == frozenset()


SPOILED = [
    (field, value) for field in range(5) for value in (0, -1, "none", None, [], "00" * 3, 1 << 40)
    if (field, value) != (2, 0)  # which is what was said
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), SPOILED)
def test_a_message_that_makes_no_sense_is_refused(field, value):
    def spoil(payload: bytes) -> bytes:
        fields = unpack_json(payload)
        fields[field] = value
        return pack_json(fields)

    with pytest.raises(
        ReshardError, match="inference rank 5 (takes of the model cannot be read|counts other)"
    ):
        exchange_taken(Group(spoil), [3, 5], NAMES, OWN)


def test_ranks_that_count_other_tensors_are_refused():
    def renamed(payload: bytes) -> bytes:
        return pack_json([*unpack_json(payload)[:3], "00" * 8, unpack_json(payload)[4]])

    with pytest.raises(ReshardError, match="inference rank 5 counts other tensors in the model"):
        exchange_taken(Group(renamed), [3, 5], NAMES, OWN)
    with pytest.raises(ReshardError, match="'takes' of inference rank 3 did not arrive as it was sent"):
        exchange_taken(Group(own=renamed), [3, 5], NAMES, OWN)


def places(*engines: tuple[int, int], first: int = 2) -> dict[int, TakenTensors]:
    """What ranks say from the first on, of engines of so many tensor parallel ranks and stages each."""
    said = [
        TakenTensors(tp, pp, stage, frozenset())
        for tp, pp in engines
        for stage in range(pp)
        for _ in range(tp)
    ]
    return dict(enumerate(said, first))


def test_the_ranks_of_an_engine_are_found_among_those_of_others():
    said = places((1, 1), (2, 2), (1, 3), (2, 1))
    engines = [*said]
    found = [ranks_of_engine(engines, said, rank) for rank in engines]
    assert found == [[2], *[[3, 4, 5, 6]] * 4, *[[7, 8, 9]] * 3, *[[10, 11]] * 2]


@pytest.mark.parametrize("order", [[3, 2, 4, 5], [2, 4, 3, 5], [2, 3, 4], [2, 3, 5, 4]])
def test_ranks_that_do_not_follow_one_another_are_refused(order):
    said = places((1, 2), (1, 2))
    stages = {rank: said[other] for rank, other in zip([2, 3, 4, 5], order, strict=False)}
    with pytest.raises(ReshardError, match="the ranks of an engine with 2 pipeline stages do not follow one"):
        ranks_of_engine([*stages], stages, [*stages][-1])


def test_a_vllm_with_a_stage_that_has_no_layers_has_what_its_own_loader_makes_of_the_export(
    converted, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,0,2")
    reports = refit(converted("qwen3"), "", 1, {"pp": 3}, 3, False, tmp_path, backend="nccl")
    assert [sum(one["received_bytes_nccl"] for one in of_rank) > 0 for of_rank in reports[1:]] == [
        True, False, True,
    ]  # fmt: skip
