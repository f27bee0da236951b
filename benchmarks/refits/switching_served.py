"""A vLLM that answers requests without a pause, while a trainer refits it: tokens as they come, around each sync.

    python -m benchmarks.refits.switching_served [--device cuda] [--model qwen3-8b] [--layers N] [--requests 64]
        [--syncs 5] [--share 0.01] [--gigabits 10]

A trainer's rank on one GPU, and an ``AsyncLLM``, whose core and worker are in processes of their own, on the other;
random weights in published shapes, on a CPU a small model. With ``--gigabits`` each has a network namespace, with a
link between them that is limited to that in both directions, and NCCL goes over its sockets (needs root and pyroute2).

The ways (`switching_ways`) come one after the other, with the same share of elements changed each time. Of each: how
long the trainer stands still, the longest time without a token from any request, and the tokens a second from 0.2 s
before a sync to 1.5 s after; beside the last two in 3.4 s without a sync, just before. In JSON the tokens by 20 ms.
After each way, digests of both sides are compared; after the first, that fails once the trainer has made a step.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.models import config_of
from benchmarks.refits.delta_gpus import of_host, throttle
from benchmarks.refits.switching import ENGINE, TRAINER, train
from benchmarks.refits.switching_ways import SECRET, WAYS, EngineSide, TrainerSide, told
from reshard import digest
from reshard.comm.hosts import free_address
from reshard.engines.digest import digest_of_engine_async
from reshard.refit import RefitGroup
from reshard.trainers import FsdpModel
from tests.tools import hosts

SETTLE, BEFORE, AFTER, BIN = 1.5, 0.2, 1.5, 0.02  # seconds


def main() -> None:
    """Start the processes, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--gigabits", type=float)
    parser.add_argument("--python", default=sys.executable, help="the engine's")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        if options.gigabits:
            throttle(options.rank, options.gigabits)
        run_trainer(options) if options.rank == TRAINER else asyncio.run(serve(options))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        held = stack.enter_context(two_hosts()) if options.gigabits else None
        host = hosts.ADDRESSES[TRAINER] if held else "127.0.0.1"
        ports = iter({free_address("127.0.0.1") for _ in range(20)})
        addresses = [f"{host}:{next(ports).rpartition(':')[2]}" for _ in [*options.ways, "both"]]
        rest = [*sys.argv[1:], "--folder", str(folder), "--addresses", *addresses]
        processes = []
        for rank, python in enumerate((sys.executable, options.python)):
            command = [python, "-m", "benchmarks.refits.switching_served", *rest, "--rank", str(rank)]
            environment = (of_host(rank) if held else dict(os.environ)) | {"CUDA_VISIBLE_DEVICES": str(rank)}
            enters = partial(hosts.enter, held, rank) if held else None
            processes.append(subprocess.Popen(command, env=environment, preexec_fn=enters))
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(1)
        trainer, engine = (json.loads((folder / f"{rank}.json").read_text()) for rank in (TRAINER, ENGINE))
    result = {way: {**trainer[way], **engine[way]} for way in options.ways}
    short = {name: {k: v for k, v in of.items() if k != "bins"} for name, of in result.items()}
    print(json.dumps(short, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


@contextmanager
def two_hosts() -> Iterator[dict[str, Any]]:
    """Yield what holds the namespaces of two hosts."""
    program = [sys.executable, "-m", "tests.tools.hosts"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout
        yield json.loads(holder.stdout.readline())
        holder.stdin.close()


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """Return the trainer's model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(options.model, options.layers)
    if options.device == "cpu":
        config |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "num_hidden_layers": options.layers or 4, "max_position_embeddings": 8192}  # fmt: skip
        config |= {"num_experts": 8, "moe_intermediate_size": 64} if "num_experts" in config else {}
    config |= {"max_position_embeddings": 8192, "initializer_range": 0.02}
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(options.rank)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.config.architectures = config["architectures"]
    return model.requires_grad_(False)


def run_trainer(options: argparse.Namespace) -> None:
    """Send from this process; write how long that kept it."""
    model = model_of(options)
    model.config.save_pretrained(options.folder / "model.part")
    (options.folder / "model.part").rename(options.folder / "model")
    group = RefitGroup.join(options.addresses[-1], TRAINER, 2, timeout=600, secret=SECRET)
    figures = {}
    for way, address in zip(options.ways, options.addresses, strict=False):
        told(group, "a way")
        side = TrainerSide(way, address, model, group, options)
        side.first()
        stands = []
        for _ in range(options.syncs + 1):  # the first compiles
            train(model, options.share)
            stands.append(side.sync())
        figures[way] = {"trainer stands still, ms": statistics.median(stands[1:])}
        told(group, "the digest", digest(FsdpModel(model), hf_config=model.config).text)
        if way == options.ways[0]:
            train(model, options.share)
            told(group, "another digest", digest(FsdpModel(model), hf_config=model.config).text)
        side.close()
    (options.folder / f"{TRAINER}.json").write_text(json.dumps(figures))


async def serve(options: argparse.Namespace) -> None:
    """Answer requests, and take the weights; write what came of each way."""
    while not (options.folder / "model").is_dir():
        time.sleep(0.2)
    from vllm import SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {"gpu_memory_utilization": 0.8} if options.device == "cuda" else {
        "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True, "dtype": "bfloat16"
    }  # fmt: skip
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(options.folder / "model"), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
            worker_extension_cls="benchmarks.refits.switching_ways.Extension", max_num_seqs=options.requests,
            weight_transfer_config=WeightTransferConfig(backend="nccl"), **settings,
        )
    )  # fmt: skip
    group = await asyncio.to_thread(RefitGroup.join, options.addresses[-1], ENGINE, 2, 600, SECRET)
    came: list[tuple[float, int]] = []  # when, and how many tokens

    async def request(number: int) -> None:
        sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True, detokenize=False, temperature=0)
        turn = 0
        while True:
            turn, seen = turn + 1, 0
            prompt = {"prompt_token_ids": [100 + number + step for step in range(128)]}
            async for output in llm.generate(prompt, sampling, f"{number}/{turn}"):
                now = len(output.outputs[0].token_ids)
                came.append((time.monotonic(), now - seen))
                seen = now

    asking: list[asyncio.Task] = []
    figures: dict[str, Any] = {}
    for way, address in zip(options.ways, options.addresses, strict=False):
        await asyncio.to_thread(told, group, "a way")
        side = EngineSide(way, address, llm, group, options)
        await side.first()
        if not asking:
            asking = [asyncio.create_task(request(number)) for number in range(options.requests)]
            await asyncio.sleep(2 * SETTLE)
        began = time.monotonic()
        await asyncio.sleep(2 * (BEFORE + AFTER))
        quiet, spans = summary(came, [(began, time.monotonic())]), []
        for number in range(options.syncs + 1):
            began = await side.sync()
            ended = time.monotonic()
            await asyncio.sleep(AFTER)
            if number:
                spans.append((began - BEFORE, max(began + AFTER, ended + BEFORE)))
        figures[way] = summary(came, spans) | {
            f"{name}, without a sync": quiet[name]
            for name in ("longest without a token, ms", "tokens a second")
        }
        served = (await digest_of_engine_async(llm)).text
        assert served == await asyncio.to_thread(told, group, "the digest"), f"{way} has brought other bits"
        if way == options.ways[0]:
            assert served != await asyncio.to_thread(told, group, "another digest")
    assert all(not task.done() for task in asking), "a request has ended with an error"
    (options.folder / f"{ENGINE}.json").write_text(json.dumps(figures))
    for process in psutil.Process().children(recursive=True):  # an engine's core outlives this process
        process.kill()
    os._exit(0)


def summary(came: list[tuple[float, int]], spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the longest time without a token in each of these spans of time, the tokens a second in all, and, of each
    span, the tokens in each 20 ms."""
    gaps, bins, tokens = [], [], 0
    for began, ended in spans:
        inside = [(when, count) for when, count in came if began <= when <= ended]
        times = [when for when, _ in inside]
        gaps.append(1e3 * max(after - before for before, after in itertools.pairwise(times)))
        tokens += sum(count for _, count in inside)
        of_span = [0] * (int((ended - began) / BIN) + 1)
        for when, count in inside:
            of_span[int((when - began) / BIN)] += count
        bins.append(of_span)
    return {
        "longest without a token, ms": statistics.median(gaps),
        "all of these": gaps,
        "tokens a second": tokens / sum(ended - began for began, ended in spans),
        "bins": bins,
    }


if __name__ == "__main__":
    main()
