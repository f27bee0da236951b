"""What a link's members say of its refits, and what becomes of who misses one."""

import logging
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from reshard.core.placement import Placement
from reshard.device.memory import Region
from reshard.refit import RefitGroup, connect
from reshard.refit.options import ConnectOptions
from tests.refit.test_closes import ServesAdapter, WithAdapter
from tests.refit.test_transports import COLUMNS, OneShard, OneTensor, TwoSlots
from tests.starting.ranks import caught, free_port

NAMES = [None, "engine pod-7, worker 0", "engine pod-7, worker 1"]


def links_of(adapter: str | None = None, engines: Sequence[type[OneTensor]] = ()) -> list:
    """The links of a trainer's rank and two of an engine with a name, by default as `adapter` says."""
    address, options = f"127.0.0.1:{free_port()}", ConnectOptions(backend="nccl", adapter=adapter)
    trainer, engine = (WithAdapter, ServesAdapter) if adapter else (OneShard, TwoSlots)
    made = engines or (engine, engine)

    def connected(rank: int):
        group = RefitGroup.join(address, rank, 3, timeout=60)
        sides = (None, made[rank - 1]()) if rank else (trainer(0, 32), None)
        return connect(group, *sides, options, name=NAMES[rank])

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(connected, range(3)))


def all_refit(links, **options) -> list:
    """What each of these links raises, or the report."""

    def refit(link):
        reports: list = []
        said = caught(lambda: reports.append(link.refit(**options)))
        return reports[0] if reports else said

    with ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(refit, links))


def test_each_side_logs_a_line_for_a_refit_and_one_for_a_failure_and_members_go_by_their_names(caplog):
    links = links_of()
    caplog.set_level(logging.INFO, "reshard")
    caplog.clear()
    all_refit(links, version=7)
    trainer, engine = sorted(caplog.messages)
    seconds = r"in \d+\.\d{3} s \(\d+\.\d{3} s of it waiting for others, \d+\.\d{3} s moving bytes\)"
    assert re.fullmatch(
        rf"reshard: refit to version 7: [\d.]+ bytes from 1 trainer rank by Gloo {seconds}", engine
    )
    assert re.fullmatch(
        rf"reshard: refit to version 7: 1.02 KB of this rank to 2 inference ranks by Gloo {seconds}", trainer
    )
    caplog.clear()
    all_refit(links, version=3)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2 and all(
        "refit to version 3 after version 7: versions go back" in one for one in warned
    )
    caplog.clear()
    links[0].group.timeout = 1
    late = "engine pod-7, worker 1 did not come to refit 3 within 1 s: dead, stalled or not started"
    assert all(said.endswith(late) for said in all_refit(links[:2]))
    assert len(caplog.messages) == 2 and all(
        re.match(r"reshard: refit 3 failed after 1\.\d s: ", one) for one in caplog.messages
    )
    links[2].group.close()
    links[0].group.timeout = 60
    gone = "engine pod-7, worker 1 is gone: the process has ended, or has let go of this connection"
    assert all_refit(links[:2]) == [gone, gone]


class ServesNothing(ServesAdapter):
    """An engine's rank without any tensor, as a pipeline stage without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.regions, self.placement = {}, Placement({}, {})

    def adapter(self, name):
        own = super().adapter(name)
        own.regions, own.placement = {}, Placement({}, {})
        return own


class InACollective(TwoSlots):
    """An engine's rank that processes a round together with the others of its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.staged_rounds = {"weight": 0}


def test_an_engines_rank_that_dies_in_a_collective_of_its_engine_is_named_by_all():
    """torch says that a collective has failed before the hub hears that a member is gone."""
    links = links_of(engines=(InACollective, InACollective))
    _, left, dying = links

    def fails(number):
        raise RuntimeError("Connection closed by peer")

    def dies(number):
        time.sleep(0.5)
        dying.group.close()

    left.receiver.engine.process_round, dying.receiver.engine.process_round = fails, dies
    trainer, engine, _ = all_refit(links)
    gone = "engine pod-7, worker 1 is gone: the process has ended, or has let go of this connection"
    assert (trainer, engine) == (gone, gone)


