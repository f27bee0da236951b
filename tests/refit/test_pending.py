"""Refits that are begun: the changes lie beside what an engine serves, while the trainer has other weights again; a
switch makes them those of the trainer then, bit for bit, and a roll back what was there before."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region
from reshard.engines.workers.refits import LinkMethods
from reshard.refit import RefitGroup, connect
from reshard.refit.changes.sent import SendsChanges
from reshard.refit.pending import state as pending
from reshard.refit.pending.exchange import PendingExchange
from tests.on_cpu.refit_deltas_on_cpu import DTYPES, PITCH, SHAPE, Served, Shards
from tests.refit.test_deltas import refits, same_as, state
from tests.starting.ranks import caught, free_port


def is_trainer(side) -> bool:
    return isinstance(side, Shards)


def begun(link, side, version: int, share: float = 0.01, **options):
    """Begin a refit of a trainer's next step, after which its weights change at once; return what was packed, and what
    has become of it."""
    if is_trainer(side):
        side.step(share)
    packed = state(side)
    begin = link.begin_refit(version, **options)
    if is_trainer(side):
        side.step(0.5)
    report = begin.wait()
    if is_trainer(side):
        for tensor, kept in zip(side.tensors, packed, strict=True):
            tensor.copy_(kept)
    return packed, report


def same(one, other) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("verify", [False, True])
def test_an_engine_serves_the_old_weights_until_it_switches_and_again_once_it_rolls_back(engines, verify):
    def member(link, side):
        link.refit(0)
        seen = []
        for version in range(1, 9):
            before = state(side)
            packed, report = begun(link, side, version, verify=verify)
            if not is_trainer(side):
                assert same(before, state(side)) and side.guard.version == version - 1 and side.ready
                assert link.switch(version) == link.switch() == version == side.guard.version
                packed = state(side)
                assert not same(before, packed)
                if version % 3 == 0:  # there and back, twice
                    for _ in range(2):
                        assert link.roll_back() == link.roll_back() == version - 1 == side.guard.version
                        assert same(before, state(side))
                        assert link.switch(version) == version
                        assert same(packed, state(side))
            seen.append((packed, report))
        return seen

    first, second, *served = refits(member, engines=engines, relays="always" if engines > 1 else "auto")
    for engine in served:
        for (one, sent), (other, _), (into, received) in zip(first, second, engine, strict=True):
            assert same_as((one, other), into)
            assert sent.is_pending and sent.packed_bytes > 0 and sent.delta.changed > 0
            assert sent.reason == received.reason == f"changes since version {sent.version - 1}"
            both = sent.packed_bytes + second[sent.version - 1][1].packed_bytes
            assert received.is_pending and 0 < received.received_bytes == both


def test_a_refit_brings_all_where_nothing_could_be_begun_and_says_why():
    def member(link, side):
        seen = []

        def tries(version: int) -> None:
            _, report = begun(link, side, version)
            assert not report.is_pending
            if not is_trainer(side):
                before = state(side)
                with pytest.raises(ReshardError, match="no version is pending"):
                    link.switch(version)
                assert same(before, state(side))
            seen.append(report.reason)
            link.refit(version)
            seen.append(state(side))

        tries(0)
        link.pending_bytes = 1000 if is_trainer(side) else link.pending_bytes
        tries(1)
        link.pending_bytes = 1 << 20
        if not is_trainer(side):
            side.guard.lose("no weights")
        tries(2)
        _, report = begun(link, side, 3)
        assert report.is_pending
        if not is_trainer(side):
            assert link.switch() == 3
            link.roll_back()
        tries(4)
        begun(link, side, 5)  # which nobody switches to
        tries(6)
        return seen

    first, second, served = refits(member)
    assert ["inference rank 2" in why or "trainer rank" in why for why in served[::2]] == [True] * 3 + [
        False
    ] * 2
    reasons = [*map(str.lower, served[::2])]
    for reason, words in zip(
        reasons,
        [
            "no refit yet",
            "more than pending_bytes=1,000",
            "discarded",
            "different refits",
            "different refits",
        ],
        strict=True,
    ):
        assert words in reason
    for one, other, into in zip(first[1::2], second[1::2], served[1::2], strict=True):
        assert same_as((one, other), into)


def held_until(link, side, version: int):
    """Have an engine serve a version that another connection has brought."""
    if not is_trainer(side):
        for tensor in side.wide.values():
            tensor[:, 2 : 2 + SHAPE[1]] = torch.randn(2 * SHAPE[0], SHAPE[1])
        side.guard.invalidate("what another connection writes")
        side.guard.refitted(version)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("verify", [False, True])
def test_all_is_begun_where_changes_have_nothing_to_build_on(engines, verify, monkeypatch):
    """As on a new connection, and after a way back; an engine has both versions, bit for bit."""
    monkeypatch.setitem(DTYPES, "widened", (torch.bfloat16, torch.bfloat16))

    def member(link, side):
        seen = []
        held_until(link, side, 6)
        for version in (7, 8, 9, 10):
            before = state(side)
            packed, report = begun(link, side, version, verify=verify)
            assert report.is_pending, report
            if not is_trainer(side):
                assert same(before, state(side)) and side.guard.version == version - 1 and side.ready
                assert link.switch() == version == side.guard.version
                packed = state(side)
                for _ in range(2):
                    assert link.roll_back() == version - 1 == side.guard.version
                    assert same(before, state(side))
                    if version == 8:
                        break
                    assert link.switch() == version and same(packed, state(side))
            elif version == 8:
                link.roll_back()
            seen.append((packed, report))
            if version == 8:
                side.step(0.5) if is_trainer(side) else side.guard.refitted(8)
        return seen

    first, second, *served = refits(member, engines=engines, relays="always" if engines > 1 else "auto")
    for engine in served:
        for (one, sent), (other, _), (into, received) in zip(first, second, engine, strict=True):
            assert same_as((one, other), into)
            all_of_it = sent.version in (7, 9)
            assert sent.reason.startswith("all is sent: " if all_of_it else "changes since"), sent
            assert received.reason == sent.reason and sent.delta.is_delta is not all_of_it
            assert (sent.packed_bytes > sum(tensor.nbytes for tensor in one) // 2) is all_of_it


def test_where_all_could_not_be_begun_the_next_begin_says_so_at_once():
    """So that whoever begins sends all: else nothing would ever come."""

    def member(link, side):
        link.refit(0)
        if not is_trainer(side):
            side.guard.altered()
        whys = []
        for version in (1, 2, 3, 4):
            if is_trainer(side):
                side.step(0.01)
            one = link.begin_refit(version)
            assert not one.wait().is_pending
            whys.append(one.why)
        link.refit(5)
        if is_trainer(side):
            side.step(0.01)
        assert link.begin_refit(6).wait().is_pending
        return whys

    first, second, _ = refits(member)
    for whys in (first, second):
        assert not whys[0] and not whys[1], (
            "changes, and all, which the engine alone knows that it cannot take"
        )
        assert whys[2] == whys[3] != ""


def test_engines_of_different_versions_or_of_none_are_begun_nothing(monkeypatch):
    monkeypatch.setattr(pending, "_can_come_back", lambda *_: True)

    def member(link, side):
        held_until(link, side, 6)
        if not is_trainer(side):
            side.guard.version = None if link.group.rank == 2 else 6
        return link.begin_refit(7).wait()

    for report in refits(member, engines=2):
        assert not report.is_pending and report.reason == "engines serve different versions, or none"


def test_all_is_not_begun_where_an_engine_could_not_come_back():
    """As where it serves what it has loaded itself, or what elements are cast to as they are written was another's."""

    def member(link, side):
        _, report = begun(link, side, 0)
        reasons = [report.reason]
        held_until(link, side, 6)
        for version in (7, 8, 9):
            _, report = begun(link, side, version)
            reasons.append(report.reason)
            if version == 7:
                link.refit(7)
                link.roll_back() if is_trainer(side) else None
            if version == 8 and not is_trainer(side):
                before = state(side)
                assert link.switch() == 8
                side.guard.altered()
                with pytest.raises(ReshardError, match="no version is pending"):
                    link.roll_back()
                assert not same(before, state(side))
        return reasons

    for reasons in refits(member):
        assert all(reason.endswith("inference rank 2: it has had no refit yet") for reason in reasons[:2])
        assert reasons[2].startswith("all is sent: ") and "written by others since" in reasons[3]


