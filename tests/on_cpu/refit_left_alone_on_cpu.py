"""Refits into engines that may have lost what a refit leaves alone: a tower whose trainer has the language model alone,
or a drafter that it does not have."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from reshard.core.errors import ReshardError
from reshard.refit import connect
from reshard.trainers import FsdpModel
from tests.on_cpu.refit_without_table_on_cpu import engine_of, sharded
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start

LOADED, TRAINED, LOST = "as loaded", "as trained", "lost"


class TextAlone(FsdpModel):
    """A trainer of the language model alone."""

    lacks: tuple[str, ...] = ("visual",)  # in the names of its parameters

    def publish(self, model):
        return [
            one._replace(parts=())
            if any(lacking in part.name for part in one.parts for lacking in self.lacks)
            else one
            for one in super().publish(model)
        ]


class Broken(TextAlone):
    """One that lacks a part of the language model, too."""

    lacks = ("visual", "o_proj")


class Towers:
    """What an engine's tower holds, and what its loader makes of either of two checkpoints."""

    def __init__(self, build, checkpoints: list[str]) -> None:
        self.build, self.checkpoints = build, checkpoints
        self.made = {
            what: self.of(build(directory)[0])
            for what, directory in zip((LOADED, TRAINED), checkpoints, strict=True)
        }
        first, second = self.made.values()
        assert sum(first[name] != second[name] for name in first) > 40, "they differ"

    @staticmethod
    def of(module) -> dict[str, tuple]:
        return {name: bits for name, bits in fingerprint(module).items() if "visual" in name}

    def held(self, module) -> str:
        now = self.of(module)
        return next((what for what, made in self.made.items() if now == made), LOST)


class Meeting:
    """Trainers of the second of two checkpoints, and refits from them: what is said of each, whether the engine serves
    then, and what its tower is."""

    def __init__(self, members, towers: Towers) -> None:
        self.members, self.towers, model = members, towers, sharded(towers.checkpoints[1], 1)
        self.all, self.text, self.broken = FsdpModel(model), TextAlone(model), Broken(model)

    def refit(self, source, side) -> tuple[str, bool, str]:
        links: list = []

        def refitted() -> None:
            links.append(connect(self.members, source, side))
            links[0].refit(verify=True)

        said = caught(refitted)
        for link in links:
            link.close()
        return said, side.guard.ready, self.towers.held(side.module)


def vllm_towers(rank: int, sides: dict, checkpoints: list[str]) -> dict[str, list]:
    """By what happens, what a vLLM's tower is after each refit."""
    from reshard.engines.vllm.guard import guard_of
    from reshard.engines.vllm.live import VllmModel
    from tests.on_cpu.sleeping_on_cpu import worker_of

    build, _ = engine_of()
    meeting = Meeting(start(rank, sides)[2], Towers(build, checkpoints))
    text, whole, refit = meeting.text, meeting.all, meeting.refit
    results: dict[str, list] = {}

    def loaded(sleeps: bool = False, is_watched: bool = True):
        module, config = build(checkpoints[0])
        config.model_config.enable_sleep_mode = sleeps
        worker = worker_of(module, config)
        runner = worker.model_runner
        runner.reset_mm_cache = runner.reset_encoder_cache = lambda: (
            None
        )  # which the stand-in for a runner lacks
        if is_watched:
            guard_of(module, config, just_loaded=True).watch(module, worker)  # as the extension does
        return worker

    def forget(worker, level: int = 2) -> None:
        worker.sleep(level)
        worker.wake_up(["weights"])

    worker = loaded()
    forget(worker)
    side = VllmModel.from_worker(worker)
    results["slept before it was connected"] = [refit(text, side)]
    worker.reload_weights()
    results["slept before it was connected"] += [refit(text, side)]
    forget(worker)
    results["slept before it was connected"] += [refit(text, side)]

    for level in (1, 2):
        worker = loaded(sleeps=True)
        side = VllmModel.from_worker(worker)
        link, said = connect(meeting.members, text, side), []
        for _ in range(3):  # a loop that refits in each step, and sleeps after it
            forget(worker, level)
            said.append(
                (caught(lambda link=link: link.refit(verify=True)), True, meeting.towers.held(side.module))
            )
        link.close()
        results[f"level {level}"] = said

    side = VllmModel.from_worker(worker := loaded())
    results["another brought it"] = [refit(text, side), refit(whole, side)]
    forget(worker)
    results["another brought it"] += [refit(text, side), refit(whole, side), refit(text, side)]
    forget(worker)
    results["another brought it"] += [refit(text, side), refit(text, VllmModel.from_worker(worker))]

    side = VllmModel.from_worker(loaded())
    with patch.object(VllmModel, "end", side_effect=ReshardError("on purpose")):
        results["a refit of it failed"] = [refit(whole, side)[:2]]
    results["a refit of it failed"] += [refit(text, side)[:2], refit(whole, side)]

    def by_others(worker) -> None:
        from safetensors.torch import load_file

        worker.model_runner.model.load_weights(load_file(f"{checkpoints[1]}/model.safetensors").items())

    side = VllmModel.from_worker(worker := loaded())
    results["others wrote it"] = [refit(text, side)]
    by_others(worker)
    forget(worker)
    results["others wrote it"] += [refit(text, side)]
    side = VllmModel.from_worker(worker := loaded())
    by_others(worker)
    results["others wrote it"] += [refit(text, side)]
    forget(worker)
    results["others wrote it"] += [refit(text, side)]

    for name in ("nobody watched", "never slept", "slept"):
        worker = loaded(sleeps=True, is_watched=False)
        if name != "nobody watched" and "discard" in vars(type(worker)):
            del type(worker).discard  # which this vLLM has not
        if name == "slept":
            forget(worker)
        results[name] = [refit(text, VllmModel.from_worker(worker))]
    results["has discard"] = hasattr(worker, "discard")

    side = VllmModel.from_worker(loaded())
    link = connect(meeting.members, whole, side)
    link.refit()
    refused = caught(lambda: connect(meeting.members, meeting.broken, side))
    results["beside"] = [refused, caught(lambda: link.refit(verify=True))]
    return results


