"""vLLM's real model classes that serve an adapter above quantized weights, and hand on both: a trainer of PEFT's, an
engine that it has refitted, and a newcomer, in one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from reshard.refit import RefitGroup, connect
from reshard.trainers import FsdpModel
from tests.tools import refit_sides
from tests.tools.reachable import reachable
from tests.tools.twins import RankOfLender, handed_on

NAME, VERSION = "policy", 7


def held(engine) -> dict:
    """The bits of every tensor of an engine's model; what maps tokens to slots is of requests."""
    found = reachable(engine.module)
    return {name: bits for name, bits in found.items() if ".punica_wrapper." not in name}


def brought_up(
    rank: int, sides: dict, directory: str, options: dict, others: dict[str, dict], folder: str
) -> dict:
    """What an engine and a newcomer hold once the one has handed on an adapter and what is below it to the other, and
    after the next refit of both; what vLLM's own loading of PEFT's files puts into the slot; what is said of `others`,
    newcomers with other options by a name; and what of bits that do not arrive, below the adapter and of it."""
    refit_sides.start(rank, sides)
    from reshard.engines import VllmModel
    from tests.on_cpu.refit_lora_without_table_on_cpu import adapted
    from tests.on_cpu.vllm_adapters_on_cpu import engine_with_adapters, loaded_by_vllm, slot_bits

    first, second = (adapted(directory, seed) for seed in range(2))
    loaders: dict[VllmModel, object] = {}

    def made(**own) -> VllmModel:
        module, config, loader = engine_with_adapters(
            directory, **{"max_loras": 3, "max_lora_rank": 8} | options | own
        )
        engine = VllmModel(module, config)
        loaders[engine] = loader
        return engine

    def slot(engine: VllmModel) -> dict:
        policy = engine.adapter(NAME)
        policy.versions.serve(loaders[engine])
        request = policy.request()
        assert loaders[engine].add_adapter(request)
        return slot_bits(
            engine.module, engine.module.lora_manager.lora_index_to_id.index(request.lora_int_id)
        )

    def refitted(model, engine: VllmModel, version: int) -> None:
        link = connect(RefitGroup.of_process_group(), FsdpModel(model), engine, adapter=NAME)
        link.refit(version, verify=True)
        link.close()

    lender, newcomer = made(), made()
    worker = RankOfLender(lender)
    results: dict = {"early": handed_on(worker, newcomer, VERSION, NAME)}
    refitted(first, lender, VERSION)
    first.save_pretrained(f"{folder}/peft")
    results["slot before"] = slot(lender)
    results["before"] = held(newcomer)
    results["spoiled below"] = handed_on_but(spoiled_below(newcomer), worker, newcomer)
    results["spoiled adapter"] = handed_on_but(spoiled_adapter(newcomer), worker, newcomer)
    results["said"] = handed_on(worker, newcomer, VERSION, NAME)
    results["serves"] = [(engine.ready, engine.adapter(NAME).version) for engine in (lender, newcomer)]
    results["lent"], results["got"] = held(lender), held(newcomer)
    results["slots"] = [slot(engine) for engine in (lender, newcomer)]
    results["by vLLM"] = loaded_by_vllm(newcomer.module, loaders[newcomer], "files", 1, f"{folder}/peft")
    results["others"] = {name: handed_on(worker, made(**own), VERSION, NAME) for name, own in others.items()}
    results["refitted"] = []
    for engine in (lender, newcomer):
        refitted(second, engine, VERSION + 1)
        results["refitted"].append((held(engine), slot(engine)))
    return results


def handed_on_but(spoiling: Callable, worker: RankOfLender, newcomer) -> tuple[str, bool, int | None]:
    """What is said where something is spoiled meanwhile, and what the newcomer serves then: whether the model, and
    which version of the adapter."""
    with spoiling():
        said = handed_on(worker, newcomer, VERSION, NAME)
    return said, newcomer.ready, newcomer.adapter(NAME).version


def spoiled_below(newcomer) -> Callable[[], Iterator[None]]:
    """A bit of a code, once all have come."""
    [name, *_] = newcomer.not_as_published()
    parameter = next(newcomer.module.get_submodule(name.rpartition(".")[0]).parameters())

    @contextmanager
    def spoiling():
        restore = newcomer.restore_left_alone

        def spoil() -> None:
            restore()
            parameter.data.as_strided((1,), (1,)).view(torch.uint8)[0] ^= 1

        newcomer.restore_left_alone = spoil
        yield
        del newcomer.restore_left_alone

    return spoiling


def spoiled_adapter(newcomer) -> Callable[[], Iterator[None]]:
    """A bit of the slot, once what has come is there."""
    policy = newcomer.adapter(NAME)

    @contextmanager
    def spoiling():
        process = policy.process_round

        def spoil(index: int) -> None:
            process(index)
            a, _ = policy._stages.all[0].slot(policy._writing)
            a.view(torch.uint8)[..., 0] ^= 1

        policy.process_round = spoil
        yield
        del policy.process_round

    return spoiling
