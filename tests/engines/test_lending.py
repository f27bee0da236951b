"""An engine that hands on what it serves to another: the bits and the version that it has, or nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.refit import RefitGroup, connect
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


def handed_on(worker: Worker, newcomer: Newcomer, backend: str = "auto", version: int = 3) -> list[str]:
    """What a process without weights says that brings up a newcomer, and what the newcomer says."""
    address = f"127.0.0.1:{free_port()}"
    worker.reshard_lend(address, 1, 3, version, timeout=20.0, backend=backend)

    def refitted(group: RefitGroup, rank: int) -> None:
        link = connect(group, None, newcomer if rank else None, backend=backend)
        try:
            link.refit(version, verify=True)
        finally:
            link.close()

    def member(rank: int) -> str:
        group = RefitGroup.join(address, rank, 3, timeout=20)
        said = caught(lambda: refitted(group, rank))
        if rank:
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
