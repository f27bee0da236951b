"""Refits of several engines from one trainer, each on a host of its own, over throttled links.

    python -m benchmarks.refits.relays [--engines 1 2 4] [--gigabits 1] [--refits 4] [--device cuda] [--backend nixl]
        [--json FILE]

Processes in network namespaces, as hosts, each with a link to a switch that ``tc`` limits in both directions. One
trains SmolLM2-135M, and sends its weights in bf16 by Gloo to engines that serve the same, which pass them on to each
other (``relays="auto"``) or do not (``never``); with ``--backend nixl`` they read them, from the trainer and from each
other. Needs root, or a kernel that lets users make namespaces, and ``tc``.

With ``--device cuda`` by NCCL, from and to a random model of Qwen3-0.6B's shapes, whose changes are random, too.
Members share the GPUs that there are, so that they take turns, and times mean little: the bits do.

With ``--one-host`` there are no namespaces and no limits: each member has a GPU of its own, the model has Qwen3-8B's
shapes, and engines read the trainer's memory, too (``cuda_ipc``).

Reported for each number of engines: the transfer of a refit, median over all but the first, with relays and without,
and both as a ratio to the floor, the bytes of one engine at the links' rate; and the same of what changed in a step of
Adam (``delta=True``). The engines' bits are compared with the trainer's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.refits.delta import LENGTH, bits_of, tokens
from reshard.refit import RefitGroup, connect
from tests.tools import hosts
from tests.tools.whole_model import ServedModel, TrainedModel, Training

PORT = 29643
SECRET = "between the hosts"


def main() -> None:
    """Start the hosts and their processes for each number of engines, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gigabits", type=float, default=1.0, help="of each link; 0 for no limit")
    parser.add_argument("--refits", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("nccl", "nixl"), default="nccl", help="between hosts")
    parser.add_argument("--one-host", action="store_true", help="on GPUs of this host")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_host:
        options.device, options.gigabits = "cuda", 0.0
    if options.rank is not None:
        result = measure(options, options.engines[0])
        if options.rank == 0:
            (options.folder / "result.json").write_text(json.dumps(result))
        return
    run = on_one_host if options.one_host else on_hosts
    results = [run(options, engines) for engines in options.engines]
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")


def on_hosts(options: argparse.Namespace, engines: int) -> dict:
    """Return what so many engines' refits took."""
    if options.device == "cpu":
        from tests.tools.trained import make

    program = [sys.executable, "-m", "tests.tools.hosts", str(1 + engines)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder,
    ):
        assert holder.stdin and holder.stdout
        held = json.loads(holder.stdout.readline())
        for host, process in enumerate(held["hosts"] if options.gigabits else []):
            throttle(process, held["user"], f"host{host}", options.gigabits)
            throttle(holder.pid, held["user"], f"port{host}", options.gigabits)
        if options.device == "cpu":
            make(Path(folder) / "hf")
        command = [sys.executable, "-m", "benchmarks.refits.relays", "--folder", folder]
        command += [
            "--device",
            options.device,
            "--engines",
            str(engines),
            "--gigabits",
            str(options.gigabits),
            "--refits",
            str(options.refits),
            "--backend",
            options.backend,
        ]
        # A process moves to its host while it has one thread.
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], preexec_fn=partial(hosts.enter, held, rank))
            for rank in range(1 + engines)
        ]
        codes = [process.wait() for process in processes]
        holder.stdin.close()
        if any(codes):
            sys.exit(1)
        return json.loads((Path(folder) / "result.json").read_text())