def refused_by_one(rank: int, sides: dict, checkpoints: list[str]) -> list[str]:
    """What one of two ranks of an engine says of a connection without its tower that the other has taken, but itself
    fails in an unexpected way; and of the connection there is, which brings the tower."""
    from reshard.engines.vllm.live import VllmModel

    build, _ = engine_of()
    members = start(rank, sides)[2]
    side, model = VllmModel(*build(checkpoints[0], tp=2)), sharded(checkpoints[1], 2)
    link = connect(members, FsdpModel(model), side)
    link.refit()
    take = VllmModel.take_optional

    def fails(self, available) -> None:
        take(self, available)
        if rank == 0:
            raise ValueError("on purpose")

    with patch.object(VllmModel, "take_optional", fails):
        try:
            said = caught(lambda: connect(members, TextAlone(model), side))
        except ValueError as error:
            said = str(error)
    return [said, caught(lambda: link.refit(verify=True))]


def sglang_towers(rank: int, sides: dict, checkpoints: list[str]) -> dict[str, list]:
    """By what happens, what an SGLang's tower is after each refit."""
    from reshard.engines.sglang.guard import follow_load, follow_release
    from reshard.engines.sglang.live import SglangModel

    build, _ = engine_of()
    meeting = Meeting(start(rank, sides)[2], Towers(build, checkpoints))
    text, whole, refit = meeting.text, meeting.all, meeting.refit
    results: dict[str, list] = {}

    def loaded(**options):
        module, arguments = build(checkpoints[0], **options)
        runner = SimpleNamespace(model=module)
        updater = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner),
            offload_tags={"weights"},
            scheduler=SimpleNamespace(server_args=arguments),
        )
        return module, arguments, updater

    def release(updater) -> None:
        """What SGLang's memory saver leaves of weights that it resumes without a backup."""

        def released(*_) -> None:
            for parameter in updater.tp_worker.model_runner.model.parameters():
                parameter.data.view(torch.uint8).fill_(0x7B)

        follow_release(released, updater)

    def load(updater) -> None:
        def again(*_):
            values = dict(build(checkpoints[0])[0].named_parameters())
            for name, parameter in updater.tp_worker.model_runner.model.named_parameters():
                parameter.data.copy_(values[name].data)
            return SimpleNamespace(success=True)

        follow_load(again, updater)

    for name, options in (("saved", {"enable_memory_saver": True}), ("not saved", {})):
        module, arguments, updater = loaded(**options)
        side = SglangModel(module, arguments)
        results[name] = [refit(text, side)]
        release(updater)
        results[name] += [refit(text, side), refit(whole, side), refit(text, side)]
        release(updater)
        results[name] += [refit(text, side)]
        load(updater)
        release(updater)
        results[name] += [refit(text, side)]

    module, arguments, updater = loaded(enable_memory_saver=True)
    release(updater)
    results["released before"] = [refit(text, SglangModel(module, arguments))]
    load(updater)
    results["released before"] += [refit(text, SglangModel(module, arguments))]
    return results