@pytest.mark.parametrize("how", ["lost", "altered", "moved"])
def test_an_engine_that_was_written_by_others_since_does_not_switch(how):
    def member(link, side):
        link.refit(0)
        begun(link, side, 1)
        if not is_trainer(side):
            if how == "lost":
                side.guard.lose("no weights")
            elif how == "altered":
                side.guard.altered()
            else:
                side.wide = {name: tensor.clone() for name, tensor in side.wide.items()}
                side.regions = {name: Region(tensor, 2, PITCH) for name, tensor in side.wide.items()}
            before = state(side)
            for call in (link.switch, link.roll_back):
                with pytest.raises(ReshardError, match="no version is pending"):
                    call()
            assert link.begun.pending is None
            assert same(before, state(side))
        link.refit(2)
        return state(side)

    first, second, served = refits(member)
    assert same_as((first, second), served)


def test_weights_that_are_not_the_trainers_after_a_switch_are_rolled_back():
    def member(link, side):
        link.refit(0)
        before = state(side)
        _, report = begun(link, side, 1, verify=True)
        assert report.is_pending
        if not is_trainer(side):
            arrived = (changes for _, received in link.begun.pending.changes.buckets for changes in received)
            next(changes.values for changes in arrived if len(changes.values))[0] ^= 1
            with pytest.raises(ReshardError, match="did not arrive .* serves version 0 again"):
                link.switch(1)
            assert same(before, state(side)) and side.ready and side.guard.version == 0
        link.refit(1)
        return state(side)

    first, second, served = refits(member)
    assert same_as((first, second), served)


