"""An engine that has no more than `reshard.engines.base` asks of a new one: a transformers model
that serves itself."""

import torch
from transformers import AutoModelForCausalLM

from reshard.core.placement import Placement
from reshard.device.memory import Region
from reshard.engines.base import Engine
from reshard.engines.guard import Guard
from reshard.refit import connect
from reshard.trainers import FsdpModel
from tests.fsdp_on_cpu import copy_shards, sharded
from tests.ranks import caught
from tests.refit_on_cpu import start


class TransformersEngine(Engine):
    """Holds every published tensor whole, as transformers has loaded it."""

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = dict(model.named_parameters())
        self.hf_config = model.config.to_dict()
        self.tp = 1
        self.placement = Placement.canonical({name: tuple(p.shape) for name, p in parameters.items()})
        self.regions = {name: Region(p, 0, p.shape[-1]) for name, p in parameters.items()}
        self.guard = Guard("transformers", False, "dummy weights")
        model.register_forward_pre_hook(lambda *_: self.guard.check_ready())


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


def refit(rank: int, sides: dict, mesh: dict[str, int], checkpoints: list[str]) -> dict:
    """Refit from each checkpoint in turn: what is said of a run before the first refit and during
    the second, whether the logits are then those of a model loaded from the checkpoint, versions,
    and the readiness at the end."""
    is_trainer, is_engine, members = start(rank, sides)
    model = sharded(checkpoints[0], mesh) if is_trainer else None
    served = engine = None
    if is_engine:
        served = AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in served.parameters():
                parameter.fill_(float("nan"))
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
        "before": before,
        "outcomes": outcomes,
        "half": caught(lambda: logits(served)) if served is not None else "",
    }
