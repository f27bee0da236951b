"""Calls of a switch that reach an engine, or come back from it, once the trainer has given them up and gone on: they
take nothing back that was switched to since, name no version that is not served, and forget nothing that was begun.

The trainer's and the engines' ends are the real ones, with vLLM's own sessions of updates; only the way between is not.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker as Theirs

from reshard.core.errors import ReshardError
from reshard.engines.sglang import group as sglang_group
from reshard.engines.sglang.delta_methods import ChainMethods
from reshard.engines.workers.actions import REFIT, ROLL_BACK, SWITCH
from reshard.engines.workers.refits import LinkMethods
from reshard.integrations import sglang, switching
from reshard.integrations.sglang import SglangClient
from reshard.integrations.vllm.transfer import WeightTransfer
from reshard.integrations.vllm.worker import ReshardTransfer
from reshard.refit import RefitGroup, connect
from tests.on_cpu.refit_deltas_on_cpu import Served, Shards
from tests.refit.test_deltas import same_as
from tests.starting.ranks import free_port

SECONDS = 1.0  # after which the trainer gives a call up
SECRET = "0123456789abcdef0123"


class Held:
    """Calls that are held up at a place, until they are let go."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.chosen: set[str] = set()

    def hold(self, place: str) -> None:
        """Hold up the next call that comes there."""
        self.chosen.add(place)

    def passes(self, place: str) -> None:
        """Come to a place with a call."""
        if place in self.chosen:
            self.chosen.remove(place)
            self.gates[place] = threading.Event()
            assert self.gates[place].wait(60)


class Worker(LinkMethods):
    """An engine's one worker."""

    vllm_config = None

    def __init__(self) -> None:
        self.side = Served()

    def reshard_connect(self, address: str, first_rank: int, size: int, timeout: float = 60.0,
                        secret: str | None = None, **_: Any) -> None:  # fmt: skip
        self.reshard_close()
        self._reshard_link = connect(
            RefitGroup.join(address, first_rank, size, timeout, secret), None, self.side
        )


class VllmWorker(Worker):
    """One whose updates vLLM counts."""

    start_weight_update, _start_weight_update = Theirs.start_weight_update, Theirs._start_weight_update
    update_weights, finish_weight_update = Theirs.update_weights, Theirs.finish_weight_update
    _check_weight_transfer_engine = Theirs._check_weight_transfer_engine

    def __init__(self) -> None:
        super().__init__()
        self._weight_update_active = False
        self.weight_transfer_engine = transfer = ReshardTransfer.__new__(ReshardTransfer)
        transfer.worker, transfer.begun, transfer.model = self, None, torch.nn.Module()
        transfer._default_model, transfer._default_model_config = transfer.model, None


