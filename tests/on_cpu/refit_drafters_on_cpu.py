"""Refits on the CPU into the real classes of a vLLM's model and of its EAGLE-3 drafter, which vLLM's own proposer binds
to each other, from real trainers that train both."""

from functools import partial

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.engines.vllm.live import VllmModel
from reshard.refit import connect
from reshard.refit.reporting.served_parts import digest_parts
from reshard.trainers import FsdpModel, WithDrafter
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu.sleeping_on_cpu import drafter_of, of_both, worker_of
from tests.on_cpu.vllm_on_cpu import build
from tests.starting.ranks import caught
from tests.tools.drafters import Eagle3, load_drafter
from tests.tools.refit_sides import start, trainer


def served(pair: list[str], **options) -> tuple:
    """The model and the drafter of two directories as vLLM has loaded them, and the worker that has both."""
    hf, drafter = pair
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 2}
    module, config = build(hf, speculative_config=speculative | options.pop("draft", {}), **options)
    draft = drafter_of(module, config)
    return worker_of(module, config, draft), module, draft


def trained(pair: list[str], ranks: int) -> tuple[torch.nn.Module, Eagle3]:
    """The model and the drafter of two directories, both sharded over these ranks."""
    hf, drafter = pair
    mesh = init_device_mesh("cpu", (ranks,))
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
    return fully_shard(model, mesh=mesh), fully_shard(load_drafter(drafter, hf), mesh=mesh)


def assign(modules: tuple, values: tuple) -> None:
    """Give sharded modules the parameters and buffers of others."""
    with torch.no_grad():
        for module, other in zip(modules, values, strict=True):
            named = dict([*other.named_parameters(), *other.named_buffers()])
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(named[name])


def refit_each(rank: int, sides: dict, cases: dict[str, tuple[list[list[str]], dict]], options: dict) -> dict:
    """Of each case (two pairs of a model's and a drafter's directories; the engine's options), connected with these
    `options`: how many tensors there are, and the names of those that are not, after a refit from the second pair, one
    from the first and one from the second that is begun and switched to, what vLLM's loader makes of the same pair."""
    is_trainer, is_engine, members = start(rank, sides)
    results: dict = {}
    for name, (pairs, engine) in cases.items():
        source = destination = modules = None
        if is_trainer:
            modules, values = trained(pairs[1], sides["trainer"]), trained(pairs[0], sides["trainer"])
            again = trained(pairs[1], sides["trainer"])
            source = WithDrafter(FsdpModel(modules[0]), modules[1])
        if is_engine:
            worker, module, draft = served(pairs[0], **engine)
            destination = VllmModel.from_worker(worker)
            expected = [of_both(*served(pair, **engine)[1:]) for pair in pairs]
            results[name] = {"tensors": len(expected[0]), "wrong": [], "differ": 0}
            results[name]["differ"] = sum(expected[0][key] != expected[1][key] for key in expected[0])
        link = connect(members, source, destination, **options)
        for version, pair in enumerate((1, 0, 1)):
            if is_trainer and version:
                assign(modules, values if pair == 0 else again)
            if version == 2 and options.get("delta"):
                assert link.begin_refit(version, verify=True).wait().is_pending
                if is_engine:
                    link.switch(version)
            else:
                link.refit(version, verify=True)
            if is_engine:
                held = of_both(module, draft)
                results[name]["wrong"].append(sorted(key for key in held if held[key] != expected[pair][key]))
        if is_engine:
            results[name]["version"] = destination.version
        link.close()
    return results


