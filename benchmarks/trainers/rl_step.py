"""An RL step on one GPU, by its phases: what trainer and engine hold in each, compared with
`reshard.memory`'s estimate of the same.

    torchrun --nproc-per-node 1 -m benchmarks.trainers.rl_step --model qwen3-8b --layers 12 [--sleep 2] [--json FILE]

The trainer (Megatron with Transformer Engine layers, DDP, the distributed optimizer) runs in
torchrun's process, a vLLM with sleep mode and CUDA graphs in another on the same GPU. After a first
sync each step goes as trainers of this field go: generate; let vLLM sleep; bring back the
parameters, and compute log probabilities; bring back gradients and optimizer, and train; move these
away; wake vLLM's weights; refit; move the parameters away; wake its keys and values. What is moved,
`reshard.offload` and `reshard.onload` move.

Of each phase: the device's memory in use at most and at its end (`mem_get_info`, sampled), what torch has
reserved for the trainer, and seconds. Checked: digests of trainer and engine at the first sync, that every
sync changes the engine, and that after each offload the trainer holds what it held after the first. With
``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` in the environment the trainer's memory cannot be mapped
by the engine, and is staged.
"""

import argparse
import atexit
import json
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

import reshard
from benchmarks.models import MODELS
from benchmarks.processes import finish, start_processes
from benchmarks.refits.offload import start_engine

GIB = 1 << 30


