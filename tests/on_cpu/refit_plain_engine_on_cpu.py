"""An engine that has no more than `reshard.refit.engine` asks of a new one: a transformers model
that serves itself."""

import torch
from transformers import AutoModelForCausalLM

from reshard.engines.placing.accounts import LEFT_ALONE, Account, account_for
from reshard.engines.placing.rules import place_by_trace
from reshard.engines.tracing.trace import Trace, trace_load
from reshard.models.row_runs import storage_id
from reshard.refit import connect
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from reshard.trainers import FsdpModel
from tests.on_cpu.fsdp_on_cpu import copy_shards, sharded
from tests.starting.ranks import caught
from tests.tools.refit_sides import start


class TransformersEngine(Engine):
    """Holds what its loader puts into a model, by the record of that loader's copies."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.hf_config = model.config.to_dict()
        self.tp = 1
        placed = place_by_trace("transformers", traced(model), shapes(model), dict(model.named_parameters()))
        self.placement, self.regions = placed.placement, placed.regions
        written = {id(region.tensor) for region in self.regions.values()}
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        brought = {name: tensor for name, tensor in tensors.items() if id(tensor) in written}
        rotary = Account(LEFT_ALONE, "a table of rotary angles")
        account_for("transformers", tensors, brought, {n: rotary for n in tensors if "inv_freq" in n})
        self.guard = Guard("transformers", False, "dummy weights")
        model.register_forward_pre_hook(lambda *_: self.guard.check_ready())


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def traced(model: torch.nn.Module) -> Trace:
    """What a loader that goes by names would copy into a model of this config."""
    with torch.device("meta"):
        stand_in = AutoModelForCausalLM.from_config(model.config)
    parameters = dict(stand_in.named_parameters())

    def load(weights) -> None:
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    canonical = {name: (shape, torch.bfloat16) for name, shape in shapes(model).items()}
    names = {storage_id(parameter): name for name, parameter in parameters.items()}
    return trace_load("transformers", load, canonical, names)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


def refit(rank: int, sides: dict, mesh: dict[str, int], checkpoints: list[str]) -> dict:
    """Refit from each checkpoint in turn: what is said of a run before the first refit and during
    the second, whether the logits are then those of a model loaded from the checkpoint, versions,
    and the readiness at the end."""
    is_trainer, is_engine, members = start(rank, sides)
    model = sharded(checkpoints[0], mesh) if is_trainer else None
    served, engine, refused = None, None, ""
    if is_engine:
        served = AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in served.parameters():
                parameter.fill_(float("nan"))
        served.model.norm.register_buffer("bias", torch.zeros(4))
        refused = caught(lambda: TransformersEngine(served))
        del served.model.norm.bias
        engine = TransformersEngine(served)
    link = connect(members, FsdpModel(model) if model is not None else None, engine)
    before = caught(lambda: logits(served)) if served is not None else ""
    outcomes = []
    for version, checkpoint in enumerate(checkpoints):
        if model is not None and version:
            copy_shards(sharded(checkpoint, mesh), model)
        link.refit(version, verify=True)
        if served is not None:
            loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
            outcomes.append((torch.equal(logits(served), logits(loaded)), engine.version))
    if engine is not None:
        engine.begin()
    return {
        "refused": refused,
        "before": before,
        "outcomes": outcomes,
        "half": caught(lambda: logits(served)) if served is not None else "",
    }
