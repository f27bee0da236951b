"""The processes that run a system together, their device and its memory."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError
from reshard.parity.noise import SHARE_IN_FP32, SHARE_IN_TF32

Name = TypeVar("Name")


def check_processes(system: str, needed: int, replicas: bool = False) -> None:
    """Raise ReshardError unless there are as many processes as `system` needs, or, with `replicas`,
    a multiple of that."""
    processes = dist.get_world_size()
    if processes % needed if replicas else processes != needed:
        raise ReshardError(
            f"{system} needs {needed} processes{' or a multiple of them' * replicas}, and "
            f"there are {processes}: start it with torchrun --nproc-per-node "
            f"{needed} --no-python reshard ..."
        )


def join_processes() -> None:
    """Join the process group that torchrun has prepared, or make one of this process alone, which
    Megatron needs too."""
    if dist.is_initialized():
        return
    backend, launched = "gloo", "RANK" in os.environ
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if launched:
        try:
            dist.init_process_group(backend)
        except ValueError as error:
            variables = ", ".join(
                f"{name}={os.environ.get(name)}"
                for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            )
            raise ReshardError(
                f"the environment does not describe the processes of a run ({variables}): start "
                f"them with torchrun"
            ) from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def joined_processes() -> Iterator[None]:
    """Join the processes for a while: afterwards a process of its own, which has not been started by torchrun, has
    the process group that it had before, or none."""
    is_mine = not dist.is_initialized() and "RANK" not in os.environ
    join_processes()
    try:
        yield
    finally:
        if is_mine and dist.is_initialized():
            dist.destroy_process_group()


def gather_from_ranks(entries: dict[Name, Any]) -> dict[Name, Any]:
    """Return the entries of all ranks, on every rank. Of an entry that several ranks have, the last
    one counts."""
    by_rank: list[dict[Name, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, entries)
    return {name: entry for gathered in by_rank for name, entry in gathered.items()}


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on every rank the ReshardError that one of them raises inside this context, which all enter."""
    own: ReshardError | None = None
    try:
        yield
    except ReshardError as error:
        own = error
    errors: list[ReshardError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    if own is not None:
        raise own
    for other in filter(None, errors):
        raise other


def device() -> torch.device:
    """Return the device of this process's modules and prompts."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def share_in_fp32() -> float:
    """Return the share of their bf16 rounding by which two systems may differ in fp32 on this
    device."""
    return SHARE_IN_TF32 if device().type == "cuda" else SHARE_IN_FP32


def release_memory() -> None:
    """Free cached memory, so that another library can use it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