@pytest.mark.parametrize("way", ["link", "worker"])
def test_a_call_that_means_another_refit_finds_nothing_to_swap(way):
    """Also where the versions have the same numbers."""

    def member(link, side):
        link.refit(1)
        tickets = []
        for version in (2, 2):
            tickets.append(link.group.ticket())
            _, report = begun(link, side, version)
            assert report.is_pending
            if not is_trainer(side) and len(tickets) == 1:
                assert link.switch(version, ticket=tickets[0]) == version
        if is_trainer(side):
            return True
        worker = LinkMethods()
        worker._reshard_link = link
        switch, roll_back = link.switch, link.roll_back
        if way == "worker":
            switch, roll_back = worker.reshard_switch, worker.reshard_roll_back
        old, new = tickets
        before = state(side)

        def refused(call, why: str, *given, **named) -> None:
            served, held = side.guard.version, state(side)
            with pytest.raises(ReshardError, match=why):
                call(*given, **named)
            assert side.guard.version == served and same(held, state(side)) and side.ready

        late, over = "the call comes late: version 2 was begun since", "called by a connection that is over"
        refused(switch, late, 2, ticket=old)
        assert switch(2, ticket=new) == 2
        after = state(side)
        assert not same(before, after)
        refused(roll_back, late, 2, ticket=old)
        refused(roll_back, over, 2, ticket="another/" + new.partition("/")[2])
        refused(roll_back, "version 2 was served before version 2, and not version 1", 1, ticket=new)
        refused(roll_back, "and not version 1", 1)
        assert roll_back(2, ticket=new) == roll_back(2, ticket=new) == 2 and same(before, state(side))
        return True

    assert refits(member) == [True] * 3


def test_what_a_switch_keeps_ends_with_the_next_refit_and_with_the_connection():
    def member(link, side):
        link.refit(0)
        begun(link, side, 1)
        if not is_trainer(side):
            link.switch()
            assert link.begun.pending is not None
        link.refit(2)
        if not is_trainer(side):
            assert link.begun.pending is None
            with pytest.raises(ReshardError, match="no version is pending"):
                link.roll_back()
        begun(link, side, 3)
        link.close()
        assert link.begun.pending is None
        return True

    assert refits(member) == [True] * 3


