"""Deltas of live models and their drafters, written by all ranks, into vLLM's real classes of both on the same
ranks."""

import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.delta import apply_deltas, roll_back
from reshard.engines.vllm.live import VllmModel
from reshard.live.delta_writer import DeltaWriter
from reshard.trainers import FsdpModel, WithDrafter
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu.refit_drafters_on_cpu import CHANGES, assign, served
from tests.on_cpu.sleeping_on_cpu import of_both, worker_of
from tests.on_cpu.vllm_on_cpu import build
from tests.starting.ranks import caught
from tests.tools.chains import Workers, forge, spoil
from tests.tools.drafters import load_drafter
from tests.tools.refit_sides import trainer


class Trained:
    """A model and a drafter on all ranks, of directories that may change: under FSDP2, or with `flags` Megatron's, and
    a drafter that is whole on the last rank alone. Models have a directory of either format."""

    def __init__(self, models: list, drafters: list[str], flags: list[str] | None) -> None:
        self.models, self.drafters, self.flags = models, drafters, flags
        self.has_drafter = flags is None or dist.get_rank() == dist.get_world_size() - 1
        self.policy, self.drafter = self._policy(0), self._drafter(0)
        if flags is not None:
            chunks, self._load = trainer(flags, models[0][1])
            self.alone = MegatronModel(chunks)
        else:
            self.alone = FsdpModel(self.policy)
        self.both = WithDrafter(self.alone, self.drafter) if self.has_drafter else self.alone

    def _policy(self, number: int) -> torch.nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.models[number][0], dtype=torch.bfloat16
        )
        return self._sharded(model)

    def _drafter(self, number: int) -> torch.nn.Module:
        return self._sharded(load_drafter(self.drafters[number], self.models[0][0]))

    def _sharded(self, module: torch.nn.Module) -> torch.nn.Module:
        return (
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            if self.flags is None
            else module
        )

    def load(self, model: int, drafter: int) -> None:
        """Hold other directories' weights in the same memory."""
        if self.flags is None:
            assign((self.policy,), (self._policy(model),))
        else:
            self._load(self.models[model][1])
        assign((self.drafter,), (self._drafter(drafter),))


def one_after_another(rank: int, act) -> None:
    """Have the first rank act while no other uses a file."""
    dist.barrier()
    if not rank:
        act()
    dist.barrier()


