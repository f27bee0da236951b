"""Connecting: all members tell each other what they hold, and every inference rank plans what it needs from
whom."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from reshard.comm.group import RefitGroup
from reshard.core.deprecated import accepts_renamed_options
from reshard.core.errors import ReshardError
from reshard.core.gc import gc_paused
from reshard.core.limits import MOST_BUCKET_BYTES, check_number, check_switch
from reshard.engines.base import Engine
from reshard.models.model import Model
from reshard.refit.agreement import agree, hello, ignoring_alike, one_config
from reshard.refit.fp8_blocks.items import BF16
from reshard.refit.link import Link
from reshard.refit.protocol.encoding import pack_json, readable
from reshard.refit.receiver import Receiver
from reshard.refit.routes import check_backend
from reshard.refit.sender import Sender
from reshard.trainers.base import Trainer

BUCKET_BYTES = 512 << 20


@accepts_renamed_options
def connect(members: RefitGroup, source: "Trainer | Callable[[], Trainer] | None" = None,
            destination: "Engine | Callable[[], Engine] | None" = None, *, backend: str = "auto",
            bucket_bytes: int = BUCKET_BYTES, keep_mapped: bool = False) -> Link:  # fmt: skip
    """Connect a trainer's ranks (`source`) and an inference engine's (`destination`); a process may be both,
    or neither.

    Every member calls this. A side may be a function that makes it, so that all members hear of it at once
    where that fails.

    `backend` is ``auto`` (peers' memory within a host, staged where that cannot be mapped, buckets between
    hosts), ``cuda_ipc``, ``staged`` or ``nccl``; one that says another than ``auto`` decides for all.
    `bucket_bytes` bounds the memory of all buckets of a rank together; the least that a member gives counts.
    When a refit returns, engines have unmapped the trainers' memory, so that a trainer may free it; mappings stay where all
    trainers' ranks give `keep_mapped`, for trainers that never do.

    A field of the engine's config that any member ignores (`reshard.ignored_config_fields`), all do.

    Raises ReshardError on every member, before a byte moves, where the two sides do not hold the same model,
    where the engine's loader disagrees with our rules, or where a member does not come.
    """
    link: Link | None = None
    compiling: Thread | None = None
    roles = [name for name, side in (("trainer", source), ("inference", destination)) if side is not None]
    name = f"{' and '.join(roles) or 'idle'} rank {members.rank}"
    try:
        with members.transaction("connect"), gc_paused(), ignoring_alike(members, name):
            backend = check_backend(backend)
            check_switch(keep_mapped, "keep_mapped")
            check_number(bucket_bytes, "bucket_bytes", MOST_BUCKET_BYTES)
            trains: Trainer | None = _made(
                source, Trainer, "source", "reshard.trainers.MegatronModel(models), or another Trainer"
            )
            serves: Engine | None = _made(
                destination,
                Engine,
                "destination",
                "reshard.engines.VllmModel.from_llm(llm), or .from_worker(worker)",
            )
            device = _device(trains, serves)
            if device.type == "cuda":
                from reshard.refit.kernels import compile_ahead

                compiling = compile_ahead(
                    device, _sizes(trains, serves), _roundings(serves), _size_of_most(trains)
                )
            mine = hello(name, roles, device)
            mine |= {
                "backend": backend,
                "bucket_bytes": bucket_bytes,
                "keep_mapped": keep_mapped or trains is None,
            }
            agreed = agree(members, mine)
            trainer = Sender(trains, members, agreed, device) if trains is not None else None
            engine = Receiver(serves, members, agreed, device) if serves is not None else None
            config = b""
            if engine is not None:
                engine.engine.refresh_regions()
                config = pack_json(engine.engine.hf_config)
                members.post("model", config)
            where = f"the config of {members.names[agreed.engines[0]]}"
            with readable(where):
                model = Model.from_hf(one_config(members, agreed.engines, config), where)
            if trainer is not None:
                trainer.publish(model)
            if engine is not None:
                engine.plan(model.where)
            if trainer is not None:
                trainer.receive_requests()
            link = Link(members, agreed, trainer, engine, device)
            link._set_up()
            if compiling is not None:
                compiling.join()
            members.commit()
    except BaseException:
        if compiling is not None:
            compiling.join()
        if link is not None:
            with suppress(ReshardError):
                link.close()
        raise
    return link


def _made(side: Any, kind: type, name: str, give: str) -> Any:
    """A side of the refit, made now where a function was given for it. Raises ReshardError where it is
    something else."""
    if callable(side) and not isinstance(side, kind | torch.nn.Module):
        side = side()
    if side is not None and not isinstance(side, kind):
        raise ReshardError(f"{name} is a {type(side).__name__}: give {give}")
    return side


def _sizes(source: Trainer | None, destination: Engine | None) -> set[int]:
    """Bytes of an element of what is here."""
    regions = [
        *(source.regions if source is not None else ()),
        *(destination.regions.values() if destination is not None else ()),
    ]
    return {dtype.itemsize for dtype in {region.tensor.dtype for region in regions}}


def _roundings(destination: Engine | None) -> set[str]:
    """Of the blocks that are here."""
    return {some.rounding for some in destination.scales.values()} if destination is not None else set()


def _size_of_most(source: Trainer | None) -> int:
    """Bytes of an element of most of the matrices that are here; of bf16 where there are none."""
    sizes = Counter(region.tensor.dtype.itemsize for region in (source.regions if source is not None else ()))
    return sizes.most_common(1)[0][0] if sizes else BF16.size


def _device(source: Trainer | None, destination: Engine | None) -> torch.device:
    if source is not None and source.device is not None:
        return source.device
    if destination is not None:
        return next(iter(destination.regions.values())).tensor.device
    return torch.device("cpu")