def from_megatron(
    rank: int, sides: dict, flags: list[str], mcore: str, pairs: list[list[str]], engine: dict
) -> dict:
    """What is not, after a refit from Megatron's model of the second pair and a drafter as a plain module beside it,
    what vLLM's loader makes of that pair; what a verified refit says where one tensor of the drafter has changed its
    place; the drafter's digests, before, after, and of a trainer without a drafter; and what that does to it; and
    what is said, before and after it was brought again, of a drafter that such a trainer would leave in pieces."""
    members = start(rank, sides)[2]
    chunks, _ = trainer(flags, mcore)
    worker, module, draft = served(pairs[0], **engine)
    destination = VllmModel.from_worker(worker)
    expected = of_both(*served(pairs[1], **engine)[1:])
    digests = [digest_parts(destination)["drafter"]]
    source = WithDrafter(MegatronModel(chunks), load_drafter(pairs[1][1], pairs[1][0]))
    link = connect(members, source, destination)
    link.refit(4, verify=True)
    held = of_both(module, draft)
    digests.append(digest_parts(destination)["drafter"])
    results = {"wrong": sorted(key for key in held if held[key] != expected[key])}
    link.close()

    alone = connect(members, MegatronModel(chunks), destination)
    alone.refit(5, verify=True)
    digests.append(digest_parts(destination)["drafter"])
    results["left"] = [entry for entry in alone.describe()["tensors"] if "drafter" in entry["how"]]
    first, second = (draft.get_parameter(f"model.layers.0.{norm}.weight") for norm in NORMS)
    kept = first.data.clone()
    first.data.copy_(second.data), second.data.copy_(kept)
    digests.append(digest_parts(destination)["drafter"])
    results |= {"digests": digests, "version": destination.version}
    alone.close()

    # What a trainer without a drafter says where that is half written, and where it was lost.
    results["half"], results["lost"] = [], []
    for what in ("half", "lost"):
        link = connect(members, source, destination)
        if what == "half":
            destination.begin()
        else:
            link.refit(6)
            worker.sleep(2), worker.wake_up(["weights"])
        link.close()
        again = VllmModel.from_worker(worker)
        results[what] = [caught(partial(connect, members, MegatronModel(chunks), again))]
        link = connect(members, source, again)
        link.refit(7, verify=True)
        link.close()
        results[what].append(caught(partial(connect, members, MegatronModel(chunks), again)))
        held = of_both(module, draft)
        results[what].append(sorted(key for key in held if held[key] != expected[key]))
    return results


NORMS = ("hidden_norm", "input_layernorm")


def _exchange(module: Eagle3) -> None:
    layer = module.midlayer
    layer.hidden_norm, layer.input_layernorm = layer.input_layernorm, layer.hidden_norm


def _narrow(module: Eagle3) -> None:
    module.fc = torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)


def _set_config(module: Eagle3, **changes) -> None:
    module.config = transformers.LlamaConfig(**module.fields | changes)


CHANGES = {
    "": lambda module: None,
    "exchanged": _exchange,
    "skipped": lambda module: module.register_buffer("more_t2d", torch.ones(4)),
    "unknown": lambda module: module.register_buffer("extra", torch.ones(4)),
    "same config": _set_config,
    "config": partial(_set_config, rms_norm_eps=1e-3),
    "narrow": _narrow,
    "no fc": lambda module: delattr(module, "fc"),
}


def said(rank: int, sides: dict, cases: dict[str, tuple]) -> dict:
    """What is said of each case (pair of directories that the engine loads, without the second if it drafts by none;
    the engine's options; the pair of the trainer, without the second if it has no drafter; what is changed of that
    drafter; options of `WithDrafter`), and the names of what is not, after a refit, what vLLM's loader makes of the
    trainer's pair; of a trainer without a drafter, of the engine's drafter."""
    members, results = start(rank, sides)[2], {}
    for name, (loads, engine, trains, change, how) in cases.items():
        if len(loads) == 2:
            worker, module, draft = served(loads, **engine)
        else:
            module, config = build(loads[0], **engine)
            worker, draft = worker_of(module, config), None
        model = transformers.AutoModelForCausalLM.from_pretrained(trains[0], dtype=torch.bfloat16)
        drafter = load_drafter(trains[1], trains[0]) if len(trains) == 2 else None
        if drafter is not None:
            CHANGES[change](drafter)

        def source(model=model, drafter=drafter, how=how):
            return FsdpModel(model) if drafter is None else WithDrafter(FsdpModel(model), drafter, **how)

        links: list = []

        def join(source=source, worker=worker, links=links) -> None:
            links.append(connect(members, source, partial(VllmModel.from_worker, worker)))

        results[name] = caught(join)
        if links:
            links[0].refit(1, verify=True)
            held = of_both(module, draft)
            now = of_both(*served([trains[0], (trains[1:] or loads[1:])[0]])[1:])
            results[name] = sorted(key for key in held if held[key] != now[key])
            links[0].close()
    return results
