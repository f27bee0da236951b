"""Do engines that read from each other what they want of a trainer have its bits, and what does a refit take?

    python -m benchmarks.refits.pulled_relays [--engines 3] [--refits 5] [--device cuda] [--backend staged]
        [--json FILE]

A trainer and engines in processes of their own, by turns on the GPUs that there are: on one GPU they share its memory
and its time, so that the bits and what happens after a death count, and times say little. Each refit brings random
weights of Qwen3-8B's shapes (with ``--device cpu``, of a small model), which every engine also makes by itself and
compares bit for bit: those of this version have to be equal, and those of the version before, and of one bit that is
flipped, must not. Reported for each way: the transfer of a refit, median over all but the first, and the bytes by
route.

Then the engine in the middle of the line dies in its fourth round of a refit. Reported: what the others say of that
within how many seconds, and whether an engine would serve then, which it must not. A connection without it has to leave
the trainer's bits in all that are left.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.refits.relays import latest
from reshard.core.errors import ReshardError
from reshard.refit import Link, RefitGroup, connect
from reshard.refit.transports import TRANSPORTS
from tests.tools.whole_model import ServedModel, TrainedModel

PORT = 29651
SECRET = "of processes on one host"
LIMIT = 60.0  # seconds that members wait for each other
SMALL = (128, 256, 4, 8)  # hidden and intermediate size, layers, heads
LARGE = (4096, 12288, 36, 32)


def main() -> None:
    """Start the processes, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", choices=("staged", "nixl"), default="staged")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        (options.folder / f"{options.rank}.json").write_text(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.refits.pulled_relays", *sys.argv[1:], "--folder", folder]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1 + options.engines)]
        codes = [process.wait() for process in processes]
        written = [Path(folder) / f"{rank}.json" for rank in range(1 + options.engines)]
        results = [json.loads(path.read_text()) if path.exists() else None for path in written]
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    if codes != [int(rank == victim_of(options)) for rank in range(1 + options.engines)]:
        sys.exit(f"the processes ended with {codes}")


def show(results: list[dict | None]) -> None:
    """Print what each way took and brought to whom, and what each rank said of the death; who died says nothing."""
    ranks = [result for result in results if result is not None]
    for way in [way for way in ranks[0] if way != "death"] if ranks else ():
        print(
            way,
            f"{ranks[0][way]['seconds'] * 1e3:.1f} ms",
            *(result[way]["received"] for result in ranks[1:]),
        )
    for rank, result in enumerate(results):
        print(f"rank {rank}", json.dumps(result and result["death"]))


def victim_of(options: argparse.Namespace) -> int:
    """Return the rank that dies: in the middle of the line, if it has one."""
    return (1 + options.engines) // 2


class Weights:
    """The weights of each version, which any member can make; `tensors` are this one's."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def of(self, version: int, index: int) -> torch.Tensor:
        """Return one of the tensors in a version."""
        like = self.tensors[index]
        random = torch.Generator(like.device).manual_seed(version * 100_003 + index)
        return torch.empty_like(like).normal_(generator=random)

    def make(self, version: int) -> None:
        """Have the weights of a version."""
        for index, tensor in enumerate(self.tensors):
            tensor.copy_(self.of(version, index))

    def are_of(self, version: int) -> bool:
        """Return True if every bit is of a version."""
        return all(
            torch.equal(tensor.view(torch.int16), self.of(version, index).view(torch.int16))
            for index, tensor in enumerate(self.tensors)
        )


def sides_of(options: argparse.Namespace) -> tuple[tuple[Any, Any], Weights]:
    """Return this process's sides, and their weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, intermediate, layers, heads = LARGE if options.device == "cuda" else SMALL
    vocabulary = 151936 if options.device == "cuda" else 8192
    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=8, head_dim=hidden // heads,
                         vocab_size=vocabulary, tie_word_embeddings=False)  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=options.device).requires_grad_(False)
    if not options.rank:
        source = TrainedModel(model)
        return (source, None), Weights([region.tensor for region in source.memory])
    engine = ServedModel(model)
    return (None, engine), Weights([*engine.tensors.values()])


