"""Engines that hand on their weights as they serve them, of real model classes on the CPU: one that a trainer has
refitted, and others that get its weights from it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from reshard.engines.live import LiveEngine
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests.starting.ranks import caught, free_port
from tests.tools.lender import Lender
from tests.tools.reachable import reachable
from tests.tools.refit_sides import fingerprint, start, trainer

VERSION = 3


class RankOfLender(Lender):
    """A worker among those of an engine whose ranks are this process's group."""

    def _reshard_rank(self) -> int:
        return dist.get_rank()


def on_all(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def handed_on(
    worker: Lender, newcomer: LiveEngine, version: int = VERSION, adapter: str | None = None
) -> str:
    """What comes of having a newcomer get a version from an engine, of the weights or of an adapter, by a process
    without weights, as all ranks tell it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    [port, *_] = on_all(free_port())
    address, size = f"127.0.0.1:{port}", 1 + 2 * ranks
    refused = caught(lambda: worker.reshard_lend(address, 1, size, version, timeout=60.0, adapter=adapter))
    [refused, *_] = on_all(refused)
    if refused != "no error":
        return refused

    def member(number: int, engine: LiveEngine | None) -> None:
        group = RefitGroup.join(address, number, size, timeout=60)
        try:
            link = connect(group, None, engine, adapter=adapter)
            try:
                link.refit(version, verify=True)
            finally:
                link.close()
        finally:
            group.close()

    sides = [(1 + ranks + rank, newcomer)] + ([(0, None)] if rank == 0 else [])
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda side: caught(partial(member, *side)), sides))
    worker._reshard_lending._thread.join()
    return on_all(said[0])[0]


def brought_up(
    rank: int,
    sides: dict,
    flags: list[str],
    checkpoints: list[tuple[str, str]],
    make: Callable[..., LiveEngine],
    loads: list[str],
    others: dict[str, dict],
    package: str,
) -> dict:
    """What an engine holds that was refitted from the first of two Megatron checkpoints; what a newcomer holds before
    and after it has got that from the engine; what both hold after a refit of each from the second checkpoint; what is
    said of `others`, newcomers with other options by a name, or another ``directory``; what of a version that nobody
    serves; and what of a bit that does not arrive.

    The newcomer has loaded the first of the directories of `loads` before, and the engine the second; where there is
    none, they start with dummy weights. `make` makes an engine of a directory, with options, of the model classes of a
    `package`.
    """
    _, _, members = start(rank, sides)
    chunks, load = trainer(flags, checkpoints[0][1])
    source = MegatronModel(chunks)
    (first, _), (_, mcore) = checkpoints
    dummy = {"load_format": "dummy"}

    def started(place: int) -> LiveEngine:
        return make(loads[place]) if loads[place:] else make(first, **dummy)

    lender = started(1)
    link = connect(members, source, lender)
    worker = RankOfLender(lender)
    early = handed_on(worker, lender)
    link.refit(VERSION, verify=True)
    newcomer = started(0)
    held = partial(reachable, package=package)
    results: dict = {"lent": held(lender.module), "before": held(newcomer.module), "early": early}
    addresses = [tensor.data_ptr() for tensor in newcomer.tensors.values()]
    results["said"] = handed_on(worker, newcomer)
    results["got"], results["version"] = held(newcomer.module), newcomer.version
    results["serves"] = newcomer.ready, lender.ready
    results["still lent"] = held(lender.module)
    results["others"] = {
        name: handed_on(worker, make(how.pop("directory", first), **dummy | how))
        for name, how in others.items()
    }
    results["other version"] = handed_on(worker, newcomer, VERSION + 1)
    results["spoiled"] = spoiled(worker, newcomer)
    load(mcore)
    results["refitted"] = []
    for destination in (lender, newcomer):
        link = connect(members, source, destination)
        link.refit(VERSION + 2, verify=True)
        results["refitted"].append(fingerprint(destination.module))
    results["moved"] = addresses != [tensor.data_ptr() for tensor in newcomer.tensors.values()]
    return results


def spoiled(worker: Lender, newcomer: LiveEngine) -> tuple[str, bool]:
    """What is said where a bit of a newcomer's is another one once all have come, and whether it serves."""
    [name, *_] = newcomer.not_as_published()
    parameter = next(newcomer.module.get_submodule(name.rpartition(".")[0]).parameters())
    restore = newcomer.restore_left_alone

    def spoil() -> None:
        restore()
        parameter.data.as_strided((1,), (1,)).view(torch.uint8)[0] ^= 1

    newcomer.restore_left_alone = spoil
    said = handed_on(worker, newcomer)
    newcomer.restore_left_alone = restore
    return said, newcomer.ready