@pytest.mark.parametrize("who", [0, 2])
def test_a_member_that_fails_while_bytes_travel_leaves_every_engine_with_what_it_serves(who, monkeypatch):
    """And all goes on with the next refit."""
    address, ranks = f"127.0.0.1:{free_port()}", 4

    def run(rank: int):
        group = RefitGroup.join(address, rank, ranks, timeout=20)
        side = Shards(rank) if rank < 2 else Served()
        link = connect(group, *((side, None) if rank < 2 else (None, side)), delta=True, bucket_bytes=2 << 20)
        link.refit(0)
        before = state(side)
        fails = rank == who

        class Failing(PendingExchange):
            def _sent(self, index):
                raise ReshardError("it fails within the test") if fails else None

        if fails:
            transport = next(one for one in link.transports if isinstance(one, SendsChanges))
            exchange_of = transport.exchange_of_changes
            transport.exchange_of_changes = lambda kind, since: exchange_of(Failing, since)
        error = caught(lambda: begun(link, side, 1))
        if fails:
            transport.exchange_of_changes = exchange_of
        untouched = is_trainer(side) or (same(before, state(side)) and side.ready and side.guard.version == 0)
        link.refit(2)
        begun(link, side, 3)
        if not is_trainer(side):
            link.switch()
        result = error, untouched, state(side)
        link.close()
        return result

    with ThreadPoolExecutor(ranks) as pool:
        (first, _, one), (_, _, other), *engines = pool.map(run, range(ranks))
    assert "it fails within the test" in first
    for error, untouched, into in engines:
        assert "it fails within the test" in error
        assert untouched
        assert same_as((one, other), into)


class Worker(LinkMethods):
    """A worker of an engine of two, which agree as those of vLLM do: all of them, or nobody."""

    def __init__(self, link, barrier: Barrier, said: list) -> None:
        self._reshard_link, self.barrier, self.said = link, barrier, said

    def _reshard_agree(self, is_done: bool) -> bool:
        self.said.append(is_done)
        self.barrier.wait(30)
        agreed = all(self.said[-2:])
        self.barrier.wait(30)
        return agreed


@pytest.mark.parametrize("how", ["written", "spoilt", "not connected"])
def test_an_engine_of_which_one_rank_cannot_switch_serves_one_version_on_all(how):
    barrier, said, workers = Barrier(2), [], []

    def member(link, side):
        link.refit(0)
        before = state(side)
        _, report = begun(link, side, 1, verify=True)
        assert report.is_pending
        error = ""
        if not is_trainer(side):
            worker = Worker(link, barrier, said)
            workers.append(worker)
            barrier.wait(30)
            if worker is workers[1]:
                if how == "written":
                    side.guard.altered()
                elif how == "not connected":
                    worker._reshard_link = None
                else:
                    arrived = (changes for _, of in link.begun.pending.changes.buckets for changes in of)
                    next(changes.values for changes in arrived if len(changes.values))[0] ^= 1
            error = caught(lambda: worker.reshard_switch(1))
            assert same(before, state(side)) and side.ready
        link.refit(1)
        return error, state(side)

    (_, first), (_, second), *engines = refits(member, engines=2)
    errors = sorted(error for error, _ in engines)
    assert errors[0].startswith("another rank of this engine") != errors[1].startswith("another rank of"), (
        errors
    )
    assert len(said) == (4 if how == "spoilt" else 2)
    for _, into in engines:
        assert same_as((first, second), into)


@pytest.mark.parametrize("how", ["changes", "all"])
def test_an_engine_of_which_one_rank_goes_back_does_so_whatever_number_the_version_has(how, monkeypatch):
    """Also the number of the one before, as of a step that is done again."""
    monkeypatch.setitem(DTYPES, "widened", (torch.bfloat16, torch.bfloat16))
    barrier, said, workers = Barrier(2), [], []

    def member(link, side):
        link.refit(7)
        if how == "all":  # another has brought 8 into the engine
            link.roll_back() if is_trainer(side) else held_until(link, side, 8)
        before = state(side)
        if is_trainer(side):
            side.step(0.3)
        assert link.begin_refit(7, verify=True).wait().is_pending
        if is_trainer(side):
            return None
        worker = Worker(link, barrier, said)
        workers.append(worker)
        barrier.wait(30)
        if worker is workers[1]:
            arrived = (changes for _, of in link.begun.pending.changes.buckets for changes in of)
            next(changes.values for changes in arrived if len(changes.values))[0] ^= 1
        error = caught(lambda: worker.reshard_switch(7))
        assert same(before, state(side)) and side.ready and side.guard.version == (8 if how == "all" else 7)
        return error

    errors = refits(member, engines=2)[2:]
    assert sum("another rank of this engine" in error for error in errors) == 1, errors