def measure(options: argparse.Namespace) -> dict:
    """Run this process's side; return what was measured."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(options.rank % torch.cuda.device_count())
    sides, weights = sides_of(options)
    group = RefitGroup.join(
        f"127.0.0.1:{PORT}", options.rank, 1 + options.engines, timeout=LIMIT, secret=SECRET
    )
    result: dict = {}
    ways = [(options.backend, "always"), (options.backend, "never")]
    if options.device == "cuda":
        ways.append(("cuda_ipc", "never"))
    version = 0
    for backend, relays in ways:
        link = connect(
            group, *sides, backend=backend, relays=relays, keep_mapped=True, bucket_bytes=options.bucket_bytes
        )
        reports = []
        for _ in range(options.refits):
            version += 1
            reports.append(refit(link, weights, version, verify=not reports))
        link.close()
        last = reports[-1]
        result[f"{backend}, {relays}"] = {
            "seconds": latest(group, statistics.median(report.transfer_seconds for report in reports[1:])),
            "bytes": sum(tensor.nbytes for tensor in weights.tensors),
            "received": {route: size for route, size in last.received_bytes.items() if size},
            "routes": link.describe()["routes"],
        }
    result["death"] = after_a_death(options, group, sides, weights, version)
    return result


def refit(link: Link, weights: Weights, version: int, verify: bool) -> Any:
    """Refit to a version, and compare: all its bits are there, and they are not those of the one before."""
    if not link.group.rank:
        weights.make(version)
    report = link.refit(version, verify=verify)
    if link.group.rank:
        assert weights.are_of(version), f"version {version} has not arrived bit for bit"
        assert not weights.are_of(version - 1), "the comparison finds no difference between two versions"
        last = weights.tensors[-1].view(-1).view(torch.int16)[-1:]
        last ^= 1
        assert not weights.are_of(version), "the comparison does not find a bit"
        last ^= 1
    return report


def after_a_death(
    options: argparse.Namespace, group: RefitGroup, sides: tuple[Any, Any], weights: Weights, version: int
) -> dict:
    """Have an engine die in the middle of a refit, and refit the others without it; return what this one said."""
    victim, how = victim_of(options), {"backend": options.backend, "relays": "always"}
    # Many rounds, whatever the model.
    link = connect(
        group, *sides, **how, bucket_bytes=options.bucket_bytes // (1 if options.device == "cuda" else 256)
    )
    refit(link, weights, version + 1, verify=False)
    if not options.rank:
        weights.make(version + 2)
    if options.rank == victim:
        [kind] = [kind for kind in TRANSPORTS if kind.reach.name == options.backend]
        kind.begin_fetch = ending(kind.begin_fetch)  # type: ignore[attr-defined]
    began, said = time.monotonic(), "no error"
    try:
        link.refit(version + 2)
    except ReshardError as error:
        said = str(error)
    seconds = time.monotonic() - began
    name = f"inference rank {victim}"
    assert name in said and seconds < LIMIT / 2, (said, seconds)
    serves = sides[1] is not None and sides[1].ready
    assert not serves, "an engine would serve half-written weights"
    link.close()
    group.close()
    left = options.rank - (options.rank > victim)
    group = RefitGroup.join(f"127.0.0.1:{PORT + 1}", left, options.engines, timeout=LIMIT, secret=SECRET)
    link = connect(group, *sides, **how, bucket_bytes=options.bucket_bytes)
    refit(link, weights, version + 3, verify=True)
    link.close()
    return {"said": said, "seconds": seconds, "right without it": True}


def ending(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ends this process at its fourth call."""
    calls: list[None] = []

    def last(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            os._exit(1)
        return plain(*arguments)

    return last


if __name__ == "__main__":
    main()
