"""An engine that runs its model, and hands on its weights to another one meanwhile.

    python -m benchmarks.refits.lending [--device cuda] [--times 5] [--backend auto] [--json FILE]

Three processes: one without weights, as the first rank of a fleet's trainer; an engine that runs a transformers model
of Qwen3-8B's shapes one step after the other, as one that serves; and a newcomer, on a GPU of its own, which gets the
weights from that one (`reshard.engines.workers.lending`). On a CPU the model is small.

Reported: the seconds from the first call to the newcomer's being ready, of these the transfer of bytes, that as a ratio
to a plain copy of as many bytes from GPU to GPU, and how many steps a second the engine made before and meanwhile. The
newcomer's bits are compared with the engine's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import torch

from benchmarks.refits.relays import sums_of
from reshard.comm.hosts import free_address
from reshard.core.errors import ReshardError
from reshard.refit import RefitGroup, connect
from tests.tools.lender import Lender
from tests.tools.whole_model import ServedModel

SECRET = "between the engines"
FIRST, LENDER, NEWCOMER = range(3)
BATCH, TOKENS = 8, 64
VERSION = 3


def main() -> None:
    """Start the processes, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        addresses = [free_address("127.0.0.1") for _ in range(options.times + 1)]
        command = [
            sys.executable,
            "-m",
            "benchmarks.refits.lending",
            "--folder",
            folder,
            "--device",
            options.device,
        ]
        command += ["--times", str(options.times), "--backend", options.backend, "--addresses", *addresses]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in (FIRST, LENDER, NEWCOMER)]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(1)
        result = {
            name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in ("lender", "newcomer")
        }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


def measure(options: argparse.Namespace) -> None:
    """Run this process's side."""
    torch.set_num_threads(1)
    if options.device == "cuda" and options.rank:
        torch.cuda.set_device(options.rank - 1)
    # The last address is for what all have to tell each other.
    group = RefitGroup.join(options.addresses[-1], options.rank, 3, timeout=300, secret=SECRET)
    model = model_of(options) if options.rank else None
    engine = ServedModel(model) if model is not None else None
    if options.rank == LENDER:
        for name, parameter in model.named_parameters():  # it serves what the model runs with
            parameter.data = engine.tensors[name].copy_(parameter.data)
        engine.guard.refitted(VERSION)
        result = lend(options, group, Lender(engine), model)
    else:
        result = bring_up(options, group, engine)
    if options.rank:
        name = "lender" if options.rank == LENDER else "newcomer"
        (options.folder / f"{name}.json").write_text(json.dumps(result))


def meet(group: RefitGroup, what: str) -> None:
    """Wait for all."""
    group.begin(what)
    group.prepare()
    group.commit()


def lend(options: argparse.Namespace, group: RefitGroup, worker: Lender, model: torch.nn.Module) -> dict:
    """Run the model, and hand on its weights; return the steps a second without that, and meanwhile."""
    over, ends = Event(), []
    tokens = torch.randint(1000, (BATCH, TOKENS), device=worker.engine.device)

    @torch.no_grad()
    def run() -> None:
        while not over.is_set():
            model(input_ids=tokens, use_cache=False)
            if tokens.is_cuda:
                torch.cuda.current_stream().synchronize()
            ends.append(time.monotonic())

    runs = Thread(target=run, daemon=True)
    runs.start()
    time.sleep(3)
    alone, meanwhile = [], []
    for address in options.addresses[:-1]:
        began = time.monotonic()
        time.sleep(1)
        alone.append(rate(ends, began, time.monotonic()))
        meet(group, "a start")
        began = time.monotonic()
        worker.reshard_lend(
            address, LENDER, 3, VERSION, timeout=120.0, secret=SECRET, backend=options.backend
        )
        worker._reshard_lending._thread.join()
        meanwhile.append(rate(ends, began, time.monotonic()))
        meet(group, "an end")
    over.set()
    runs.join()
    bits = sums_of(model, worker.engine)
    gathered(group, bits)
    return {"steps a second": statistics.median(alone), "meanwhile": statistics.median(meanwhile)}


def rate(ends: list[float], began: float, ended: float) -> float:
    """Return how many steps a second ended between two times."""
    return sum(began <= end <= ended for end in ends) / (ended - began)


def bring_up(options: argparse.Namespace, group: RefitGroup, engine: ServedModel | None) -> dict:
    """Get the weights, or take part in that without any; return the seconds."""
    seconds, transfers = [], []
    for address in options.addresses[:-1]:
        if engine is not None:
            for tensor in engine.written_tensors():
                tensor.zero_()
        meet(group, "a start")
        began = time.monotonic()
        members = RefitGroup.join(address, options.rank, 3, timeout=120, secret=SECRET)
        link = connect(members, None, engine, backend=options.backend)
        report = link.refit(VERSION, verify=True)
        seconds.append(time.monotonic() - began)
        transfers.append(report.transfer_seconds)
        routes = link.describe()["routes"]
        link.close()
        meet(group, "an end")
        members.close()
    gathered(group, sums_of(None, engine) if engine is not None else None)
    if engine is None:
        return {}
    size = sum(tensor.nbytes for tensor in engine.written_tensors())
    floor = copied(size) if options.device == "cuda" else None
    transfer = statistics.median(transfers)
    return {
        "bytes": size,
        "seconds": statistics.median(seconds),
        "first": seconds[0],
        "transfer": transfer,
        "copy": floor,
        "ratio": transfer / floor if floor else None,
        "routes": routes,
    }


def gathered(group: RefitGroup, bits: bytes | None) -> None:
    """Compare the bits of the two engines."""
    group.begin("the bits")
    answers = group.gather("bits", bits or b"")
    group.commit()
    if answers[LENDER] != answers[NEWCOMER]:
        raise ReshardError("the newcomer's bits are not the engine's")


def copied(size: int) -> float:
    """Return the seconds of a plain copy of so many bytes from the first GPU to the second, the least of five."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.monotonic() - began)
    return min(seconds)


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """Return the model, with other weights on each rank."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shapes = (4096, 12288, 36, 32) if options.device == "cuda" else (256, 512, 4, 4)
    hidden, intermediate, layers, heads = shapes
    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=min(8, heads), head_dim=128, vocab_size=151936,
                         tie_word_embeddings=False)  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(options.rank)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
