"""Refits that send what changed between GPUs, compared with refits that send everything, in one run.

    torchrun --nproc-per-node 1 -m benchmarks.refits.delta_gpus --model qwen3-8b [--layers N] [--engine-gpu 1]
        [--quantization fp8_per_block] [--fractions 0.001 0.01 0.05 0.2] [--json FILE]

A Megatron of one rank (Transformer Engine layers, random weights) on the first GPU that is visible, a vLLM in
processes of its own on `--engine-gpu`. A step flips a bit of the fraction in a share of the trainer's elements.
Medians of the slower side's transfer, in ms:

- pull: all, from the trainer's memory; whole: all, in NCCL's buckets;
- delta: what changed, for each share, 20 refits in a chain; host: with ``delta_on_host``;

then the steps of a delta, each with the GPU waited for: pack, compare, encode, the exchange of sizes and of
changes, and the engine's write; beside the floor, which is both versions read once at the rate at which a copy
reads. After the chain, the last link of which is verified, vLLM must hold the bits that a pull of the same
weights leaves, and did not one step before. On one GPU (``--engine-gpu 0``) no NCCL connects the two: what is said
of that is reported.

    python -m benchmarks.refits.delta_gpus --gigabits 10 25 ...

puts trainer and engine into a network namespace each, as two hosts with a link between them that is limited in both
directions, and times whole refits and deltas over that. Needs root and pyroute2.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from functools import partial, wraps
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.models import config_of, megatron_models
from benchmarks.processes import device, start_processes, synchronize
from benchmarks.refits.offload import Fingerprints, engine, start_engine
from benchmarks.refits.refit import memory_rate, scribble
from tests.tools import hosts

AT_ONCE = 1 << 26  # elements that a step changes at once
CHAIN = 20


def peak_bytes() -> int:
    """Return the most that torch held of this GPU since the last call."""
    if device() == "cpu":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


class Phases:
    """Seconds of the steps of a delta in this process, each with the GPU waited for before and after."""

    def __init__(self) -> None:
        from reshard.refit.changes.buckets import SentBuckets
        from reshard.refit.changes.exchange import ChangesExchange
        from reshard.refit.transports.nccl import Nccl

        self.seconds: dict[str, float] = defaultdict(float)
        self._time(Nccl, "_packed", "pack")
        self._time(SentBuckets, "_compared", "compare")
        self._time(SentBuckets, "changes", "encode")
        self._time(ChangesExchange, "_check_sizes", "sizes")
        self._time(ChangesExchange, "_write", "write")

    def _time(self, owner: Any, name: str, phase: str) -> None:
        plain = getattr(owner, name)

        @wraps(plain)
        def timed(*args: Any, **keywords: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            result = plain(*args, **keywords)
            synchronize()
            self.seconds[phase] += time.perf_counter() - start
            return result

        setattr(owner, name, timed)

    def taken(self) -> dict[str, float]:
        """Return the ms since the last call."""
        taken = {name: 1e3 * seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken


def throttle(host: int, gigabits: float) -> None:
    """Limit what this host sends to so many Gbit/s."""
    from pyroute2 import IPRoute

    with IPRoute() as network:
        [link] = network.link_lookup(ifname=f"host{host}")
        limit = {"rate": f"{gigabits * 1000:.0f}mbit", "burst": 4 << 20, "latency": "100ms"}
        network.tc("replace", "tbf", link, 0x10000, **limit)


def of_host(host: int) -> dict[str, str]:
    """Return the environment of a process on a host: where libraries find its end of the link."""
    interfaces = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), f"host{host}")
    interfaces["RESHARD_SECRET"] = "of the two hosts of this benchmark"
    return os.environ | interfaces | {"VLLM_HOST_IP": hosts.ADDRESSES[host]}


def start_engine_on_host(held: dict, config: dict, gpus: str, settings: dict) -> tuple:
    """Start a vLLM on the second host; return its process, and the pipe to it."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    listener = Listener(str(folder / "pipe"), "AF_UNIX")
    arguments = json.dumps([str(folder / "pipe"), gpus, str(folder), settings])
    command = [sys.executable, "-m", "benchmarks.refits.delta_gpus", "--serve", arguments]
    process = subprocess.Popen(command, env=of_host(1), preexec_fn=partial(hosts.enter, held, 1))
    pipe = listener.accept()
    pipe.send(True)
    return process, pipe


