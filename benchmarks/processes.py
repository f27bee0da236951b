"""The processes that torchrun starts for a benchmark, and what they say of it together."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What vLLM's build for the CPU should know: leave the threads alone, and do not compile.
CPU_ENGINE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def device() -> str:
    """Where this process's models go."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def start_processes() -> None:
    """torchrun's process group, on this process's GPU where there is one."""
    # What vLLM and Megatron look for, before either is imported.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if device() == "cpu":
        os.environ |= CPU_ENGINE
    from reshard.parity.systems import join_processes

    join_processes()


def finish() -> None:
    """End this process, when all have come here."""
    dist.barrier()
    if torch.cuda.is_available():
        os._exit(0)  # vLLM's shut-down would wait for processes that have no more to say
    dist.destroy_process_group()


def say(*what) -> None:
    """Print it, once for all."""
    if dist.get_rank() == 0:
        print(*what, flush=True)


def everyone(value: Any) -> list[Any]:
    """What every process has given, by rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def conclude(result: dict, path: Path | None) -> None:
    """Print a result, write it to `path` where one is given, and end this process."""
    say(json.dumps(result, indent=1))
    if path and dist.get_rank() == 0:
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    finish()
