"""A trainer whose weights are in host memory: is it faster to refit from there, or to load the weights first?

    torchrun --nproc-per-node 2 -m benchmarks.refits.from_host --model qwen3-8b [--json FILE]

The trainer (Megatron, Transformer Engine layers, TP over torchrun's processes) and a vLLM of the same TP in
processes of its own share GPUs. The trainer's parameters lie in DDP's buffers, or with ``--wrap flat`` in one that
is laid out alike, where there is no room to build gradients. The trainer is built first, and offloaded
without its gradients (`reshard.offload`) before the engine starts. From the trainer's call to the engine
having all, with the trainer's weights in host memory before and after, medians of:

- from the host: `refit` alone;
- by kernels: the same, where kernels read host memory and not the GPU's copy engines;
- brought back: `onload` of the weights, `refit`, and the weights given away again;

beside the floor: the bytes that a GPU's engine needs over the measured rate of large copies from pinned memory on
all GPUs at once. All must leave the bits of a verified refit from GPU memory, of two sets of weights. Reported
with it: what is taken of a GPU at most in each, by all processes, and the seconds of `onload` alone.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.models import config_of, megatron_models
from benchmarks.processes import conclude, device, everyone, say, start_processes, synchronize
from benchmarks.refits.offload import Trainer, start_engine


def pinned_rate(n: int = 1 << 30) -> float:
    """Bytes a second of a large copy from pinned memory, on all GPUs at once, the slowest."""
    host, here = (
        torch.empty(n, dtype=torch.uint8, pin_memory=device() == "cuda"),
        torch.empty(n, dtype=torch.uint8, device=device()),
    )
    times = []
    for _ in range(5):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        here.copy_(host, non_blocking=True)
        synchronize()
        times.append(max(everyone(time.perf_counter() - start)))
    return n / statistics.median(times)


class Watch(threading.Thread):
    """How many bytes more of this GPU are taken at most, by whomever, until `most` is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gpu = torch.cuda.current_device() if device() == "cuda" else None
        self.ended = threading.Event()
        self.free = self.least = self.look()
        self.start()

    def look(self) -> int:
        return torch.cuda.mem_get_info(self.gpu)[0] if self.gpu is not None else 0

    def run(self) -> None:
        while not self.ended.wait(0.001):
            self.least = min(self.least, self.look())

    def most(self) -> int:
        self.ended.set()
        self.join()
        return self.free - self.least


def half_empty_segments() -> list[tuple[int, list[int]]]:
    """The bytes of each of torch's segments that is large, and kept for what takes less than half of it, with the
    sizes of that."""
    found = []
    for segment in torch.cuda.memory_snapshot() if device() == "cuda" else []:
        held = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        if segment["total_size"] >= 64 << 20 and 2 * sum(held) < segment["total_size"]:
            found.append((segment["total_size"], held[:20]))
    return found