def on_two_hosts() -> int:
    """Run this program again on the first of two hosts; return its code."""
    program = [sys.executable, "-m", "tests.tools.hosts"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout
        held = json.loads(holder.stdout.readline())
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29655",
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.refits.delta_gpus",
            *sys.argv[1:],
            "--hosts",
            json.dumps(held),
        ]
        trainer = subprocess.Popen(command, env=of_host(0) | alone, preexec_fn=partial(hosts.enter, held, 0))
        code = trainer.wait()
        holder.stdin.close()
    return code


class PhasesOfWorker(Fingerprints):
    """Mixed into vLLM's workers: the same there."""

    _phases: Phases | None = None

    def scribbled(self) -> None:
        """Fill what a refit writes with another value."""
        scribble(self._reshard_engine, 3.0)

    def throttled(self, gigabits: float) -> None:
        throttle(1, gigabits)

    def phases(self) -> dict[str, float]:
        if self._phases is None:
            self._phases = Phases()
        return self._phases.taken()


def __getattr__(name: str):
    # vLLM is imported only where an engine asks for its extension.
    if name == "Extension":
        from reshard.engines.vllm.worker import RefitExtension

        return type("Extension", (RefitExtension, PhasesOfWorker), {})
    raise AttributeError(name)


class Run:
    """The trainer, the engine in its process, and one connection at a time between them."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enable_sleep_mode": False,
            "worker_extension_cls": "benchmarks.refits.delta_gpus.Extension",
            **json.loads(options.vllm),
        }
        settings |= {"quantization": options.quantization} if options.quantization else {}
        self.config, self.port = config_of(options.model, options.layers), options.port
        self.bucket_bytes = options.bucket_bytes
        self.host = "127.0.0.1"
        if options.hosts:
            held, self.host = json.loads(options.hosts), hosts.ADDRESSES[0]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
            self.process, self.pipe = start_engine_on_host(
                held, self.config, visible[options.engine_gpu], settings
            )
        else:
            self.process, self.pipe = start_engine(self.config, str(options.engine_gpu), settings)
        start_processes()
        from reshard import MegatronLayout
        from reshard.trainers.megatron import MegatronModel

        start = time.perf_counter()
        is_moe = "num_experts" in self.config
        layout = MegatronLayout(tp=1, ep=1, etp=1 if is_moe else None)
        self.models = megatron_models(self.config, layout)
        self.trainer, self.link = MegatronModel(self.models), cast(Any, None)
        self.random = torch.Generator(device()).manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.02, generator=self.random)
        print(f"Megatron {time.perf_counter() - start:.0f} s", flush=True)
        print("vLLM", self.answer(), f"{time.perf_counter() - start:.0f} s", flush=True)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for model in self.models for parameter in model.parameters()]

    def step(self, share: float) -> None:
        """Flip a bit of the fraction in about this share of the elements."""
        for parameter in self.parameters():
            for bits in parameter.data.view(-1).view(torch.int16).split(AT_ONCE):
                chosen = torch.rand(len(bits), device=bits.device, generator=self.random) < share
                bits ^= chosen.to(torch.int16) << 3

    def tell(self, method: str, *args: Any) -> None:
        self.pipe.send(("collective_rpc", (method,), {"args": args}))

    def answer(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer[0] if isinstance(answer, list) else answer

    def asked(self, method: str) -> Any:
        self.tell(method)
        return self.answer()

    def connect(self, **options: Any) -> float:
        """Connect anew, and return the seconds."""
        from reshard.refit import RefitGroup, connect

        if self.link is not None:
            self.tell("reshard_close")
            self.link.close()
            self.answer()
            self.link = None
            gc.collect()
            torch.cuda.empty_cache()
        self.port += 1
        start, address = time.perf_counter(), f"{self.host}:{self.port}"
        self.pipe.send(
            (
                "collective_rpc",
                ("reshard_connect",),
                {"args": (address, 1, 2), "kwargs": {"bucket_bytes": self.bucket_bytes}},
            )
        )
        try:
            group = RefitGroup.join(address, 0, 2, timeout=60)
            self.link = connect(group, self.trainer, bucket_bytes=self.bucket_bytes, **options)
        finally:
            self.answer()
        return time.perf_counter() - start

    def refit(self, verify: bool = False) -> dict[str, Any]:
        """Refit; return the trainer's report with the slower side's times in ms."""
        self.tell("reshard_refit", None, verify)
        try:
            report = self.link.refit(verify=verify).to_dict()
        finally:
            served = self.answer()
        for key in ("transfer_seconds", "total_seconds"):
            report[key.replace("_seconds", "_ms")] = 1e3 * max(report[key], served[key])
        return report

    def end(self) -> None:
        self.pipe.send(None)
        (self.process.wait if isinstance(self.process, subprocess.Popen) else self.process.join)(20)
        self.process.kill()


def median(reports: list[dict[str, Any]], key: str = "transfer_ms") -> float:
    return statistics.median(report[key] for report in reports)


def sent_whole(run: Run, rounds: int, **options: Any) -> dict[str, Any]:
    """Connect, and time refits that send all."""
    seconds = run.connect(**options)
    reports = [run.refit() for _ in range(rounds + 2)]
    received = {name: size for name, size in reports[-1].items() if name.startswith("received_bytes_")}
    routes = received | {"of": run.link.describe()["backend"]}
    return {
        "connect_seconds": seconds,
        "transfer_ms": median(reports[2:]),
        "total_ms": median(reports[2:], "total_ms"),
        "routes": routes,
    }


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a table shows of refits that should be deltas."""
    last = reports[-1]
    return {
        "deltas": sum(report["is_delta"] for report in reports),
        "of": len(reports),
        "changed": last["delta_changed"],
        "delta_mb": last["delta_bytes"] / 1e6,
        "whole_mb": last["delta_whole_bytes"] / 1e6,
        "kept_gb": last["delta_kept_bytes"] / 1e9,
        "transfer_ms": median(reports),
        "total_ms": median(reports, "total_ms"),
        "reason": last["delta_reason"],
    }