def follow(
    rank: int,
    models: list,
    drafters: list[str],
    flags: list[str] | None,
    engine: dict,
    steps: list[tuple[int, int]],
    folder: str,
) -> dict:
    """Add a version for each of some steps, numbers of a model's and a drafter's directory, to a chain that begins with
    the first of both, and follow it; what is not then as vLLM's loader makes it of the same directories, after the way
    back too. Then what is said of chains that are spoiled, of another engine, and of a chain without a drafter."""
    chain = f"{folder}/chain"
    held = Trained(models, drafters, flags)
    names = [hf for hf, _ in models]
    outcome: dict = {"nameless": caught(lambda: DeltaWriter(held.both, names[0], chain))}
    outcome["wrong base"] = caught(lambda: DeltaWriter(held.both, names[0], chain, drafter_base=drafters[1]))
    outcome["nothing yet"] = not Path(chain).exists()
    writer = DeltaWriter(held.both, names[0], chain, drafter_base=drafters[0])
    outcome["kept"] = writer.kept_bytes

    worker, module, draft = served([names[0], drafters[0]], **engine)
    side = VllmModel.from_worker(worker)
    workers = Workers(side)

    def expected(model: int, drafter: int) -> dict:
        return of_both(*served([names[model], drafters[drafter]], **engine)[1:])

    def wrong(model: int, drafter: int) -> list[str]:
        now, then = of_both(module, draft), expected(model, drafter)
        return sorted(name for name in then if now[name] != then[name])

    outcome["wrong"], outcome["versions"] = [], []
    for number, step in enumerate(steps, 1):
        held.load(*step)
        writer.save(number)
        if number == 1:
            continue  # two at once
        outcome["versions"].append((apply_deltas(workers, chain, verify=True), side.version, side.ready))
        outcome["wrong"].append(wrong(*step))
    outcome["differ"] = len(wrong(0, 0))
    outcome["back"] = roll_back(workers), wrong(*steps[-2]), apply_deltas(workers, chain), wrong(*steps[-1])

    # A trainer that goes on, and ones that have another drafter, or none.
    outcome["goes on"] = caught(lambda: DeltaWriter(held.both, names[0], chain))
    outcome["without"] = caught(lambda: DeltaWriter(held.alone, names[0], chain))
    held.load(0, 0)
    outcome["behind"] = caught(lambda: DeltaWriter(held.both, names[0], chain))

    # One byte of what the drafter's tensors change, on the way to an engine that holds the base.
    said = outcome["said"] = {}
    last = len(steps)
    other = served([names[0], drafters[0]], **engine)
    reader = VllmModel.from_worker(other[0])
    for case, change in (("spoiled", spoil), ("forged", partial(forge, version=last))):
        one_after_another(rank, lambda case=case: shutil.copytree(chain, f"{folder}/{case}"))
        one_after_another(rank, lambda case=case, change=change: change(Path(folder, case)))
        before = of_both(*other[1:])
        said[case] = caught(lambda case=case: apply_deltas(Workers(reader), f"{folder}/{case}", verify=True))
        said[case] = said[case], reader.ready, of_both(*other[1:]) == before

    # vLLM loads the model's weights itself then, which leaves a drafter as it is: forged.
    runner = other[0].model_runner
    runner.reset_mm_cache = runner.reset_encoder_cache = lambda: None  # which the stand-in for a runner lacks
    other[0].reload_weights()
    outcome["reloaded"] = reader.ready, caught(lambda: apply_deltas(Workers(reader), chain))

    # Engines that draft by another drafter, by one of another version, or by none; and a chain without one.
    def refused(name: str, made: tuple) -> tuple:
        reader, before = VllmModel.from_worker(made[0]), of_both(*made[1:])
        text = caught(lambda: apply_deltas(Workers(reader), chain))
        said[name] = text, reader.ready, of_both(*made[1:]) == before
        return made

    refused("another", served([names[0], drafters[3]], **engine))
    plain, config = build(names[0], **engine)
    refused("none", (worker_of(plain, config), plain, None))
    worker, module, draft = refused("mixed", served([names[0], drafters[1]], **engine))

    alone = DeltaWriter(held.alone, names[0], f"{folder}/alone")
    outcome["alone has one"] = caught(lambda: DeltaWriter(held.both, names[0], f"{folder}/alone"))
    held.load(1, 1)
    alone.save(1)
    reader = VllmModel.from_worker(worker)
    outcome["alone"] = (
        apply_deltas(Workers(reader), f"{folder}/alone", verify=True),
        wrong(1, 1),
        reader.ready,
    )
    hows = {account.how for account in reader.accounts.values() if account.what == "left alone"}
    outcome["left"] = sorted(how for how in hows if "drafter" in how)
    outcome["taken up"] = apply_deltas(Workers(reader), chain, verify=True), wrong(*steps[-1])
    return outcome


def changed(rank: int, hf: str, drafter: str, folder: str) -> dict[str, str]:
    """What is said by an engine of chains whose trainers' drafters have been changed in some way."""
    said = {}
    for change in ("", "same config", "config", "skipped", "no fc", "narrow"):
        model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
        own = load_drafter(drafter, hf)
        CHANGES[change](own)
        chain = f"{folder}/{change or 'as it is'}"
        DeltaWriter(WithDrafter(FsdpModel(model), own), hf, chain, drafter_base="a drafter").save()
        reader = VllmModel.from_worker(served([hf, drafter])[0])
        said[change] = caught(lambda chain=chain, reader=reader: apply_deltas(Workers(reader), chain))
    return said
