"""An engine that hands on what it serves to another: the bits and the version that it has, or nothing."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from weakref import WeakMethod

import pytest
import torch

from reshard.comm.door import held_door
from reshard.core.errors import ReshardError
from reshard.engines.sglang.worker import SchedulerMethods
from reshard.engines.vllm.worker import RefitExtension
from reshard.engines.workers.lending import LentBelow
from reshard.refit import RefitGroup, connect
from reshard.refit.link import Link
from reshard.refit.lora.lent import LentAdapter
from tests.refit.test_transports import COLUMNS, OneTensor
from tests.starting.ranks import caught, free_port
from tests.tools.lender import Lender

ROWS = 1 << 12


class Worker(Lender):
    """The worker of an engine that serves version 3, with random weights."""

    def __init__(self) -> None:
        super().__init__(OneTensor(ROWS))
        self.engine.weight.copy_(torch.randn(ROWS, COLUMNS))
        self.engine.guard.refitted(3)


class Newcomer(OneTensor):
    """An engine that has something done when the first byte may come, and after the last."""

    before = after = staticmethod(lambda: None)

    def begin(self) -> None:
        super().begin()
        self.before()

    def update_derived(self) -> None:
        self.after()


def handed_on(
    worker: Worker,
    newcomer: Newcomer,
    backend: str = "auto",
    version: int = 3,
    port: int = 0,
    secret: str | None = None,
    ends: bool = False,
    origin: str = "",
) -> list[str]:
    """What a process without weights says that brings up a newcomer, and what the newcomer says; whether it `ends` the
    meeting, and whose weights it means."""
    address = f"127.0.0.1:{port or free_port()}"
    worker.reshard_lend(address, 1, 3, version, timeout=20.0, backend=backend, secret=secret)

    def refitted(group: RefitGroup, rank: int) -> None:
        own = {"origin": "" if rank else origin}
        link = connect(group, None, newcomer if rank else None, backend=backend, **own)
        try:
            link.refit(version, verify=True)
        finally:
            link.close()

    def member(rank: int) -> str:
        group = RefitGroup.join(address, rank, 3, timeout=20, secret=secret)
        said = caught(lambda: refitted(group, rank))
        if rank or ends:
            group.close()
        return said

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(member, (0, 2)))


@pytest.mark.parametrize("backend", ["auto", "staged", "nixl"])
def test_an_engine_gets_the_bits_and_the_version_of_another_that_goes_on_serving(backend):
    worker, newcomer = Worker(), Newcomer(ROWS)
    writes = worker.engine.guard.writes
    assert handed_on(worker, newcomer, backend) == ["no error", "no error"]
    assert torch.equal(newcomer.weight, worker.engine.weight)
    assert (newcomer.ready, newcomer.version) == (True, 3) == (worker.engine.ready, worker.engine.version)
    assert worker.engine.guard.writes == writes


@pytest.mark.parametrize("backend", ["auto", "staged"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("write", ["invalidate", "altered"])
def test_one_that_is_about_to_be_written_ends_it_first_and_the_newcomer_refuses(moment, write, backend):
    worker, newcomer = Worker(), Newcomer(ROWS)
    guard = worker.engine.guard
    written = {"invalidate": lambda: guard.invalidate("half of a model"), "altered": guard.altered}[write]
    setattr(newcomer, moment, written)
    for said in handed_on(worker, newcomer, backend):
        assert "the engine that hands on its weights is about to get others" in said
    assert not newcomer.ready and newcomer.version is None and not worker._reshard_lending._thread.is_alive()


@pytest.mark.parametrize("held", [True, False], ids=["a fleet's port", "a port of its own"])
def test_a_write_after_the_meeting_is_over_waits_for_the_reader_alone(held, monkeypatch):
    """As right after the newcomer has all, while the engine that has handed on still closes its link."""

    def connected(*arguments: Any) -> Link:
        link = connect(*arguments)
        close = link.close
        monkeypatch.setattr(link, "close", lambda: (time.sleep(1.5), close()))
        return link

    monkeypatch.setattr("reshard.engines.workers.lending.connect", connected)
    worker, port = Worker(), free_port()
    door = held_door("127.0.0.1", port) if held else None
    secret = door.invite(20) if door else None  # or whoever comes before the first member is sent away
    said = handed_on(worker, Newcomer(ROWS), "staged", port=port, secret=secret, ends=True)
    assert said == ["no error", "no error"]
    lending = worker._reshard_lending
    thread = lending._thread
    while lending.is_in(f"127.0.0.1:{port}", secret):
        time.sleep(0.01)
    assert thread.is_alive(), "it is in no meeting any more before it has closed its link"
    began = time.monotonic()
    worker.engine.guard.invalidate("half of a model")
    assert not thread.is_alive() and time.monotonic() - began < 5
    if door is not None:
        door.release()


@pytest.mark.parametrize("methods", [RefitExtension, SchedulerMethods], ids=["vllm", "sglang"])
def test_an_engine_takes_nothing_from_itself_and_goes_on_handing_on(methods, monkeypatch):
    """As where a fleet has it under two addresses."""
    monkeypatch.setattr("reshard.engines.sglang.compat.rank_in_engine", lambda _: 0)
    monkeypatch.setattr(SchedulerMethods, "_reshard_guard", lambda _: None)
    monkeypatch.setattr("reshard.engines.sglang.compat.has_stages", lambda _: False)

    class Both(Worker, methods):
        pass

    worker, newcomer, port, secret = Both(), Newcomer(ROWS), free_port(), "one secret of all members, " * 2
    said, closed = [], []
    to_close = SimpleNamespace(close=lambda: closed.append("link"))
    worker._reshard_link = SimpleNamespace(close=to_close.close, group=to_close)

    def connected() -> str:
        options = {"secret": secret, "timeout": 0.5}
        return caught(lambda: worker.reshard_connect(f"127.0.0.1:{port}", 2, 3, **options))

    newcomer.before = lambda: said.append((connected(), [*closed]))
    assert handed_on(worker, newcomer, port=port, secret=secret, ends=True) == ["no error", "no error"]
    [(refused, closed_by)] = said
    assert "is the one that hands on version 3" in refused and "takes nothing from itself" in refused
    assert not closed_by and (worker.engine.ready, worker.engine.version) == (True, 3)
    assert torch.equal(newcomer.weight, worker.engine.weight)
    worker._reshard_lending._thread.join()
    assert "itself" not in connected() and closed, "another meeting at that address is none of its own"


def test_a_reader_that_cannot_be_ended_keeps_no_other_from_being_ended():
    class Reader:
        error, ended = None, False

        def end(self) -> None:
            self.ended = True
            if self.error is not None:
                raise self.error

    readers, guard = [Reader() for _ in range(3)], Worker().engine.guard
    readers[0].error = ReshardError("it goes on")
    guard.readers += [WeakMethod(reader.end) for reader in readers]
    with pytest.raises(ReshardError, match="it goes on"):
        guard.invalidate("half of a model")
    assert all(reader.ended for reader in readers)


def test_a_write_that_did_not_end_it_is_found_by_the_count_of_writes():
    """As where the one that ends it has come too late."""
    worker, newcomer = Worker(), Newcomer(ROWS)
    guard = worker.engine.guard

    def write() -> None:
        guard.readers.clear()
        guard.invalidate("half of a model")
        guard.refitted(3)  # the number of a version says nothing

    newcomer.after = write
    for said in handed_on(worker, newcomer):
        assert "has got other weights than version 3, which it was handing on" in said
    assert not newcomer.ready


def test_a_reader_that_outlives_the_wait_for_its_end_is_named_and_the_newcomer_refuses(monkeypatch, caplog):
    monkeypatch.setattr("reshard.engines.workers.lending.END_SECONDS", 0.5)
    monkeypatch.setattr(RefitGroup, "abort", lambda *_: None)  # as where nobody answers there
    worker, newcomer = Worker(), Newcomer(ROWS)
    guard = worker.engine.guard

    def write() -> None:
        guard.invalidate("half of a model")
        assert worker._reshard_lending._thread.is_alive()
        worker.engine.weight.zero_()

    newcomer.before = write
    assert "no error" not in handed_on(worker, newcomer)
    assert "handing on version 3 has not ended within 0.5 s, and the engine gets other weights" in caplog.text
    assert not newcomer.ready and newcomer.version is None


def test_a_version_that_it_does_not_serve_is_refused_before_anybody_meets():
    worker = Worker()
    for change, named in (
        (
            lambda: worker.engine.guard.refitted(4),
            "this engine serves version 4, and cannot hand on version 3",
        ),
        (lambda: worker.engine.guard.loaded(), "serves weights of no version, and cannot hand on version 3"),
        (lambda: worker.engine.guard.lose("nothing"), "holds nothing, and nothing is read from it"),
    ):
        change()
        with pytest.raises(ReshardError, match=named):
            worker.reshard_lend("127.0.0.1:1", 1, 3, 3)
    assert worker._reshard_lending is None


@pytest.mark.parametrize("origin", ["", "a trainer"], ids=["whoever sent them", "by their sender"])
def test_a_newcomer_learns_whose_version_it_has(origin):
    worker, newcomer = Worker(), Newcomer(ROWS)
    worker.engine.guard.origin = "a trainer"
    assert handed_on(worker, newcomer, origin=origin) == ["no error", "no error"]
    assert (newcomer.version, newcomer.guard.origin) == (3, "a trainer")
    newcomer.guard.altered()
    assert newcomer.guard.origin == "" and newcomer.version is None


@pytest.mark.parametrize("held", ["", "another trainer"], ids=["not known", "another's"])
def test_a_version_of_another_sender_is_not_handed_on_under_its_number(held):
    worker, newcomer = Worker(), Newcomer(ROWS)
    worker.engine.guard.origin = held
    before = newcomer.weight.clone()
    for said in handed_on(worker, newcomer, origin="a trainer"):
        assert "mean weights of different senders, whose versions may have the same numbers" in said
    assert torch.equal(newcomer.weight, before) and newcomer.version is None


class Adapted(OneTensor):
    """An engine whose adapter is in version 7."""

    def adapter(self, name: str) -> SimpleNamespace:
        assert name == "policy"
        return SimpleNamespace(
            lent=lambda version: LentAdapter(version, "a trainer", [], {}, torch.device("cpu"))
        )


def test_an_adapter_is_handed_on_only_with_the_weights_below_that_it_came_with():
    worker = Worker()
    with pytest.raises(ReshardError, match="serves no adapters that it could hand on"):
        worker.reshard_lend("127.0.0.1:1", 1, 3, 7, adapter="policy")
    engine = Adapted(ROWS)
    engine.guard.loaded()
    with pytest.raises(ReshardError, match="serves weights of no version below adapter 'policy'"):
        LentBelow(engine, "policy", 7)
    engine.guard.refitted(0)
    lent = LentBelow(engine, "policy", 7)
    below, adapter = lent.split_adapter()
    assert below is lent and (lent.version, lent.origin) == (7, "a trainer")
    adapter.check_current()
    engine.guard.altered()
    engine.guard.refitted(0)  # the number of a version says nothing
    with pytest.raises(ReshardError, match="has got other weights than version 7, which it was handing on"):
        adapter.check_current()
