"""Adapters that PEFT has put on real transformers models of classes without a mapping table, under ``fully_shard``,
refitted into the slots of vLLM's real classes, on a CPU."""

import gc

import torch
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reshard.refit import connect
from reshard.trainers import FsdpModel
from tests.starting.ranks import caught
from tests.tools import refit_sides, vllm_models
from tests.tools.adapted import adapted
from tests.tools.model_classes import class_of


def trainer_of(checkpoint: str, settings: dict, place: str) -> tuple[PeftModel, list[PeftModel], list[str]]:
    """The model of a checkpoint with an adapter, three versions of that, and the directories in which PEFT has saved
    these."""
    versions = [adapted(checkpoint, seed, **settings) for seed in range(3)]
    directories = [f"{place}-{version}" for version in range(3)]
    for version, directory in zip(versions, directories, strict=True):
        version.save_pretrained(directory)
    return adapted(checkpoint, 0, **settings), versions, directories


def put_in(model: torch.nn.Module, other: PeftModel) -> None:
    """Give a model under ``fully_shard`` the adapter of one that is whole."""
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            whole = theirs[name].data
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(whole)


def refit_each(rank: int, sides: dict, cases: dict[str, tuple[str, dict, dict]], folder: str) -> dict:
    """For each checkpoint, with PEFT's settings and the engine's: by two versions of an adapter, the names of slots
    that hold something else than vLLM's own loading of what PEFT saves puts there, how many hold something, and how
    many differ from a third version, as a control. What is said where it is refused."""
    is_trainer, is_engine, members = refit_sides.start(rank, sides)
    # Which wants torch's process group to be there.
    from tests.on_cpu.vllm_adapters_on_cpu import engine_with_adapters, loaded_by_vllm, slot_bits

    results: dict = {}
    # All of them first: an engine may change transformers' classes in its process.
    trained = {name: trainer_of(*case[:2], f"{folder}/{name}-{rank}") for name, case in cases.items()}
    for name, (checkpoint, _, options) in cases.items():
        vllm_models.register(class_of(checkpoint))
        model, versions, directories = trained[name]
        fully_shard(model, mesh=init_device_mesh("cpu", (sides["trainer"],)))
        built: list = []

        def destination(checkpoint: str = checkpoint, options: dict = options, built: list = built):
            from reshard.engines import VllmModel

            built += [*engine_with_adapters(checkpoint, max_loras=3, max_lora_rank=8, **options)]
            return VllmModel(*built[:2])

        links: list = []

        def join(model=model, destination=destination, links: list = links) -> None:
            source, engine = (lambda: FsdpModel(model)), destination
            links.append(
                connect(
                    members, source if is_trainer else None, engine if is_engine else None, adapter="policy"
                )
            )

        refused = caught(join)
        results[name] = refused
        if not links:
            continue
        [link] = links
        module, _, loader = built
        policy = link.receiver.engine
        policy.versions.serve(loader)
        outcome: dict = {"different": [], "filled": []}
        for version in range(2):
            put_in(model, versions[version])
            link.refit(verify=True)
            assert loader.add_adapter(policy.request())  # as a request does: a stage may have nothing of it
            slot = module.lora_manager.lora_index_to_id.index(policy.request().lora_int_id)
            held = slot_bits(module, slot)
            theirs = loaded_by_vllm(module, loader, f"theirs{version}", 1 + version, directories[version])
            outcome["different"].append(sorted(key for key in theirs if held.get(key) != theirs[key]))
            filled = [
                key
                for key, bits in held.items()
                if isinstance(bits, tuple)
                and bits != refit_sides.bits_of(torch.zeros(bits[0], dtype=torch.bfloat16))
            ]
            outcome["filled"].append(len(filled))
        other = loaded_by_vllm(module, loader, "other", 5, directories[2])
        outcome["control"] = sum(held[key] != other[key] for key in other)
        results[name] = outcome
        link.close()
        del link, links, built, module, loader, policy
        gc.collect()
    return results