class VllmClient:
    """The way to a vLLM, which makes one call after the other."""

    def __init__(self, name: str) -> None:
        self.name, self.worker, self.label = name, VllmWorker(), None
        self.held, self.fails, self.lock = Held(), "", threading.Lock()

    def _made(self, place: str, call: Callable[[], None]) -> None:
        if self.fails == place:
            self.fails = ""
            raise ReshardError("no luck")
        self.held.passes(place)
        with self.lock:
            call()
        self.held.passes(f"the answer to {place}")

    def serves(self) -> int | None:
        return self.worker.side.guard.version

    def init_weight_transfer_engine(self, info: dict) -> None:
        transfer = self.worker.weight_transfer_engine
        with self.lock:
            transfer.init_transfer_engine(transfer.parse_init_info(info))

    def start_weight_update(self) -> None:
        self._made("start", self.worker.start_weight_update)

    def update_weights(self, info: dict) -> None:
        self._made(info.get("action", REFIT), lambda: self.worker.update_weights(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._made(f"end {weight_version}", lambda: self._finish(weight_version))

    def _finish(self, version: str | None) -> None:
        self.worker.finish_weight_update()
        if version is not None:  # after it, as vLLM does
            self.label = int(version)


class Scheduler(ChainMethods, Worker):
    """One of SGLang's schedulers."""

    def reshard_state(self) -> str:
        """Return nothing: no trainer asks here what is served."""
        return ""


class Server(SglangClient):
    """The way to an SGLang, whose schedulers make one call after the other."""

    def __init__(self, name: str) -> None:
        super().__init__("http://127.0.0.1:1", name=name)
        self.worker, self.label = Scheduler(), None
        self.held, self.fails, self.lock = Held(), "", threading.Lock()

    _made = VllmClient._made

    def init_weight_transfer_engine(self, info: dict) -> None:
        self.worker.reshard_connect(**{key: value for key, value in info.items() if key != "name"})

    def act(self, action: str, options: dict) -> None:
        self._made(action, lambda: sglang_group._act(self.worker, action, "", **options))

    def refit(self, version: int, verify: bool) -> None:
        self._made(REFIT, lambda: self.worker.reshard_refit(version, verify))
        self.label = version

    def _call(self, method: str, route: str, body: Any = None) -> Any:
        if route == "update_weight_version":
            self.label = int(body["new_version"])
        return {"weight_version": str(self.label)}


class Trainer:
    """Two ranks of a trainer, which call two engines, and the calls that they make to switch these."""

    def __init__(self, clients: list, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients, self.sides, self.calls = clients, [Shards(0), Shards(1)], list[Future]()
        in_background = switching.in_background

        def recorded(call: Callable[[], Any]) -> Future:
            self.calls.append(in_background(call))
            return self.calls[-1]

        monkeypatch.setattr(switching, "in_background", recorded)
        self.pool = ThreadPoolExecutor(2)
        self.connect()

    def connect(self) -> None:
        """Connect, anew where it is connected."""
        address = f"127.0.0.1:{free_port()}"

        def connected(rank: int) -> WeightTransfer:
            return WeightTransfer(
                self.sides[rank], [] if rank else self.clients, address, rank=rank, ranks=2, engine_ranks=[1, 1],
                secret=SECRET, timeout=SECONDS, backend="nccl", delta=True, keep_mapped=True,
            )  # fmt: skip

        self.transfers = [*self.pool.map(connected, (0, 1))]

    def both(self, call: Callable[[WeightTransfer], Any]) -> list:
        return [*self.pool.map(call, self.transfers)]

    def step(self) -> None:
        for side in self.sides:
            side.step(0.01)

    def send(self, version: int) -> None:
        self.step()
        self.both(lambda transfer: transfer.send(version))

    def begin(self, version: int) -> None:
        self.step()
        assert all(report.is_pending for report in self.both(lambda one: one.begin(version).wait()))

    def switch(self) -> str:
        """Switch; return why that failed, if it did."""

        def said(transfer: WeightTransfer) -> str:
            try:
                transfer.switch()
            except ReshardError as error:
                return str(error)
            return ""

        return self.both(said)[0]

    def let_go(self, client: Any, place: str) -> None:
        """Let a call that was held up go on, and come to the end of whatever makes it."""
        client.held.gates[place].set()
        assert not wait(self.calls, 20).not_done

    def packed(self) -> tuple:
        return tuple([tensor.clone() for tensor in side.tensors] for side in self.sides)

    def serve(self, version: int) -> None:
        """Check that all engines serve the trainer's weights as this version, and say so."""
        for client in self.clients:
            side = client.worker.side
            assert (side.guard.version, client.label, side.ready) == (version, version, True), client.name
            assert same_as(self.packed(), side.now()), client.name


@pytest.fixture(params=[VllmClient, Server])
def trainer(request, monkeypatch):
    clients = [request.param("one"), request.param("two")]
    if request.param is Server:
        by_name = {client.name: client for client in clients}
        for client in clients:
            client.url = client.name
        monkeypatch.setattr(
            sglang, "act_on_server", lambda url, action, _, **rest: by_name[url].act(action, rest)
        )
        monkeypatch.setattr(sglang, "refit_server", lambda url, *given: by_name[url].refit(*given[:2]))
    made = Trainer(clients, monkeypatch)
    made.send(1)
    made.begin(2)
    yield made
    made.pool.shutdown()


def test_a_way_back_that_comes_late_takes_nothing_back_that_was_switched_to_since(trainer):
    two = trainer.clients[1]
    place = "start" if isinstance(two, VllmClient) else ROLL_BACK
    two.fails = SWITCH
    two.held.hold(place)
    assert "two (no luck) did not switch to version 2" in trainer.switch()
    trainer.send(3)
    trainer.begin(4)
    assert trainer.switch() == ""
    trainer.serve(4)
    trainer.let_go(two, place)
    trainer.serve(4)
    trainer.begin(5)
    two.held.chosen.clear()
    assert trainer.switch() == "", "no update of the one that came late is left open"
    trainer.serve(5)


def test_a_way_back_that_is_answered_late_names_no_version(trainer):
    """What it names may be another's by then."""
    one, two = trainer.clients
    two.fails = SWITCH
    one.held.hold(f"the answer to {ROLL_BACK}")
    assert "two (no luck) did not switch to version 2" in trainer.switch()
    if isinstance(one, VllmClient):
        trainer.connect()  # which ends the update that is open
    trainer.send(3)
    trainer.let_go(one, f"the answer to {ROLL_BACK}")
    trainer.serve(3)


def test_the_end_of_a_switch_that_comes_late_forgets_nothing_and_names_no_version(trainer):
    two = trainer.clients[1]
    place = "end 2" if isinstance(two, VllmClient) else f"the answer to {SWITCH}"
    two.held.hold(place)
    assert "two (it did not answer within 1 s) did not switch to version 2" in trainer.switch()
    if isinstance(two, VllmClient):
        trainer.connect()
    trainer.send(3)
    trainer.begin(4)
    trainer.let_go(two, place)
    assert two.worker.side.guard.version == two.label == 3
    assert trainer.switch() == ""
    trainer.serve(4)


def test_one_that_has_switched_too_late_goes_back_to_what_the_others_serve(trainer):
    two, before = trainer.clients[1], trainer.clients[0].worker.side.now()
    two.held.hold(f"the answer to {SWITCH}")
    assert "two (it did not answer within 1 s) did not switch to version 2" in trainer.switch()
    trainer.let_go(two, f"the answer to {SWITCH}")
    for client in trainer.clients:
        side = client.worker.side
        assert side.guard.version == client.label == 1 and side.ready
        assert all(torch.equal(kept, now) for kept, now in zip(before, side.now(), strict=True))
    trainer.send(3)
    trainer.serve(3)


@pytest.mark.parametrize("trainer", [VllmClient], indirect=True)
def test_a_refit_of_another_connection_leaves_what_was_begun(trainer):
    two = trainer.clients[1]
    transfer = two.worker.weight_transfer_engine
    late = {"version": 9, "ticket": "0" * 32 + "/3"}
    with pytest.raises(ReshardError, match="called by a connection that is over"):
        transfer.update_weights(late | {"action": REFIT})
    with pytest.raises(ReshardError, match="the roll back comes late"):
        transfer.update_weights(late | {"action": ROLL_BACK})
    assert trainer.switch() == ""
    trainer.serve(2)
