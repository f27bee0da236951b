"""Replicas that pass on to each other what they get: every bit arrives, and leaves the trainer once."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from reshard.core.errors import ReshardError
from reshard.refit import relays
from reshard.refit.agreement import check_sides
from reshard.refit.protocol.alike import read_alike
from reshard.refit.protocol.encoding import pack_array, pack_json
from reshard.refit.protocol.greeting import Greeting
from reshard.refit.relays import alike_in, streams_of
from reshard.refit.transports import nccl
from tests.refit.test_deltas import Shards, refits, same_as, state
from tests.starting.ranks import caught

REPLICAS = 4


def sent_by_each(link) -> list[int]:
    """The bytes that this member hands to Gloo in a refit, which are counted from now on."""
    [transport] = [one for one in link.transports if one.reach.name == "nccl"]
    counts: list[int] = []
    plain = transport._all_to_all

    def counted(arriving, leaving, splits_in, splits_out):
        counts.append(sum(splits_out))
        return plain(arriving, leaving, splits_in, splits_out)

    transport._all_to_all = counted
    return counts


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "changes"])
@pytest.mark.parametrize("bucket_bytes", [2 << 20, 1 << 28])
def test_what_replicas_want_alike_leaves_the_trainer_once_and_arrives_in_each(
    delta, bucket_bytes, monkeypatch
):
    monkeypatch.setattr(nccl, "LEAST_BUCKET", 1 << 16)

    def member(link, side):
        sent, states = sent_by_each(link), []
        for version in range(6):
            if isinstance(side, Shards):
                side.step(0.02)
            before = len(sent)
            report = link.refit(verify=version in (1, 5))
            states.append((state(side), report, sum(sent[before:])))
        return states, link.describe()

    def run(choice: str):
        return refits(member, REPLICAS, delta=delta, bucket_bytes=bucket_bytes, relays=choice)

    for choice, copies in (("always", 1), ("never", REPLICAS)):
        (first, _), (second, _), *engines = run(choice)
        for version, (one, other) in enumerate(zip(first, second, strict=True)):
            for served, _ in engines:
                assert same_as((one[0], other[0]), served[version][0]), (choice, version)
                assert not version or not same_as(
                    (first[version - 1][0], second[version - 1][0]), served[version][0]
                )
            arrived = [sum(served[version][1].received_bytes.values()) for served, _ in engines]
            assert len({*arrived}) == 1, "each gets all"
            sent = one[2] + other[2]
            assert (
                math.isclose(sent, copies * arrived[0], rel_tol=0.01, abs_tol=100)
                and sent < (copies + 0.5) * arrived[0]
            )
        for place, (served, described) in enumerate(engines):
            relayed = choice == "always" and place > 0
            assert {route for route, size in served[-1][1].received_bytes.items() if size} == {
                "relay" if relayed else "nccl"
            }
            through = [f"inference rank {place + 1}"] if relayed else []
            assert [route["through"] for route in described["routes"]] == [through] * 2


def test_a_byte_that_changes_while_it_is_passed_on_is_found_by_a_verification(monkeypatch):
    """And the same without one is not: the check is what finds it."""

    def member(link, side):
        link.refit()
        [transport] = [one for one in link.transports if one.reach.name == "nccl"]
        plain = transport._all_to_all

        def spoiled(arriving, leaving, splits_in, splits_out):
            if link.group.rank == 3 and len(leaving) > 100:
                leaving[40] ^= 1
            return plain(arriving, leaving, splits_in, splits_out)

        transport._all_to_all = spoiled
        unseen, seen = caught(link.refit), caught(lambda: link.refit(verify=True))
        transport._all_to_all = plain
        healed = caught(lambda: link.refit(verify=True))
        digests = link.sent_digests.pieces if link.sent_digests is not None else {}
        return unseen, seen, healed, digests, state(side)

    first, second, *engines = refits(member, REPLICAS, delta=False, relays="always")
    for unseen, seen, healed, *_ in (first, second, *engines):
        assert unseen == healed == "no error", (unseen, healed)
        assert "did not arrive as they are in the trainer" in seen
    assert [*first[-2]] == [*second[-2]] == [2], "replicas have the digests of one"
    assert all(same_as((first[-1], second[-1]), served[-1]) for served in engines)


def test_a_relay_that_fails_ends_the_refit_for_all_and_the_next_brings_everything():
    def member(link, side):
        link.refit()
        [transport] = [one for one in link.transports if one.reach.name == "nccl"]

        def broken(*_):
            raise ReshardError("a relay is broken")

        if link.group.rank == 3:
            transport._run_whole = broken
        said = caught(link.refit)
        if link.group.rank == 3:
            del transport._run_whole
        ready = isinstance(side, Shards) or side.ready
        link.refit(verify=True)
        return said, ready, state(side)

    first, second, *engines = refits(member, REPLICAS, delta=False, relays="always")
    assert all("a relay is broken" in said for said, *_ in (first, second, *engines))
    assert not any(ready for _, ready, _ in engines)
    assert all(same_as((first[-1], second[-1]), served[-1]) for served in engines)


def test_a_line_goes_through_one_host_after_the_other_and_leaves_out_who_cannot_pass_on():
    hosts = {0: "a", **{rank: "abc"[rank % 3] for rank in range(10, 22)}}
    rows = {
        rank: np.arange(6).reshape(2, 3) + (rank in (12, 15)) * np.array([[9], [0]]) for rank in range(10, 22)
    }
    alike = alike_in(rows, {rank: rows[rank].tobytes() for rank in rows})

    def streams(rank: int) -> dict:
        may_relay, elements = lambda other: other != 20, np.array([1, 1])
        found = streams_of(0, rank, rows[rank], elements, alike[rank], "always", may_relay, hosts.__getitem__)
        return {line.ranks: pieces.tolist() for line, pieces in found.items()}

    all_but_the_last = (18, 21, 10, 13, 16, 19, 11, 14, 17)
    whole = (12, 15, 18, 21, 10, 13, 16, 19, 11, 14, 17)
    for rank in all_but_the_last:
        assert streams(rank) == {all_but_the_last: [0], whole: [1]}
    assert streams(12) == streams(15) == {(12, 15): [0], whole: [1]} and streams(20) == {(20,): [0, 1]}


def test_what_is_asked_for_twice_or_in_another_order_is_paired_with_the_same():
    rng = np.random.default_rng(7)
    for _ in range(50):
        rows = {
            rank: rng.integers(0, 3, (rng.integers(1, 9), 2)) for rank in range(3, 3 + rng.integers(1, 6))
        }
        alike = alike_in(rows, {rank: of.tobytes() + bytes(of.shape) for rank, of in rows.items()})
        lines: dict = {}
        for rank, of in rows.items():
            seen = 0
            found = streams_of(
                1, rank, of, np.ones(len(of)), alike[rank], "always", lambda _: True, lambda _: "a"
            )
            for line, pieces in found.items():
                assert rank in line.ranks
                lines.setdefault(line, []).append(of[pieces].tolist())
                seen += len(pieces)
            assert seen == len(of), "each piece once"
        for line, of_ranks in lines.items():
            assert len(of_ranks) == len(line.ranks) and all(one == of_ranks[0] for one in of_ranks)


def test_little_is_not_passed_on_unless_all_want_it_and_lines_are_not_longer_than_pays():
    gigabyte = 1 << 29  # elements of 2 bytes
    assert relays.length_of("auto", 2, 1 << 20) == 1 and relays.length_of("auto", 2, gigabyte) == 2
    assert (
        relays.length_of("auto", 16, 16 * gigabyte) == 16 and relays.length_of("auto", 2048, gigabyte) == 512
    )
    assert relays.length_of("always", 9, 1) == 9 and relays.length_of("never", 9, 1 << 40) == 1


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(ReshardError, match="relays 'often' is not one of auto, always, never"):
        refits(lambda link, side: None, 2, relays="often")


def test_members_that_choose_differently_are_told():
    choices = ("one", "trainer", "always"), ("two", "inference", "auto"), ("three", "inference", "never")
    said = [
        Greeting(
            name=name,
            roles=[role],
            backend="auto",
            bucket_bytes=1,
            keep_mapped=False,
            ignored=[],
            relays=relays,
        )
        for name, role, relays in choices
    ]
    check_sides(said[:2])
    with pytest.raises(
        ReshardError, match="one asks for relays='always', three for 'never': give all the same"
    ):
        check_sides(said)


def test_what_a_trainers_rank_says_of_who_wants_the_same_is_checked():
    for ranks, sets in (
        ([[3]], [0, 0]), ([[2, 9]], [0, 0]), ([[2, 2]], [0, 0]), ([[4, 2]], [0, 0]), ("no", [0, 0]), ([2], [0, 0]),
        ([[2, 4]], [0]), ([[2, 4]], [0, 1]), ([[2, 4]], [-1, 0]),
    ):  # fmt: skip
        said = {"alike/2": pack_json(ranks), "sets/2": pack_array(np.array(sets, np.int64)[:, None])}
        group = SimpleNamespace(
            rank=2, names={1: "trainer rank 1"}, read_all=lambda key, ranks, said=said: [said[key]]
        )
        with pytest.raises(
            ReshardError, match="what trainer rank 1 says of who wants the same cannot be read"
        ):
            read_alike(group, [2, 3, 4], {1: 2})
    said = {"alike/2": pack_json([[2, 4]]), "sets/2": pack_array(np.zeros((2, 1), np.int64))}
    group = SimpleNamespace(rank=2, names={1: "trainer rank 1"}, read_all=lambda key, ranks: [said[key]])
    assert read_alike(group, [2, 3, 4], {1: 2})[1].ranks == [[2, 4]]
