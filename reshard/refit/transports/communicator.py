"""The communicator of NCCL's and Gloo's exchanges: torch's own, or one that members make among themselves."""

import atexit
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.comm.background import in_background
from reshard.comm.client import LOOK_SECONDS
from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line, listed

_communicators: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of NCCL, made here


def communicator_of(
    group: RefitGroup, ranks: Sequence[int], device: torch.device, fresh: bool
) -> tuple[Any, Any]:
    """Return a communicator of these members, and the store that it needs as long as it is there:
    on GPUs torch's own where they are its ranks, since another takes memory of its own.

    A `fresh` one is not torch's: after an exchange that broke off, some ranks may have begun a collective
    that others never did. Raises ReshardError as soon as a member is gone, or fails, while it is made.
    """
    if group.process_group is not None and device.type == "cuda" and len(ranks) == group.size and not fresh:
        with suppress(RuntimeError):
            return group.process_group._get_backend(device), None
    store = group.torch_store()
    # Torch's own waits end with their time limit only; so they are not this thread's.
    making = in_background(
        lambda: _new_communicator(group, store, ranks.index(group.rank), len(ranks), device)
    )
    deadline = time.monotonic() + group.timeout
    with group.reporting_alive():
        while not wait([making], LOOK_SECONDS).done:
            group.check()
            if time.monotonic() > deadline:
                break
    try:
        if making.done():
            return making.result(), store
        reason = f"not made within {group.timeout:g} s"
    except RuntimeError as error:
        reason = first_line(error)
    unresponsive = listed(group.names[rank] for rank in group.unresponsive_ranks())
    raise ReshardError(
        f"there is no communicator for buckets ({reason}); {unresponsive or 'no member'} is silent"
    )


def _new_communicator(group: RefitGroup, store: Any, index: int, size: int, device: torch.device) -> Any:
    # Under a name of its own: what a broken communicator has left in the store must not be read again.
    named, timeout = (
        dist.PrefixStore(f"buckets/{group.transaction_number}", store),
        timedelta(seconds=group.timeout),
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread, which is new
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _surviving_errors():
            communicator = dist.ProcessGroupNCCL(named, index, size, options)
        _communicators.add(communicator)
        return communicator
    gloo: Any = dist.ProcessGroupGloo
    # Of several networks the one on which the members met; by itself Gloo takes the one that the host's name
    # stands for.
    settings = gloo._Options()
    settings._timeout, settings._devices = timeout, [gloo.create_device(hostname=group.local_address)]
    return gloo(named, index, size, settings)


@contextmanager
def _surviving_errors() -> Iterator[None]:
    """Within it communicators are made that leave the process alone when a partner is lost: by itself torch's
    watchdog ends it, and an engine can be refitted by the next trainer."""
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def abort(communicator: Any, seconds: float) -> bool:
    """End what a communicator of `communicator_of` has under way, such as a kernel that waits for a partner for ever;
    it is not used again. Returns False where that takes longer than so many `seconds`."""
    _communicators.discard(communicator)
    return not wait([in_background(communicator.abort)], seconds).not_done


def drop_communicator(held: list[Any]) -> None:
    """Let go of a communicator and the store that its threads may ask until it is gone, the last references to both.

    Gloo ends with the last reference, and waits then for what it has under way, which a partner that has failed may
    never send: in the background, if it takes longer than `LOOK_SECONDS`.
    """

    def drop() -> None:
        while held:
            del held[0]

    wait([in_background(drop)], LOOK_SECONDS)


@atexit.register
def _shut_down_communicators() -> None:
    """NCCL's threads may ask their store, which is Python's, until they end: not while Python itself ends."""
    for communicator in list(_communicators):
        with suppress(RuntimeError):
            communicator.shutdown()
