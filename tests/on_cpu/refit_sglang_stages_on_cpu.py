"""Two stages of a pipeline with SGLang's real model classes, each called when the other has answered, as
SGLang's schedulers are; refitted from a real Megatron model."""

import math
import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from reshard.engines.sglang import guard, pipeline, worker
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu.refit_sglang_on_cpu import built, held
from tests.starting.ranks import caught
from tests.tools.refit_sides import Steps, trainer


class Batch:
    """The requests of one turn of a stage's loop."""

    def __init__(self) -> None:
        self.reqs: list[SimpleNamespace] = []

    def filter_batch(self) -> None:
        self.reqs = [request for request in self.reqs if not request.finished()]

    def run_until(self, moment: float) -> None:
        """Run a request that has its last token at a moment."""
        self.reqs = [SimpleNamespace(finished=lambda: time.monotonic() >= moment)]


class Stage:
    """What our side asks of an SGLang scheduler."""

    def __init__(self, model: torch.nn.Module, arguments, rank: int) -> None:
        self.server_args, self.ps = arguments, SimpleNamespace(pp_rank=rank, tp_size=1, tp_rank=0)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.weight_updater = SimpleNamespace(offload_tags=set())
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=self)
        self.said, self.flushed = [], 0
        self.running_batch, self.last_batch = Batch(), None
        self.running_mbs, self.mbs, self.last_mbs = [Batch(), self.running_batch], [None], [None]
        self.enable_overlap, self.waiting_queue = False, []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])

    def is_fully_idle(self) -> bool:
        return not any(batch.reqs for batch in self.running_mbs)

    def flush_cache(self, empty_cache: bool) -> bool:
        self.flushed += self.is_fully_idle()
        return self.is_fully_idle()

    def send_output(self, abort, request) -> None:
        self.said.append(abort.finished_reason["message"])

    def takes(self) -> bool:
        """Whether a request is scheduled."""
        taken: list = []
        guard.check_request(
            lambda scheduler, request: taken.append(request), self, SimpleNamespace(rid="one")
        )
        return bool(taken)


for name, method in worker.METHODS.items():
    setattr(Stage, name, method)


def stages(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]):
    """Rank 0 is the trainer, the others are the stages."""
    steps = Steps(sides, rank, 3)
    side, number, size = ("trainer", 0, 1) if rank == 0 else ("stages", rank - 1, 2)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sides['folder']}/{side}", rank=number, world_size=size
    )
    address = f"127.0.0.1:{sides['port']}"
    return (
        train(steps, address, flags, checkpoints) if rank == 0 else serve(steps, address, checkpoints, number)
    )


def train(steps: Steps, address: str, flags: list[str], checkpoints: list[tuple[str, str]]) -> dict[str, str]:
    """Refit from the second checkpoint; once more, which nobody joins; under a request; a third time; and
    after a stage has died."""
    chunks, _ = trainer(flags, checkpoints[1][1])
    link = connect(RefitGroup.join(address, 0, 3, timeout=60), MegatronModel(chunks))
    link.refit(0, verify=True)
    link.refit(1)
    steps.reach("refit 1 done")
    said = {"busy": caught(link.refit)}
    link.refit(2)
    steps.meet("last")
    return said | {"died": caught(link.refit)}


def serve(steps: Steps, address: str, checkpoints: list[tuple[str, str]], number: int) -> dict:
    """Take weights as the trainer gives them."""
    loaded = held(built(checkpoints[1][0], pp=2)[0])
    stage = Stage(*built(checkpoints[0][0], pp=2), number)
    model = stage.tp_worker.model_runner.model
    results: dict = {"loaded": loaded, "before": held(model), "served": [], "taken": [], "waits": stage.said}

    def in_turn(step: str, action: Callable[[], None]) -> None:
        """Act when the stage before has answered."""
        if number:
            steps.wait(step, 1)
        action()
        steps.reach(step)

    def connects() -> None:
        stage.reshard_connect(address=address, first_rank=1, size=3)
        results["again"] = caught(lambda: stage.reshard_connect(address=address, first_rank=1, size=3))

    in_turn("connect called", connects)
    in_turn("connect joined", stage.reshard_join)
    for version in range(3):
        if version == 2:  # the first stage has answered a request, which the second has to hear of
            stage.running_mbs[number].run_until(time.monotonic() + 0.3 * number)
        in_turn(f"refit {version} called", lambda version=version: stage.reshard_refit(version))  # type: ignore[misc]
        assert not stage.takes()
        if version == 1:  # nobody joins
            steps.wait("refit 1 done", 0)
            while pipeline.call_of(stage).is_running:
                time.sleep(0.01)
        else:
            in_turn(f"refit {version} joined", stage.reshard_join)
        results["taken"].append(stage.takes())
        results["served"].append(guard._guards[model].version if results["taken"][-1] else None)
        assert held(model) == loaded
        if version == 1:
            stage.running_mbs[0].run_until(math.inf if number == 0 else 0.0)  # the first stage has a request
            in_turn("busy called", stage.reshard_refit)
            results["busy"] = caught(stage.reshard_join)
            stage.running_mbs[0].reqs = []
    steps.meet("last")
    if number:
        os._exit(0)
    stage.reshard_refit()
    results["died"] = caught(stage.reshard_join)
    return results | {"flushed": stage.flushed, "after": held(model)}