def into_one_buffer(models: list[torch.nn.Module]) -> None:
    """Lay a trainer's parameters out as DDP does, in one buffer, but without one for gradients."""
    for model in models:
        parameters = list(model.parameters())
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + -(-parameter.numel() // 64) * 64)
        buffer = torch.empty(starts[-1], dtype=parameters[0].dtype, device=parameters[0].device)
        for start, parameter in zip(starts, parameters, strict=False):
            part = buffer[start : start + parameter.numel()].view(parameter.shape)
            part.copy_(parameter.data)
            parameter.data = part


@contextmanager
def by_kernels(link) -> Iterator[None]:
    """Let no copy engine read host memory; the tables are made anew before and after."""
    from reshard.refit.copying import copies

    plain = copies.of_copy_engines
    copies.of_copy_engines = lambda tiles: torch.zeros(len(tiles), dtype=torch.bool).numpy()
    link.sender.forget()
    try:
        yield
    finally:
        copies.of_copy_engines = plain
        link.sender.forget()


class Run:
    """The trainer's ranks, one of which tells the engine what to do, and what was seen."""

    def __init__(self, options: argparse.Namespace) -> None:
        from reshard import MegatronLayout

        self.options, self.rank, self.size = options, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        config = config_of(options.model, options.layers)
        moe = "num_experts" in config or "n_routed_experts" in config
        layout = MegatronLayout(tp=self.size, ep=self.size if moe else 1, etp=1 if moe else None)
        if self.rank == 0:
            gpus = ",".join(map(str, range(self.size)))
            settings: dict = {
                "tensor_parallel_size": self.size,
                "gpu_memory_utilization": options.gpu_memory_utilization,
            }
            if device() == "cpu":
                settings |= {"enable_sleep_mode": False, "kv_cache_memory_bytes": 1 << 26}
            self.process, self.pipe = start_engine(config, gpus, settings, at_once=False)
        self.blockers: list[torch.Tensor] = []
        self.began = time.perf_counter()
        start_processes()
        models = megatron_models(config, layout)
        if options.wrap == "flat":
            into_one_buffer(models)
        self.trainer = Trainer(models, options.wrap)
        self.models = self.trainer.models
        self.result: dict = {
            "model": options.model,
            "layers": config["num_hidden_layers"],
            "gpu": torch.cuda.get_device_name() if device() == "cuda" else None,
            "gpus": self.size,
            "routes": {},
            "same": {},
        }

    def note(self, what: str) -> None:
        """Print what is done, and after how many seconds; keep what was seen so far."""
        say(f"{time.perf_counter() - self.began:6.1f} s  {what}")
        if self.rank == 0 and self.options.json:
            self.options.json.write_text(json.dumps(self.result) + "\n", encoding="utf-8")

    def told(self, method: str, *args, meanwhile: Callable[[], object] = lambda: None):
        """What the engine answers, on the first rank, while all ranks do something."""
        if self.rank == 0:
            self.pipe.send(("collective_rpc", (method,), {"args": args}))
        meanwhile()
        answer = self.pipe.recv() if self.rank == 0 else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self) -> None:
        """Give the GPU away but for a context, start the engine, and connect from GPU memory."""
        import reshard

        self.note("the trainer is built")
        reshard.offload(self.models, grads="drop")
        self.note("its weights are in host memory, pinned")
        dist.barrier()
        if self.rank == 0:
            self.pipe.send(True)
            answer = self.pipe.recv()
            if isinstance(answer, Exception):
                raise answer
        dist.barrier()
        self.note("the engine has started")
        reshard.onload(self.models, grads=False, states=False)
        self.trainer.step(0)
        where = f"127.0.0.1:{self.options.port}"
        self.told("reshard_connect", where, self.size, 2 * self.size, meanwhile=lambda: self.connect(where))
        self.note("connected")

    def connect(self, where: str) -> None:
        from reshard.refit import RefitGroup, connect
        from reshard.trainers.megatron import MegatronModel

        group = RefitGroup.join(where, self.rank, 2 * self.size)
        self.link = connect(group, MegatronModel(self.models), bucket_bytes=self.options.bucket_mib << 20)

    def refit(self, verify: bool = False):
        return self.told("reshard_refit", None, verify, meanwhile=lambda: self.link.refit(verify=verify))

    def from_host(self, name: str) -> None:
        self.result["routes"][name] = self.refit()

    def slabs_elsewhere(self, name: str) -> None:
        """Refit from the host, where the slab of the last refit was something else lies now."""
        self.blockers.append(torch.empty(self.options.bucket_mib << 20, dtype=torch.uint8, device=device()))
        self.result["routes"][name] = self.refit()

    def brought_back(self, name: str) -> None:
        import reshard

        reshard.onload(self.models, grads=False, states=False)
        self.result["routes"][name] = self.refit()
        reshard.offload(self.models)

    def step_away(self, seed: int) -> None:
        """A step, between whose end and the next the weights are in host memory."""
        import reshard

        reshard.onload(self.models, grads=False, states=False)
        self.trainer.step(seed)
        reshard.offload(self.models)

    def measure(self, name: str, way: Callable[[str], None], known: dict) -> None:
        """Time a way to refit, and look at what it leaves; the first round, which makes the tables, is left out,
        and in the next the memory is watched."""
        times = []
        for number in range(self.options.rounds + 2):
            dist.barrier()
            watch = Watch() if number == 1 else None
            if watch is not None:
                self.result[f"{name}_gpu_free_before"] = min(everyone(watch.free))
                self.result[f"{name}_segments"] = half_empty_segments()
            start = time.perf_counter()
            way(name)
            synchronize()
            times.append(max(everyone(time.perf_counter() - start)))
            if watch is not None:
                self.result[f"{name}_gpu_bytes"] = max(everyone(watch.most()))
        self.result[f"{name}_seconds"] = statistics.median(times[2:])
        self.result[f"{name}_all_seconds"] = times
        self.result[f"{name}_over_floor"] = self.result[f"{name}_seconds"] / self.result["floor_seconds"]
        held = self.told("fingerprints")
        self.result["same"][name] = self.rank > 0 or held == known[1]
        self.step_away(2)  # so that the next way has something to bring
        self.refit(verify=True)
        held = self.told("fingerprints")
        self.result["same"][f"{name}, another step, verified"] = self.rank > 0 or held == known[2]
        self.step_away(1)
        self.note(f"{name}: {self.result[f'{name}_seconds'] * 1e3:.1f} ms")

    def onload_seconds(self) -> float:
        """Seconds of the weights' way back alone, of the slowest rank."""
        import reshard

        dist.barrier()
        synchronize()
        start = time.perf_counter()
        reshard.onload(self.models, grads=False, states=False)
        synchronize()
        took = time.perf_counter() - start
        if device() == "cuda":
            self.result["loaded_gpu_free"] = min(everyone(torch.cuda.mem_get_info()[0]))
        return max(everyone(took))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--wrap", choices=["ddp", "flat"], default="ddp")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--slabs-elsewhere", action="store_true", help="time refits whose slabs move, too")
    parser.add_argument("--port", type=int, default=29671)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    run = Run(options)
    run.start()
    result, known = run.result, {}
    for seed in (1, 2):
        run.trainer.step(seed)
        run.refit(verify=True)
        known[seed] = run.told("fingerprints")
    result["differ"] = run.rank > 0 or known[1] != known[2]
    run.note("refitted from GPU memory")
    result["engine_bytes"] = sum(p.numel() * p.element_size() for p in run.trainer.parameters())
    result["pinned_bytes_per_second"] = pinned_rate()
    if device() == "cuda":
        torch.cuda.empty_cache()
    result["floor_seconds"] = result["engine_bytes"] / result["pinned_bytes_per_second"]
    run.step_away(1)
    run.measure("from_host", run.from_host, known)
    run.measure("brought_back", run.brought_back, known)
    with by_kernels(run.link):
        run.measure("by_kernels", run.from_host, known)
    if options.slabs_elsewhere:
        run.measure("slabs_elsewhere", run.slabs_elsewhere, known)
    result["onload_seconds"] = run.onload_seconds()
    if run.rank == 0:
        run.pipe.send(None)
        run.process.join(30)
        run.process.kill()
    conclude(result, options.json)


if __name__ == "__main__":
    main()
