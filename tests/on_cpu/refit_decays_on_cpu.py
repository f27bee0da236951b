"""Digests on the CPU of what vLLM makes of a tensor while it loads it: the decays of Mamba layers."""

from types import SimpleNamespace
from typing import Any

import torch

from reshard.engines import VllmModel
from reshard.engines.workers.deltas import EngineDeltas
from reshard.refit import connect
from reshard.refit.reporting.served_parts import served_parts
from reshard.trainers import FsdpModel
from tests.on_cpu.refit_every_class_on_cpu import sharded
from tests.on_cpu.refit_without_table_on_cpu import into_vllm
from tests.starting.ranks import caught
from tests.tools.refit_sides import start


def digests(rank: int, sides: dict, checkpoint: str) -> dict[str, Any]:
    """What is said of the digest of an engine that has loaded a checkpoint itself, of one to which a refit has brought
    it, and of that once something else has written a decay, and of deltas then."""
    members = start(rank, sides)[2]
    source = FsdpModel(sharded(checkpoint))
    module, config = into_vllm(checkpoint, tp=2)
    engine = VllmModel(module, config)
    decays = [parameter for name, parameter in module.named_parameters() if name.endswith(".A")]

    def read() -> list[str]:
        deltas = EngineDeltas(engine)
        deltas.chain = SimpleNamespace(base=SimpleNamespace(tensors={}), where="the chain")  # type: ignore[assignment]
        return [caught(lambda: served_parts(engine)), caught(deltas.digests)]

    said = {"loaded": read()}
    link = connect(members, source, engine)
    link.refit()
    said["refitted"] = read()
    with torch.no_grad():
        decays[-1].mul_(2)
    said["written by others"] = read()
    return said | {"decays": len(decays)}
