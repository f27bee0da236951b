"""Refits on the CPU into the real classes of an SGLang's model and of its EAGLE-3 drafter, which SGLang's own worker
binds to each other, from real models under FSDP2 that are trained together. No layer is run."""

from functools import partial
from types import SimpleNamespace

import torch
import transformers
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import get_model
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.delta import apply_deltas, roll_back
from reshard.engines.sglang.live import SglangModel
from reshard.live.delta_writer import DeltaWriter
from reshard.refit import connect
from reshard.refit.reporting.served_parts import digest_parts
from reshard.trainers import FsdpModel, WithDrafter
from tests.on_cpu import sglang_on_cpu
from tests.starting.ranks import caught
from tests.tools.chains import Workers
from tests.tools.drafters import Eagle3, load_drafter
from tests.tools.refit_sides import bits_of, fingerprint, start


def served(pair: list[str], **options) -> tuple:
    """The model of a directory, the server's arguments, and the worker that has the drafter of the other directory."""
    hf, drafter = pair
    options = {"disable_radix_cache": True} | options
    model, arguments = sglang_on_cpu.build(
        hf, speculative_algorithm="EAGLE3", speculative_draft_model_path=drafter, speculative_num_steps=2,
        speculative_eagle_topk=1, speculative_num_draft_tokens=3, **options,
    )  # fmt: skip
    config = ModelConfig.from_server_args(arguments, model_path=drafter, is_draft_model=True)
    load = LoadConfig(load_format=options.get("load_format", "safetensors"))
    draft = get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu"))
    worker = EagleDraftWorker.__new__(EagleDraftWorker)
    worker.server_args, worker.speculative_algorithm = arguments, SpeculativeAlgorithm.EAGLE3
    target = SimpleNamespace(
        model=model, model_config=ModelConfig.from_server_args(arguments), load_config=load
    )
    worker.target_worker = SimpleNamespace(model_runner=target)
    worker.draft_runner = SimpleNamespace(model=draft, model_config=config)
    worker.init_token_map()
    worker.init_lm_head()
    return model, arguments, worker


def held(model: torch.nn.Module, worker: EagleDraftWorker) -> dict[str, tuple]:
    """The fingerprint of a model and its drafter."""
    drafts = fingerprint(worker.draft_runner.model)
    if worker.hot_token_id is not None:
        drafts["tokens"] = bits_of(worker.hot_token_id)
    return fingerprint(model) | {f"draft.{name}": bits for name, bits in drafts.items()}


def trained(pair: list[str], ranks: int) -> tuple[torch.nn.Module, Eagle3]:
    """The model and the drafter of two directories, both sharded over these ranks."""
    hf, drafter = pair
    mesh = init_device_mesh("cpu", (ranks,))
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
    return fully_shard(model, mesh=mesh), fully_shard(load_drafter(drafter, hf), mesh=mesh)


def refit_each(rank: int, sides: dict, cases: dict[str, tuple[list[list[str]], dict]]) -> dict:
    """Of each case (two pairs of a model's and a drafter's directories; the engine's options): the names of the tensors
    that are not, after a refit from the second pair, what SGLang's loaders make of it; those that differ between the
    pairs; the drafter's digests, before, then, and after a refit from the first model alone; what changed by that; and
    what is said of a worker whose tokens another has changed."""
    members, results = start(rank, sides)[2], {}
    for name, (pairs, options) in cases.items():
        model, arguments, worker = served(pairs[0], **options)
        destination = SglangModel(model, arguments, None, worker)
        policy, drafter = trained(pairs[1], sides["trainer"])
        digests = [digest_parts(destination)["drafter"]]
        link = connect(members, WithDrafter(FsdpModel(policy), drafter), destination)
        link.refit(1, verify=True)
        now = held(model, worker)
        digests.append(digest_parts(destination)["drafter"])
        stale = []
        if worker.hot_token_id is not None:
            worker.hot_token_id[3] += 1
            stale = destination.stale_derived()
            link.refit(2, verify=True)
        version = destination.version
        link.close()
        alone = connect(members, FsdpModel(trained(pairs[0], sides["trainer"])[0]), destination)
        alone.refit(3, verify=True)
        digests.append(digest_parts(destination)["drafter"])
        left = [entry for entry in alone.describe()["tensors"] if "drafter" in entry["how"]]
        then = held(model, worker)
        alone.close()
        first, second = (held(*(served(pair, **options)[0::2])) for pair in pairs)
        results[name] = {
            "wrong": sorted(key for key in now if now[key] != second[key]),
            "differ": sum(first[key] != second[key] for key in first),
            "drafts changed": sorted(
                key for key in now if key.startswith("draft.") and then[key] != now[key]
            ),
            "digests": digests,
            "stale": stale,
            "left": left,
            "version": version,
        }
    return results


def follow(
    rank: int, sides: dict, models: list[str], drafters: list[str], steps: list[tuple[int, int]], chain: str
) -> dict:
    """Follow a chain that has a version for each step, numbers of a model's and a drafter's directory; what is not then
    as SGLang's loaders make it of these, after the way back too; and what is said of an engine with another drafter."""
    start(rank, sides)
    policy, drafter = trained([models[0], drafters[0]], 1)
    writer = DeltaWriter(WithDrafter(FsdpModel(policy), drafter), models[0], chain, drafter_base=drafters[0])
    model, arguments, worker = served([models[0], drafters[0]])
    side = SglangModel(model, arguments, None, worker)
    workers = Workers(side)

    def wrong(of_model: int, of_drafter: int) -> list[str]:
        now, then = held(model, worker), held(*served([models[of_model], drafters[of_drafter]])[0::2])
        return sorted(name for name in then if now[name] != then[name])

    outcome: dict = {"versions": [], "wrong": []}
    for number, step in enumerate(steps, 1):
        for module, other in zip(
            (policy, drafter), trained([models[step[0]], drafters[step[1]]], 1), strict=True
        ):
            named = dict([*other.named_parameters(), *other.named_buffers()])
            with torch.no_grad():
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    tensor.copy_(named[name])
        writer.save(number)
        outcome["versions"].append((apply_deltas(workers, chain, verify=True), side.version))
        outcome["wrong"].append(wrong(*step))
    outcome["differ"] = len(wrong(0, 0))
    outcome["back"] = roll_back(workers), wrong(*steps[-2])
    other, arguments, beside = served([models[0], drafters[3]])
    reader = SglangModel(other, arguments, None, beside)
    outcome["another"] = caught(lambda: apply_deltas(Workers(reader), chain))
    return outcome


def said(rank: int, sides: dict, cases: dict[str, tuple]) -> dict:
    """What is said of each case (pair that the engine loads, its options, the trainer's pair, without the second if it
    has no drafter, options of `WithDrafter`, and of a tensor that the drafter has beside, by name)."""
    members, results = start(rank, sides)[2], {}
    for name, (loads, options, trains, how, beside) in cases.items():
        model, arguments, worker = served(loads, **options)
        policy = transformers.AutoModelForCausalLM.from_pretrained(trains[0], dtype=torch.bfloat16)
        drafter = load_drafter(trains[1], trains[0]) if len(trains) == 2 else None
        if drafter is not None:
            drafter.config = transformers.LlamaConfig(**drafter.fields)
        if beside:
            drafter.register_buffer(beside, torch.ones(4))

        def source(policy=policy, drafter=drafter, how=how):
            return FsdpModel(policy) if drafter is None else WithDrafter(FsdpModel(policy), drafter, **how)

        destination = partial(SglangModel, model, arguments, None, worker)
        results[name] = caught(partial(connect, members, source, destination))
    return results