class Watch:
    """Phases, by what the device had in use in them."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.most = 0
        self.lock = threading.Lock()
        self.first = self.used()
        threading.Thread(target=self._sample, daemon=True).start()

    def used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _sample(self) -> None:
        torch.cuda.set_device(0)
        while True:
            with self.lock:
                self.most = max(self.most, self.used())
            time.sleep(0.002)

    @contextmanager
    def phase(self, step: int, name: str):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with self.lock:
            self.most = self.used()
        begin = time.perf_counter()
        yield
        torch.cuda.synchronize()
        row = {
            "step": step,
            "phase": name,
            "seconds": time.perf_counter() - begin,
            "most": max(self.most, self.used()),
            "end": self.used(),
            "reserved_most": torch.cuda.max_memory_reserved(),
            "reserved": torch.cuda.memory_reserved(),
            "allocated": torch.cuda.memory_allocated(),
            "pinned": torch.cuda.host_memory_stats()["allocated_bytes.current"],
        }
        self.rows.append(row)
        gib = {
            key: f"{value / GIB:.2f}"
            for key, value in row.items()
            if isinstance(value, int) and key != "step"
        }
        print(f"{step} {name:8} {row['seconds']:7.3f} s {gib}", flush=True)


def kept() -> list[dict]:
    """Of each segment that torch's allocator keeps for the trainer: its bytes, and those of its live
    blocks."""
    found = []
    for segment in torch.cuda.memory_snapshot():
        live = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        found.append({"bytes": segment["total_size"], "live": sorted(live, reverse=True)[:8]})
    return sorted(found, key=lambda segment: -segment["bytes"])[:8]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sleep", type=int, choices=(1, 2), default=2)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--port", type=int, default=29641)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_processes()

    from benchmarks.memory.training import Training, fused
    from reshard.megatron.build import initialize_parallel, without_gpu
    from reshard.memory.phases import EngineSetup
    from reshard.models.model import Model
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    config = MODELS[options.model] | {"num_hidden_layers": options.layers}
    model, layout = Model.from_hf(config, options.model), reshard.MegatronLayout()
    watch = Watch()
    with without_gpu():
        initialize_parallel(layout)
        routing = {"moe_router_force_load_balancing": True} if model.num_experts else {}
        training = Training(model, layout, **fused(model), **routing)
    with watch.phase(0, "built"):
        training.passes(options.seq_length)
        training.optimizer.step()
    chunks, optimizer = training.wrapped, training.optimizer

    moved: list[dict] = []

    def move(step: int, back: bool, **kinds: bool) -> None:
        """Offload or bring back these kinds, and note the rate."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        kinds = {kind: kinds.get(kind, False) for kind in ("params", "grads", "states")}
        size = reshard.onload(chunks, **kinds) if back else reshard.offload(chunks, optimizer, **kinds)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        moved.append({"step": step, "back": back, "bytes": size, "seconds": seconds})
        print(f"  {'back' if back else 'away'} {size / 1e9:.2f} GB {seconds:.3f} s", flush=True)

    with watch.phase(0, "away"):
        move(0, False, params=True, grads=True, states=True)
    left, rest = watch.rows[-1]["reserved"], kept()
    print("kept", rest, flush=True)
    settings = {
        "gpu_memory_utilization": options.gpu_memory_utilization, "enforce_eager": False, "max_model_len": 2048,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }  # fmt: skip
    process, pipe = start_engine(config, "0", settings)
    atexit.register(process.kill)
    print("engine", pipe.recv(), flush=True)

    def ask(method: str, *args, **keywords):
        pipe.send((method, args, keywords))

    def answer():
        result = pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def call(method: str, *args, **keywords):
        ask(method, *args, **keywords)
        return answer()

    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(256)]} for i in range(64)]
    address = f"127.0.0.1:{options.port}"
    with watch.phase(0, "connect"):
        move(0, True, params=True)
        ask("collective_rpc", "reshard_connect", args=(address, 1, 2))
        link = connect(RefitGroup.join(address, 0, 2), MegatronModel(chunks))
        answer()

    def refit(step: int) -> None:
        ask("collective_rpc", "reshard_refit", args=(step, step == 0))
        link.refit(step, step == 0)
        [theirs] = answer()
        print(
            "  refit",
            {key: round(value, 4) if isinstance(value, float) else value for key, value in theirs.items()},
            flush=True,
        )

    with watch.phase(0, "sync"):
        refit(0)
        move(0, False, params=True)
    held = [call("collective_rpc", "fingerprints")]
    for step in range(1, options.steps + 1):
        with watch.phase(step, "generate"):
            call("generate", prompts, use_tqdm=False)
        with watch.phase(step, "sleep"):
            call("sleep", level=options.sleep)
        with watch.phase(step, "logprob"):
            move(step, True, params=True)
            training.logprobs(options.seq_length)
        with watch.phase(step, "train"):
            move(step, True, grads=True, states=True)
            training.passes(options.seq_length)
            training.optimizer.step()
        with watch.phase(step, "moved"):
            move(step, False, grads=True, states=True)
        with watch.phase(step, "sync"):
            call("wake_up", tags=["weights"])
            refit(step)
        with watch.phase(step, "wake"):
            move(step, False, params=True)
            call("wake_up", tags=["kv_cache"])
            call("reset_prefix_cache")
        if torch.cuda.memory_reserved() > left:
            raise SystemExit(f"the trainer keeps {torch.cuda.memory_reserved():,} bytes, {left:,} at first")
        held.append(call("collective_rpc", "fingerprints"))
        if held[-1] == held[-2]:
            raise SystemExit("the engine serves the same weights as before the step")

    total = torch.cuda.mem_get_info()[1]
    estimate = reshard.estimate_memory(
        model, layout, gpus=1, seq_length=options.seq_length, num_microbatches=1, imbalance=1.0,
        gradient_accumulation_fusion=fused(model)["gradient_accumulation_fusion"], gpu_memory=total,
        engine=EngineSetup(reshard.VllmLayout(), options.gpu_memory_utilization, colocated=True),
    )  # fmt: skip
    phases = {}
    for phase in estimate.phases:
        most = max(
            (row["most"] for row in watch.rows if row["phase"] == phase.name and row["step"]), default=0
        )
        low, high = phase.total_band
        phases[phase.name] = {"measured": most, "low": low, "high": high, "parts": phase.parts}
        print(
            f"{phase.name:8} measured {most / GIB:.2f}, estimated {low / GIB:.2f} to {high / GIB:.2f} GiB "
            f"{phase.parts}",
            flush=True,
        )
    if options.json:
        found = {
            "model": options.model,
            "layers": options.layers,
            "sleep": options.sleep,
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "card": torch.cuda.get_device_name(),
            "before": watch.first,
            "kept": rest,
            "rows": watch.rows,
            "moved": moved,
            "phases": phases,
        }
        options.json.write_text(json.dumps(found) + "\n")
    pipe.send(None)
    process.join(30)
    process.kill()
    finish()


if __name__ == "__main__":
    main()