def chained(run: Run, shares: list[float], count: int, **options: Any) -> dict[str, Any]:
    """Connect with deltas, and refit so often after steps of these shares, in turn; the last is verified, and
    compared with what a pull of the same weights leaves."""
    result: dict[str, Any] = {"connect_seconds": run.connect(delta=True, **options)}
    peak_bytes()
    before = peak_bytes()
    first = run.refit()
    result["first_transfer_ms"], earlier = first["transfer_ms"], None
    per_share = max(1, count // len(shares))
    for share in shares:
        reports = []
        for index in range(per_share):
            is_last = share == shares[-1] and index == per_share - 1
            earlier = run.asked("fingerprints") if is_last else earlier
            run.step(share)
            reports.append(run.refit(verify=is_last))
        result[str(share)] = summary(reports)
        print(share, json.dumps(result[str(share)]), flush=True)
    result["trainer_extra_gb"] = (peak_bytes() - before) / 1e9
    bits = run.asked("fingerprints")
    result["step_is_seen"] = bits != earlier
    run.connect(backend="auto")
    run.asked("scribbled")
    run.refit()
    pulled = run.asked("fingerprints")
    result["tensors"], result["different"] = len(pulled), sum(bits[name] != pulled[name] for name in pulled)
    return result


def phases(run: Run, shares: list[float]) -> dict[str, Any]:
    """Return the ms of each step of a delta, by share, on the trainer and the engine."""
    run.connect(backend="nccl", delta=True)
    own, result = Phases(), {}
    run.asked("phases")
    for share in shares:
        run.refit()
        run.step(share)
        run.refit()
        own.taken(), run.asked("phases")
        run.step(share)
        report = run.refit()
        served = run.asked("phases")
        result[str(share)] = own.taken() | {
            "write": served.get("write", 0.0),
            "in_all": report["transfer_ms"],
        }
        print("steps", share, json.dumps(result[str(share)]), flush=True)
    return result


def with_buckets(run: Run, size: int, shares: list[float]) -> dict[str, Any]:
    """Return what deltas take with buckets of so many bytes in all."""
    usual, run.bucket_bytes = run.bucket_bytes, size
    try:
        return chained(run, shares, CHAIN, backend="nccl")
    finally:
        run.bucket_bytes = usual


def over_link(run: Run, shares: list[float], gigabits: float) -> dict[str, Any]:
    """Return what refits take over a link of so many Gbit/s that send all, and what changed."""
    throttle(0, gigabits)
    run.tell("throttled", gigabits)
    run.answer()
    run.connect(backend="nccl")
    whole = [run.refit() for _ in range(2)][-1]
    result: dict[str, Any] = {"whole_ms": whole["transfer_ms"]}
    run.connect(backend="nccl", delta=True)
    run.refit()
    for share in shares:
        reports = []
        for index in range(3):
            run.step(share)
            reports.append(run.refit(verify=share == shares[-1] and index == 2))
        result[str(share)] = summary(reports)
    size = reports[-1]["delta_whole_bytes"]
    result |= {"whole_mb": size / 1e6, "floor_ms": 1e3 * size * 8 / (gigabits * 1e9)}
    return result


def cases(options: argparse.Namespace, run: Run):
    """Yield the name of each case, and what runs it, the most important first."""
    rounds = options.rounds
    for gigabits in options.gigabits:
        yield f"{gigabits:g} Gbit/s", partial(over_link, run, options.fractions, gigabits)
    if options.gigabits:
        return
    yield "pull", lambda: sent_whole(run, rounds, backend="auto")
    if options.engine_gpu:
        yield "whole", lambda: sent_whole(run, rounds, backend="nccl")
        yield "delta", lambda: chained(run, options.fractions, CHAIN, backend="nccl")
        for size in options.more_bucket_bytes:
            yield f"delta, {size >> 20} MiB of buckets", partial(with_buckets, run, size, options.fractions)
        if not options.without_host:
            yield "host", lambda: chained(run, [0.01], 3, backend="nccl", delta_on_host=True)
    if options.engine_gpu:
        yield "steps", lambda: phases(run, options.fractions)
    else:
        yield "delta_near", lambda: chained(run, [0.01], 3)
        yield "nccl_near", lambda: run.connect(backend="nccl", delta=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--engine-gpu", type=int, default=1, help="its place among the visible ones")
    parser.add_argument("--quantization", help="what vLLM serves in: fp8_per_block")
    parser.add_argument("--vllm", default="{}", help="other settings of vLLM, as JSON")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.2])
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--without-host", action="store_true")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--more-bucket-bytes", type=int, nargs="+", default=[], help="deltas with these, too")
    parser.add_argument("--gigabits", type=float, nargs="+", default=[], help="of a link between two hosts")
    parser.add_argument("--hosts", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29700)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve:
        place, *arguments = json.loads(options.serve)
        engine(Client(place, "AF_UNIX"), *arguments)
        return
    if options.gigabits and not options.hosts:
        sys.exit(on_two_hosts())
    run = Run(options)
    size = sum(parameter.numel() * parameter.element_size() for parameter in run.parameters())
    result: dict[str, Any] = {
        "model": options.model,
        "layers": run.config["num_hidden_layers"],
        "quantization": options.quantization,
        "gpu": torch.cuda.get_device_name() if device() == "cuda" else "none",
        "engine_gpu": options.engine_gpu,
        "weight_bytes": size,
    }
    rate = memory_rate() if device() == "cuda" else 1e9
    result |= {"memory_bytes_per_second": rate, "floor_ms": 1e3 * 2 * size / rate}
    for name, case in cases(options, run):
        start = time.perf_counter()
        try:
            result[name] = case()
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        took = time.perf_counter() - start
        print(f"{name} ({took:.1f} s)", json.dumps(result[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    run.end()
    os._exit(0)  # Megatron's and NCCL's threads have nothing more to do


if __name__ == "__main__":
    main()
