"""A trainer whose weights are in host memory: refitted from there, or brought back first?

    torchrun --nproc-per-node 2 -m benchmarks.refits.from_host --model qwen3-8b [--json FILE]

The trainer (Megatron, Transformer Engine layers, DDP's buffers, TP over torchrun's processes) and a vLLM of the
same TP in processes of its own share GPUs. Between steps the trainer is offloaded (`reshard.offload`). From
the trainer's call to the engine having all, with the trainer's weights in host memory before and after,
medians of:

- from the host: `refit` alone;
- brought back: `onload` of the weights, `refit`, and the weights given away again;

beside the floor: the bytes that a GPU's engine needs over the measured rate of large copies from pinned memory on
all GPUs at once. Both must leave the bits of a verified refit from GPU memory, of two sets of weights. Reported
with it: what the trainer's process holds of its GPU at most in either.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.models import config_of, megatron_models
from benchmarks.processes import conclude, everyone, start_processes
from benchmarks.refits.offload import Trainer, start_engine


def pinned_rate(n: int = 1 << 30) -> float:
    """Bytes a second of a large copy from pinned memory, on all GPUs at once, the slowest."""
    host, here = (
        torch.empty(n, dtype=torch.uint8, pin_memory=True),
        torch.empty(n, dtype=torch.uint8, device="cuda"),
    )
    times = []
    for _ in range(5):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        here.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(max(everyone(time.perf_counter() - start)))
    return n / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--port", type=int, default=29671)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import reshard
    from reshard import MegatronLayout
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = config_of(options.model, options.layers)
    moe = "num_experts" in config or "n_routed_experts" in config
    if rank == 0:
        gpus = ",".join(map(str, range(size)))
        settings = {"tensor_parallel_size": size, "gpu_memory_utilization": options.gpu_memory_utilization}
        process, pipe = start_engine(config, gpus, settings)
        print("engine", pipe.recv(), flush=True)
    start_processes()
    dist.barrier()

    def told(method: str, *args, meanwhile: Callable[[], object] = lambda: None):
        if rank == 0:
            pipe.send(("collective_rpc", (method,), {"args": args}))
        meanwhile()
        answer = pipe.recv() if rank == 0 else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    layout = MegatronLayout(tp=size, ep=size if moe else 1, etp=1 if moe else None)
    trainer = Trainer(megatron_models(config, layout), "ddp")
    models, link = trainer.models, None

    def join() -> None:
        nonlocal link
        address = f"127.0.0.1:{options.port}"
        link = connect(RefitGroup.join(address, rank, 2 * size), MegatronModel(models))

    trainer.step(0)
    told("reshard_connect", f"127.0.0.1:{options.port}", size, 2 * size, meanwhile=join)

    def refit(verify: bool = False):
        return told("reshard_refit", None, verify, meanwhile=lambda: link.refit(verify=verify))

    known = {}
    for seed in (1, 2):
        trainer.step(seed)
        refit(verify=True)
        known[seed] = told("fingerprints")
    result: dict = {"model": options.model, "layers": config["num_hidden_layers"], "gpu": torch.cuda.get_device_name(), "gpus": size,
                    "differ": rank == 0 and known[1] != known[2], "routes": {}, "same": {}}  # fmt: skip

    def from_host() -> None:
        result["routes"]["from_host"] = refit()

    def brought_back() -> None:
        reshard.onload(models, grads=False, states=False)
        result["routes"]["brought_back"] = refit()
        reshard.offload(models)

    ways = {"from_host": from_host, "brought_back": brought_back}
    trainer.step(1)
    reshard.offload(models)
    for name, way in ways.items():
        times = []
        for _ in range(options.rounds + 1):
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            way()
            torch.cuda.synchronize()
            times.append(max(everyone(time.perf_counter() - start)))
            result[f"{name}_trainer_bytes"] = max(everyone(torch.cuda.max_memory_allocated() - before))
        result[f"{name}_seconds"] = statistics.median(times[1:])
        held = told("fingerprints")
        result["same"][name] = rank == 0 and held == known[1]
        reshard.onload(models)
        trainer.step(2)  # so that the other way has something to bring
        reshard.offload(models)
        refit(verify=True)
        held = told("fingerprints")
        result["same"][f"{name}, another step, verified from the host"] = rank == 0 and held == known[2]
        reshard.onload(models)
        trainer.step(1)
        reshard.offload(models)
    result["engine_bytes"] = sum(p.numel() * p.element_size() for p in trainer.parameters())
    result["pinned_bytes_per_second"] = pinned_rate()
    result["floor_seconds"] = result["engine_bytes"] / result["pinned_bytes_per_second"]
    for name in ways:
        result[f"{name}_over_floor"] = result[f"{name}_seconds"] / result["floor_seconds"]
    if rank == 0:
        pipe.send(None)
        process.join(30)
        process.kill()
    conclude(result, options.json)


if __name__ == "__main__":
    main()