def test_an_error_of_an_engines_rank_whose_others_are_alive_is_that_of_all():
    links = links_of(engines=(InACollective, InACollective))

    def fails(number):
        raise RuntimeError("the kernel was not made for this shape")

    links[1].receiver.engine.process_round = fails
    links[2].receiver.engine.process_round = lambda number: None
    wrong = "cannot make what it serves of what has arrived (RuntimeError: the kernel was not made for this shape)"
    assert all(said.endswith(wrong) for said in all_refit(links))


def test_an_engines_rank_without_any_tensor_takes_part_in_the_refits_of_an_adapter():
    links = links_of("policy", (ServesAdapter, ServesNothing))
    assert [report.version for report in all_refit(links, version=1, verify=True)] == [1] * 3
    assert [report.version for report in all_refit(links, version=2, verify=True)] == [2] * 3


def test_a_member_that_has_missed_a_refit_of_an_adapter_is_in_step_when_all_call_again():
    links = links_of("policy")
    assert [report.version for report in all_refit(links, version=1)] == [1] * 3
    for missing in (1, 2):
        present = [link for rank, link in enumerate(links) if rank != missing]
        for link in present:
            link.group.timeout = 1
        for said in all_refit(present):
            assert (
                f"engine pod-7, worker {missing - 1} did not come to the look at the weights below" in said
            ), said
        for link in links:
            link.group.timeout = 60
        again = all_refit(links, verify=False)
        assert [report.version for report in again] == [1 + missing] * 3, again


def test_a_ticket_is_for_one_call_of_one_connection():
    links = links_of()
    trainer, engine, other = links
    ticket = trainer.group.ticket()
    for link in links[:2]:
        link.group.timeout = 1
    assert all("did not come to refit 1" in said for said in all_refit(links[:2]))
    # The call that was missed comes when the others have called again, and is refused; theirs goes on.
    for link in links:
        link.group.timeout = 60

    def late_and_again():
        with other.group.expecting(ticket):
            late = caught(other.refit)
        with other.group.expecting(trainer_again):
            return late, other.refit().version

    trainer_again = trainer.group.ticket()
    with ThreadPoolExecutor(3) as pool:
        both = [pool.submit(link.refit) for link in (trainer, engine)]
        late, version = pool.submit(late_and_again).result()
        assert [one.result().version for one in both] == [version] * 2
    assert "worker 1 did not come to refit 1 within 1 s" in late
    another = links_of()[0].group.ticket()
    for wrong in (another, "", "nonsense", ticket.partition("/")[0]):

        def called(wrong=wrong):
            with other.group.expecting(wrong):
                other.refit()

        assert caught(called).startswith("engine pod-7, worker 1 is called by a connection that is over")
    assert [report.version for report in all_refit(links)] == [2] * 3


@pytest.mark.parametrize("name", ["", "two\nlines", 7, "x" * 300])
def test_a_name_that_is_none_is_refused(name):
    assert "which is no name: give a printable text" in caught(lambda: ConnectOptions(name=name).checked())


class Moves(OneTensor):
    """An engine's rank that moves its weights, as vLLM does where it replaces a parameter."""

    def move(self):
        self.left, self.weight = self.weight, self.weight.clone()
        self.regions = {"weight": Region(self.weight, 0, COLUMNS)}


@pytest.mark.parametrize("backend", ["nccl", "staged"])
def test_each_of_two_links_of_an_engine_follows_weights_that_have_moved(backend):
    """Also where the other link has been there first."""
    address = f"127.0.0.1:{free_port()}"
    before_link_0, after = [], []

    def member(rank: int):
        group = RefitGroup.join(address, rank, 2, timeout=60)
        source, engine = (None, Moves(32)) if rank else (OneShard(0, 32), None)
        links = [connect(group, source, engine, backend=backend) for _ in range(2)]
        for link in links:
            link.refit()
        if engine is not None:
            engine.move()
        links[1].refit()
        if source is not None:
            source.weight.copy_(torch.randn(32, COLUMNS))
        else:
            before_link_0.append(engine.weight.clone())
        links[0].refit()
        after.append((source or engine).weight)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))
    assert torch.equal(*after) and not torch.equal(before_link_0[0], after[0])
