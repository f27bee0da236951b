"""Connecting: all members tell each other what they hold, and every inference rank plans what it
needs from whom."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import torch

from reshard.comm.group import RefitGroup
from reshard.comm.hosts import has_rdma
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.core.gc import gc_paused
from reshard.models.config_fields import ignored, ignored_config_fields
from reshard.refit.agreement import agreement_of, check_sides
from reshard.refit.codecs.makers import maker_for
from reshard.refit.engine import Engine, as_before_on_error
from reshard.refit.holder import Holder
from reshard.refit.link import Link
from reshard.refit.lora.connecting import connect_adapter
from reshard.refit.options import ConnectOptions
from reshard.refit.protocol.greeting import DeviceInfo, Greeting, exchange_devices, exchange_greetings
from reshard.refit.receiver import Receiver
from reshard.refit.requesting import exchange_requests
from reshard.refit.routes import NIXL
from reshard.refit.sender import Sender
from reshard.refit.transports.agent import installed_version

SOURCES = "reshard.trainers.MegatronModel(models), or another Trainer"
DESTINATIONS = "reshard.engines.VllmModel.from_llm(llm), or .from_worker(worker)"
DEFAULTS = ConnectOptions()
BF16_SIZE = DTYPES["bfloat16"].size


def connect(
    group: RefitGroup,
    source: "Holder | Callable[[], Holder] | None" = None,
    destination: "Engine | Callable[[], Engine] | None" = None,
    options: ConnectOptions = DEFAULTS,
    **keywords: Any,
) -> Link:
    """Connect a trainer's ranks (`source`) and an inference engine's (`destination`); a process may
    be both, or neither.

    Every member calls this. A side may be a function that makes it, so that all members hear of it
    at once where that fails.

    `keywords` are fields of `ConnectOptions`, and come before those of `options`.

    A field of the engine's config that any member ignores (`reshard.ignored_config_fields`), all do.

    Raises ReshardError on every member, before a byte moves, where the two sides do not hold the
    same model, where the engine's loader disagrees with our rules, or where a member does not come.
    """
    if not isinstance(group, RefitGroup):
        raise ReshardError(
            f"group is a {type(group).__name__}: give reshard.refit.RefitGroup.of_process_group(), "
            f"or what its join returns"
        )
    options = replace(options, **keywords)
    if options.adapter is None:
        return _connect(group, source, destination, options)
    make_source = partial(_resolve_side, source, Holder, "source", SOURCES) if source is not None else None
    return connect_adapter(partial(_connect, group), make_source, destination, options)


def _connect(group: RefitGroup, source: Any, destination: Any, options: ConnectOptions) -> Link:
    """Connect two sides, each given as `connect` takes it."""
    with group.one_call("connect"), ExitStack() as refused:
        return _connected(group, source, destination, options, refused)


def _connected(
    group: RefitGroup, source: Any, destination: Any, options: ConnectOptions, refused: ExitStack
) -> Link:
    """Connect two sides; `refused` gets what is to be done at last if a member cannot."""
    link: Link | None = None
    receiver: Receiver | None = None
    compiling: Thread | None = None
    try:
        with group.transaction("connect"), gc_paused():
            own = _greeting(group.rank, source, destination, options)
            greetings = exchange_greetings(group, own)
            # A trainer's process ignores fields by its own code; an engine's can only hear of them.
            fields = {field for greeting in greetings for field in greeting.ignored}
            with ignored_config_fields(*fields, recorded=True):
                trainer: Holder | None = _resolve_side(source, Holder, "source", SOURCES)
                engine: Engine | None = _resolve_side(destination, Engine, "destination", DESTINATIONS)
                if engine is not None:
                    refused.enter_context(as_before_on_error(engine))
                device = _device(trainer, engine)
                if device.type == "cuda":
                    # The driver's calls need this thread to have the GPU's context, which a new thread lacks.
                    torch.cuda.synchronize(device)
                compiling = _compile_ahead(trainer, engine, device)
                tp = engine.tp if engine is not None else 0
                devices = exchange_devices(group, _device_info(device, greetings, tp))
                check_sides(greetings)
                agreed = agreement_of(group.rank, greetings, devices)
                sender = Sender(trainer, group, agreed, device) if trainer is not None else None
                receiver = Receiver(engine, group, agreed, device) if engine is not None else None
                exchange_requests(group, agreed, sender, receiver)
                link = Link(
                    group, agreed, sender, receiver, device, options.delta_on_host, options.pending_bytes
                )
                link.set_up()
                if compiling is not None:
                    compiling.join()
                group.commit()
    except BaseException:
        if compiling is not None:
            compiling.join()
        with suppress(ReshardError):
            if link is not None:
                link.give_back()
            elif receiver is not None:
                receiver.close()
        raise
    return link


def _greeting(rank: int, source: Any, destination: Any, options: ConnectOptions) -> Greeting:
    """Return what a member tells the others first. Raises ReshardError for an option that cannot be."""
    options = options.checked()
    options = replace(options, keep_mapped=options.keep_mapped or source is None)
    sides = (("trainer", source), ("inference", destination))
    roles = [role for role, side in sides if side is not None]
    return Greeting(
        name=options.name or f"{' and '.join(roles) or 'idle'} rank {rank}",
        roles=roles,
        ignored=sorted(ignored()),
        **options.told(),
    )


def _resolve_side(side: Any, kind: type, name: str, give: str) -> Any:
    """Return a side of the refit, made now where a function was given for it. Raises ReshardError
    where it is something else."""
    if callable(side) and not isinstance(side, kind | torch.nn.Module):
        side = side()
    if side is not None and not isinstance(side, kind):
        raise ReshardError(f"{name} is a {type(side).__name__}: give {give}")
    return side


def _compile_ahead(trainer: Holder | None, engine: Engine | None, device: torch.device) -> Thread | None:
    """Begin to compile the kernels that these sides will need, in a thread; nothing on a CPU."""
    if device.type != "cuda":
        return None
    from reshard.refit.copying.compiling import compile_ahead

    held = [region.tensor.dtype for region in (trainer.memory if trainer is not None else ())]
    served = [region.tensor.dtype for region in (engine.regions.values() if engine is not None else ())]
    itemsize, _ = Counter(dtype.itemsize for dtype in held).most_common(1)[0] if held else (BF16_SIZE, 0)
    first = None
    if engine is not None and engine.scales:
        first = partial(maker_for(engine).compile_pull, itemsize, device)
    # What has elements of one byte is made of blocks, or has rows of whole words.
    sizes = {dtype.itemsize for dtype in {*held, *served}} - {1}
    return compile_ahead(device, sizes, first)


def _device_info(device: torch.device, greetings: Sequence[Greeting], tp: int) -> DeviceInfo:
    """Return what this member tells of its device, and, where a transport between hosts may be needed, of
    its NIXL and RDMA."""
    several_hosts = len({greeting.host for greeting in greetings}) > 1
    if several_hosts or any(greeting.backend == NIXL for greeting in greetings):
        return DeviceInfo.of(device, installed_version(), has_rdma(), tp)
    return DeviceInfo.of(device, tp=tp)


def _device(trainer: Holder | None, engine: Engine | None) -> torch.device:
    """Return where these sides compute; the CPU where there is none."""
    if trainer is not None and trainer.device is not None:
        return trainer.device
    if engine is not None:
        return engine.device
    return torch.device("cpu")