def on_one_host(options: argparse.Namespace, engines: int) -> dict:
    """Return what so many engines' refits took, on GPUs of this host."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.refits.relays", "--folder", folder, "--one-host"]
        command += ["--engines", str(engines), "--refits", str(options.refits)]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1 + engines)]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(1)
        return json.loads((Path(folder) / "result.json").read_text())


def throttle(process: int, user: bool, interface: str, gigabits: float) -> None:
    """Limit what leaves by an interface in the namespaces of a process to so many Gbit/s."""
    inside = [
        "nsenter",
        f"--target={process}",
        "--net",
        *(["--user", "--preserve-credentials"] if user else []),
    ]
    limit = f"tc qdisc replace dev {interface} root tbf rate {gigabits}gbit burst 4mb latency 100ms"
    subprocess.run([*inside, *limit.split()], check=True)


def measure(options: argparse.Namespace, engines: int) -> dict:
    """Run this process's side; return what was measured on the trainer's."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(options.rank % torch.cuda.device_count())
    size = 1 + engines
    address = "127.0.0.1" if options.one_host else hosts.ADDRESSES[0]
    group = RefitGroup.join(f"{address}:{PORT}", options.rank, size, timeout=300, secret=SECRET)
    result: dict = {"engines": engines, "gigabits": options.gigabits}
    ways = [(options.backend, "auto"), (options.backend, "never")]
    if options.one_host:
        ways += [("staged", "auto"), ("staged", "never"), ("auto", "auto"), ("cuda_ipc", "never")]
    for backend, relays in ways:
        for delta in (False, True) if backend == "nccl" else (False,):
            model, training = model_of(options, delta)
            if options.rank or not delta:
                training = None
            sides = (None, ServedModel(model)) if options.rank else (TrainedModel(model), None)
            link = connect(
                group, *sides, backend=backend, relays=relays, delta=delta, keep_mapped=options.one_host
            )
            reports = []
            for _ in range(options.refits):
                if training is not None:
                    training.step()
                reports.append(link.refit())
            link.close()
            seconds = latest(group, statistics.median(report.transfer_seconds for report in reports[1:]))
            check_bits(group, sums_of(model, sides[1]) if options.one_host else bits_of(model, sides[1]))
            last = reports[-1]
            size_sent = (
                last.delta.delta_bytes
                if last.delta is not None
                else sum(p.nbytes for p in model.parameters())
            )
            floor = size_sent / (options.gigabits * 1e9 / 8) if options.gigabits else 0.0
            key = f"{'changes' if delta else 'whole'}, {backend}, {relays}"
            result[key] = {
                "bytes": size_sent,
                "seconds": seconds,
                "floor": floor,
                "ratio": seconds / floor if floor else None,
            }
    return result


def model_of(options: argparse.Namespace, trains: bool) -> tuple[torch.nn.Module, Any]:
    """Return the model, and what changes it in a step."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    if options.device == "cpu":
        dtype = torch.float32 if trains else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(options.folder / "hf", dtype=dtype)
        return model, Training(model, tokens(options.folder / "hf"), 1e-6, LENGTH)
    shapes = (4096, 12288, 36, 32, False) if options.one_host else (1024, 3072, 28, 16, True)
    hidden, intermediate, layers, heads, tied = shapes
    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=151936,
                         tie_word_embeddings=tied)  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, RandomChanges(model)


class RandomChanges:
    """Steps that change every hundredth element or so."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def step(self) -> None:
        """Change the model."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + (torch.rand_like(parameter) < 0.01).to(parameter.dtype))


def sums_of(model: torch.nn.Module, engine: ServedModel | None) -> bytes:
    """Return a sum of each tensor's bits by their places, taken on the GPU: for what is large."""
    tensors = engine.tensors.values() if engine is not None else model.parameters()
    sums = []
    for tensor in tensors:
        words = tensor.detach().view(torch.int16).flatten().long()
        sums.append(int((words * (torch.arange(len(words), device=words.device) % 65521 + 1)).sum()))
    return json.dumps(sums).encode()


def latest(group: RefitGroup, seconds: float) -> float:
    """Return the longest time of all members."""
    group.begin("the comparison of times")
    answers = group.gather("seconds", str(seconds).encode())
    group.commit()
    return max(map(float, answers))


def check_bits(group: RefitGroup, bits: bytes) -> None:
    """Compare the bits of all members."""
    from zlib import crc32

    group.begin("the comparison of bits")
    answers = group.gather("bits", str(crc32(bits)).encode())
    group.commit()
    assert len({*answers}) == 1, "an engine's bits are not the trainer's"


if __name__ == "__main__":
    main()
