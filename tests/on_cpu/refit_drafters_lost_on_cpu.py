"""Ranks of refits of a model, and of a drafter or a tower, in a vLLM that sleeps, fails, loads, or has another
connection."""

from unittest.mock import patch

import torch
import transformers

from reshard.core.errors import ReshardError
from reshard.engines.vllm.live import VllmModel
from reshard.refit import connect
from reshard.trainers import FsdpModel, WithDrafter
from tests.on_cpu.refit_drafters_on_cpu import CHANGES, of_both, served
from tests.on_cpu.refit_without_table_on_cpu import engine_of, sharded
from tests.on_cpu.sleeping_on_cpu import worker_of
from tests.starting.ranks import caught
from tests.tools.drafters import load_drafter
from tests.tools.refit_sides import fingerprint, start


def source_of(pair, change: str = "") -> tuple[FsdpModel, WithDrafter]:
    """A trainer without its drafter, and with it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.bfloat16)
    drafter = load_drafter(pair[1], pair[0])
    CHANGES[change](drafter)
    return FsdpModel(model), WithDrafter(FsdpModel(model), drafter)


def forget(worker) -> None:
    """Discard the weights in sleep."""
    worker.sleep(2)
    worker.wake_up(["weights"])


def differing(module, draft, expected: dict) -> list[str]:
    held = of_both(module, draft)
    return sorted(name for name in held if held[name] != expected[name])


def asleep(rank: int, sides: dict, pairs: list) -> dict:
    """What is wrong after refits of a model and its drafter, before and after sleeps, and of the model alone."""
    members, results = start(rank, sides)[2], {}
    expected = of_both(*served(pairs[1])[1:])
    worker, module, draft = served(pairs[0])  # the last made has the allocator
    alone, both = source_of(pairs[1])
    link = connect(members, both, VllmModel.from_worker(worker))
    link.refit(1, verify=True)
    results["first"] = differing(module, draft, expected)
    forget(worker)
    link.refit(2)
    results["after sleep"] = differing(module, draft, expected)
    link.close()

    # An engine whose weights were once lost: brought, left alone, and lost again.
    again = VllmModel.from_worker(worker)
    link = connect(members, both, again)
    link.refit(3, verify=True)
    link.close()
    link = connect(members, alone, again)
    link.refit(4, verify=True)
    results["left alone"] = differing(module, draft, expected)
    forget(worker)
    results["lost"] = len(differing(module, draft, expected))
    results["said"] = caught(lambda: link.refit(5, verify=True))
    results["left alone after sleep"] = differing(module, draft, expected)
    results["ready"] = again.guard.ready
    link.close()
    return results


def beside(rank: int, sides: dict, pairs: list) -> dict:
    """What refits say after another connection was refused."""
    members, results = start(rank, sides)[2], {}
    worker = served(pairs[0])[0]
    alone, both = source_of(pairs[1])
    wrong, destination = source_of(pairs[1], "no fc")[1], VllmModel.from_worker(worker)
    for name, source in (("with", both), ("without", alone)):
        link = connect(members, source, destination)
        link.refit()
        refused = caught(lambda: connect(members, wrong, destination))
        results[name] = refused, caught(lambda link=link: link.refit(verify=True))
        link.close()
    return results


def unwatched(rank: int, sides: dict, pairs: list) -> dict:
    """What is said of a vLLM that has discarded its weights before anybody watched; and what is wrong once it was
    refitted with its drafter, and then without."""
    members = start(rank, sides)[2]
    expected = of_both(*served(pairs[1])[1:])
    worker, module, draft = served(pairs[0])
    worker.vllm_config.model_config.enable_sleep_mode = True
    forget(worker)
    side = VllmModel.from_worker(worker)
    alone, both = source_of(pairs[1])
    results = {"said": caught(lambda: connect(members, alone, side)), "ready": side.guard.ready}
    for name, source in (("both", both), ("alone", alone)):
        link = connect(members, source, side)
        link.refit(verify=True)
        link.close()
        results[name] = differing(module, draft, expected)
    return results


def begun(rank: int, sides: dict, pairs: list, with_drafter: bool) -> bool:
    """Whether a refit that is begun on a new connection, of an engine that serves a version, brings all."""
    is_trainer, is_engine, members = start(rank, sides)
    alone, both = source_of(pairs[1]) if is_trainer else (None, None)
    destination = VllmModel.from_worker(served(pairs[0])[0]) if is_engine else None
    options = {"delta": True, "backend": "nccl"}
    link = connect(members, alone, destination, **options)
    link.refit(1)
    link.close()
    link = connect(members, both if with_drafter else alone, destination, **options)
    report = link.begin_refit(2).wait()
    link.close()
    return report.is_pending


def reloaded(rank: int, sides: dict, pairs: list) -> dict:
    """A refit of model and drafter fails half way, and vLLM then loads the model's weights itself, which leaves a
    drafter as it is."""
    members, results = start(rank, sides)[2], {}
    worker, module, draft = served(pairs[0])
    before = of_both(module, draft)
    destination = VllmModel.from_worker(worker)
    link = connect(members, source_of(pairs[1])[1], destination)

    def fails(self) -> None:
        draft.get_parameter("model.norm.weight").data.zero_()  # what has arrived when a member dies
        raise ReshardError("on purpose")

    with patch.object(VllmModel, "update_derived", fails):
        results["said"] = caught(lambda: link.refit(1))
    runner = worker.model_runner
    runner.reset_mm_cache = runner.reset_encoder_cache = lambda: None  # which the stand-in for a runner lacks
    worker.reload_weights()
    results["ready"] = destination.guard.ready
    results["drafter"] = [name for name in differing(module, draft, before) if name.startswith("draft.")]
    link.refit(2, verify=True)
    results["mended"] = destination.guard.ready
    return results


def tower_asleep(rank: int, sides: dict, checkpoints: list[str]) -> dict:
    """What is wrong of a model and its tower after refits before and after a sleep."""
    build, _ = engine_of()
    members, results = start(rank, sides)[2], {}
    expected = fingerprint(build(checkpoints[1])[0])
    module, config = build(checkpoints[0])
    worker = worker_of(module, config)
    link = connect(members, FsdpModel(sharded(checkpoints[1], 1)), VllmModel.from_worker(worker))
    for name in ("first", "after sleep"):
        link.refit()
        held = fingerprint(module)
        results[name] = sorted(each for each in held if held[each] != expected[each])
        forget(worker)
    return results
