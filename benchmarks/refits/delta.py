"""Refits that send what changed, compared with refits that send everything, over a throttled link between two
hosts.

    python -m benchmarks.refits.delta [--rates 1e-6 1e-5] [--gigabits 1 10] [--steps 10] [--whole 4] [--json FILE]

Two processes, each in a network namespace of its own as a host, with a link between them that ``tc`` limits in both
directions. One trains SmolLM2-135M in fp32 by Adam on the text of this repository's pages, at each learning rate
from the published weights on; the other serves it in bf16. Needs root, or a kernel that lets users make
namespaces, and ``tc``.

Reported for each learning rate and link: the share of bf16 elements that changed in a step; bytes on the wire;
the transfer of a refit that sends changes, median over the steps, of one that sends all, and the floor of both,
which is the bytes at the link's rate; and the time in which the trainer finds what changed, by itself. After
the last step the engine's bits are compared with the trainer's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from zlib import crc32

import torch

from reshard.refit import RefitGroup, connect
from tests.tools import hosts
from tests.tools.whole_model import ServedModel, TrainedModel, Training

REPOSITORY = Path(__file__).parent.parent.parent
PORT = 29641
SECRET = "between the two hosts"
LENGTH = 128  # tokens of a step


def main() -> None:
    """Start both hosts and their processes, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--whole", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        result = measure(options)
        if options.rank == 0:
            (options.folder / "result.json").write_text(json.dumps(result))
        return
    from tests.tools.trained import make

    program = [sys.executable, "-m", "tests.tools.hosts"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder,
    ):
        assert holder.stdin and holder.stdout
        held = json.loads(holder.stdout.readline())
        make(Path(folder) / "hf")
        command = [sys.executable, "-m", "benchmarks.refits.delta", *sys.argv[1:], "--folder", folder]
        # A process moves to its host while it has one thread.
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], preexec_fn=partial(hosts.enter, held, rank))
            for rank in (0, 1)
        ]
        codes = [process.wait() for process in processes]
        holder.stdin.close()
        if any(codes):
            sys.exit(1)
        result = json.loads((Path(folder) / "result.json").read_text())
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


def measure(options: argparse.Namespace) -> list[dict]:
    """Run this process's side; on the trainer's, return a result for each learning rate and link."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    results = []
    group = RefitGroup.join(f"{hosts.ADDRESSES[0]}:{PORT}", options.rank, 2, timeout=300, secret=SECRET)
    for rate in options.rates:
        model = AutoModelForCausalLM.from_pretrained(options.folder / "hf", dtype=torch.float32)
        training = Training(model, tokens(options.folder / "hf"), rate, LENGTH) if options.rank == 0 else None
        trainer, engine = (TrainedModel(model), None) if training else (None, ServedModel(model))
        for gigabits in options.gigabits:
            throttle(options.rank, gigabits)
            whole = refits(group, trainer, engine, options.whole, None, False)
            delta = refits(group, trainer, engine, options.steps + 1, training, True)
            bits = crc32(bits_of(model, engine))
            results.append(summary(rate, gigabits, whole, delta))
            group.begin("the comparison of bits")
            answers = group.gather("bits", str(bits).encode())
            group.commit()
            assert answers[0] == answers[1], "the engine's bits are not the trainer's"
    return results


def tokens(folder: Path) -> torch.Tensor:
    """Return the text of this repository's pages, in the model's tokens."""
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(REPOSITORY.glob("docs/**/*.md")))
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def throttle(host: int, gigabits: float) -> None:
    """Limit what this host sends to so many Gbit/s."""
    limit = f"rate {gigabits}gbit burst 4mb latency 100ms"
    subprocess.run(f"tc qdisc replace dev host{host} root tbf {limit}".split(), check=True)


def refits(group, trainer, engine, count: int, training: Training | None, delta: bool | str) -> list[dict]:
    """Connect, refit so often, after a step of `training` each, and return the reports."""
    link = connect(group, trainer, engine, backend="nccl", delta=delta, bucket_bytes=64 << 20)
    reports = []
    for index in range(count):
        if training is not None:
            training.step()
        is_last = bool(delta) and index == count - 1
        report = link.refit(verify=is_last)
        found = finding(link, trainer) if is_last and trainer is not None else 0.0
        reports.append(report.to_dict() | {"finding": found})
    link.close()
    return reports


def finding(link, trainer: TrainedModel) -> float:
    """Return the seconds in which what changed is found and encoded once more, where nothing has."""
    [sent] = link.chain.changes
    start = time.perf_counter()
    for (line, index), bucket in sent.buckets.items():
        sizes = sent.find(index, {line: bucket})
        sent.changes(index, {line: bucket}, 0, {one: int(size) for one, size in sizes.items()})
    return time.perf_counter() - start


def bits_of(model: torch.nn.Module, engine: ServedModel | None) -> bytes:
    """Return the bf16 bits of the trainer's parameters, or of the engine's."""
    tensors = engine.tensors.values() if engine is not None else model.parameters()
    return b"".join(t.detach().to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes() for t in tensors)


def summary(rate: float, gigabits: float, whole: list[dict], delta: list[dict]) -> dict:
    """Return what a table shows of one learning rate and link."""
    steps = [report for report in delta if report["is_delta"]]
    all_bytes, few_bytes = (steps[0][key] if steps else 0 for key in ("delta_whole_bytes", "delta_bytes"))
    few_bytes = statistics.median(report["delta_bytes"] for report in steps)
    per_second = gigabits * 1e9 / 8
    return {
        "learning_rate": rate,
        "gigabits": gigabits,
        "changed": [report["delta_changed"] for report in steps],
        "whole_bytes": all_bytes,
        "delta_bytes": few_bytes,
        "whole_seconds": statistics.median(report["transfer_seconds"] for report in whole[1:]),
        "delta_seconds": statistics.median(report["transfer_seconds"] for report in steps),
        "whole_floor": all_bytes / per_second,
        "delta_floor": few_bytes / per_second,
        "finding_seconds": delta[-1]["finding"],
        "kept_bytes": delta[-1]["delta_kept_bytes"],
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
