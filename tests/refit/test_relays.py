"""Replicas that pass on to each other what they get: every bit arrives, and leaves the trainer once."""

import math

import pytest

from reshard.core.errors import ReshardError
from reshard.refit import relays
from reshard.refit.relays import Line, lines_of
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
                math.isclose(sent, copies * arrived[0], rel_tol=0.01) and sent < (copies + 0.5) * arrived[0]
            )
        for place, (served, described) in enumerate(engines):
            relayed = choice == "always" and place > 0
            assert {route for route, size in served[-1][1].received_bytes.items() if size} == {
                "relay" if relayed else "nccl"
            }
            through = f"inference rank {place + 1}" if relayed else None
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
        return unseen, seen, healed, state(side)

    first, second, *engines = refits(member, REPLICAS, delta=False, relays="always")
    for unseen, seen, healed, _ in (first, second, *engines):
        assert unseen == healed == "no error", (unseen, healed)
        assert "did not arrive as they are in the trainer" in seen
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


def test_a_line_goes_through_one_host_after_the_other_and_leaves_out_who_wants_something_else():
    hosts = {0: "a", **{rank: "abc"[rank % 3] for rank in range(10, 22)}}
    wanted = {rank: "half" if rank in (12, 15) else "all" for rank in range(10, 22)}
    assert lines_of(0, wanted, lambda rank: rank != 20, hosts.__getitem__) == [
        Line(0, (18, 21, 10, 13, 16, 19, 11, 14, 17)),
        Line(0, (12, 15)),
        Line(0, (20,)),
    ]


def test_little_is_not_passed_on_unless_all_want_it():
    assert not relays.saves("auto", relays.LEAST_ELEMENTS - 1) and relays.saves("auto", relays.LEAST_ELEMENTS)
    assert relays.saves("always", 1) and not relays.saves("never", 1 << 40)


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(ReshardError, match="relays 'often' is not one of auto, always, never"):
        refits(lambda link, side: None, 2, relays="often")
