"""Start, gather from and end the processes of a benchmark under torchrun."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# For vLLM's build for the CPU: do not bind threads, do not compile.
CPU_ENGINE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def device() -> str:
    """Return the device of this process's models."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for all work of this process's GPU, if there is one."""
    if device() == "cuda":
        torch.cuda.synchronize()


def start_processes() -> None:
    """Join torchrun's process group, on this process's GPU if there is one."""
    # vLLM and Megatron read these when they are imported.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if device() == "cpu":
        os.environ |= CPU_ENGINE
    from reshard.parity.systems.processes import join_processes

    join_processes()


def finish() -> None:
    """End this process after all have arrived."""
    dist.barrier()
    if torch.cuda.is_available():
        os._exit(0)  # vLLM's shutdown would wait for processes that are done
    dist.destroy_process_group()


def say(*what) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(*what, flush=True)


def everyone(value: Any) -> list[Any]:
    """Gather a value from every process, by rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def conclude(result: dict, path: Path | None) -> None:
    """Print a result, write it to `path` if given, and end this process."""
    say(json.dumps(result, indent=1))
    if path and dist.get_rank() == 0:
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    finish()
