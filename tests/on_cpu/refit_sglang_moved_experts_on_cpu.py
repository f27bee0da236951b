"""SGLang's own balancing of experts (EPLB) on the CPU: its real model classes with redundant experts, its own algorithm
and its own mover, over several processes."""

import contextlib
import copy
import json
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.eplb import expert_location, expert_location_updater

from reshard.engines.sglang.live import SglangModel
from reshard.engines.sglang.weights import moved_experts
from reshard.refit import connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import sglang_on_cpu
from tests.on_cpu.refit_sglang_on_cpu import Arguments, built, held
from tests.starting.ranks import caught
from tests.tools.refit_sides import start, trainer

# What no module of a CPU has.
torch.cpu.empty_cache = lambda: None


def located() -> expert_location.ExpertLocationMetadata:
    return expert_location.get_global_expert_location_metadata()


def balance(model: torch.nn.Module, arguments, updater, seed: int) -> None:
    """Have SGLang move experts for skewed loads."""
    shape = located().num_layers, located().num_logical_experts
    loads = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** 8 * 1000).int()
    place = expert_location.ExpertLocationMetadata.init_by_eplb
    places = place(*sglang_on_cpu._wanted(place, arguments), ModelConfig.from_server_args(arguments), loads)
    layers = model.routed_experts_weights_of_layer
    # As `EPLBManager` calls it.
    updater.update(
        layers, places, update_layer_ids=sorted(layers.keys()), nnodes=1, rank=torch.distributed.get_rank()
    )


def as_loaded(directory: str, places: expert_location.ExpertLocationMetadata, **engine) -> dict[str, tuple]:
    """What SGLang's own loader makes of a checkpoint while experts have these places."""
    model, _ = built(directory, **{"load_format": "dummy"} | engine)
    expert_location.set_global_expert_location_metadata(places, allow_overwrite=True)
    with torch.no_grad():
        model.load_weights(load_file(Path(directory, "model.safetensors")).items())
    return held(model)


def refits(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """Refits of an engine that moves experts in between. Of engine ranks, for each refit, whether SGLang had moved
    experts since the one before, and the names of what it then serves otherwise than its own loader leaves it; the last
    goes by the places of before. And what is said where others are to read from it."""
    is_trainer, is_engine, members = start(rank, sides)
    source = load = destination = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1])
        source = MegatronModel(chunks)
    if is_engine:
        model, given = built(checkpoints[0][0], **{"load_format": "dummy"} | engine)
        arguments = Arguments(given)
        arguments.enable_eplb = True
        updater = expert_location_updater.ExpertLocationUpdater()
        destination = SglangModel(model, arguments)
    link = connect(members, source, destination, **options)
    found = []
    # Which checkpoint comes, the seed of the loads by which SGLang moves experts before it, and whether to follow.
    for which, seed, follows in [(0, None, True), (1, 1, True), (1, 2, True), (0, None, True), (1, 3, False)]:
        if load is not None:
            load(checkpoints[which][1])
        follow = contextlib.nullcontext()
        moved = False
        if is_engine:
            before = held(model)
            places = destination.experts.held()
            if seed is not None:
                balance(model, given, updater, seed)
            moved = held(model) != before
            if not follows:
                follow = patch.object(moved_experts.SglangExperts, "held", lambda self, places=places: places)
        with follow:
            link.refit(verify=True)
        if is_engine:
            found.append((moved, held(model), copy.deepcopy(located()), checkpoints[which][0]))
    said = caught(destination.check_as_published) if is_engine else ""
    results = []
    for moved, now, places, directory in found:
        expected = as_loaded(directory, places, **engine)
        results.append((moved, sorted(name for name in expected if now[name] != expected[name])))
    return results, said


# Of eight experts, in each of four layers: copies of some, in another order. Of two copies on one rank SGLang's loader
# leaves the second one out.
ANYWHERE = json.dumps({"physical_to_logical_map": [[6, 1, 0, 5, 7, 2, 3, 4, 5, 0], [*range(8), 3, 1]] * 2})


def anywhere(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict):
    """A refit of an engine whose experts stay where a user has put them (``--init-expert-location``). Of engine ranks,
    the names of what it then serves otherwise than its own loader leaves it, the experts in all places, and what is
    said where others are to read from it."""
    is_trainer, is_engine, members = start(rank, sides)
    source = destination = None
    if is_trainer:
        source = MegatronModel(trainer(flags, checkpoints[0][1])[0])
    engine = engine | {"init_expert_location": ANYWHERE}
    if is_engine:
        destination = SglangModel(*built(checkpoints[0][0], **engine | {"load_format": "dummy"}))
    connect(members, source, destination).refit(verify=True)
    if not is_engine:
        return [], ""
    now, places = held(destination.module), destination.experts.held()
    expected = held(built(checkpoints[0][0], **engine)[0])
    wrong = sorted(name for name in expected if now[name] != expected[name])
    return wrong, [*places.values()], caught(destination.check_as_published)
