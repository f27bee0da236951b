"""A vLLM that answers requests without a pause, while a trainer refits it: tokens as they come, around each sync.

    python -m benchmarks.refits.switching_served [--device cuda] [--requests 64] [--syncs 5] [--share 0.005]

A trainer's rank on one GPU, and an ``AsyncLLM``, whose core and worker are in processes of their own, on the other; a
model of Qwen3-8B's shapes, on a CPU a small one. Three ways, one after the other, by the same connection and with the
same share of elements changed:

- ``begun``: `Link.begin_refit`, then a switch between two steps; requests go on;
- ``refit``: vLLM is paused (``keep``), refitted with what changed, and resumed, as before;
- ``all``: the same with all weights sent, as where nothing is known of changes.

Of each: how long the trainer stands still, the longest time without a token from any request, and the tokens a second
from 0.2 s before a sync to 1.5 s after; beside the last two in 3.4 s without a sync, just before. In JSON the tokens by
20 ms.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.refits.lending import meet, model_of
from benchmarks.refits.switching import Trainer, synchronize
from reshard.comm.hosts import free_address
from reshard.refit import RefitGroup, connect
from tests.tools.whole_model import TrainedModel

SECRET = "between both of these"
WAYS = ("begun", "refit", "all")
SETTLE, BEFORE, AFTER, BIN = 1.5, 0.2, 1.5, 0.02  # seconds
TRAINER, ENGINE = range(2)


def main() -> None:
    """Start the processes, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.005)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--python", default=sys.executable, help="the engine's")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank == TRAINER:
        train(options)
        return
    if options.rank == ENGINE:
        asyncio.run(serve(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        addresses = [free_address("127.0.0.1") for _ in WAYS[1:]] + [free_address("127.0.0.1")]
        rest = [*sys.argv[1:], "--folder", folder, "--addresses", *addresses]
        module = ["-m", "benchmarks.refits.switching_served", *rest]
        processes = [
            subprocess.Popen([python, *module, "--rank", str(rank)], env=os.environ | environment)
            for rank, (python, environment) in enumerate(
                ((sys.executable, {}), (options.python, {"CUDA_VISIBLE_DEVICES": "1"}))
            )
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(1)
        trainer, engine = (
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (TRAINER, ENGINE)
        )
    result = {way: {**trainer[way], **engine[way]} for way in WAYS}
    print(
        json.dumps(
            {name: {k: v for k, v in of.items() if k != "bins"} for name, of in result.items()}, indent=1
        )
    )
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


def of_way(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a connection."""
    return {"backend": "nccl", "bucket_bytes": options.bucket_bytes} | (
        {"delta": True, "keep_mapped": True} if way != "all" else {"keep_mapped": True}
    )


def train(options: argparse.Namespace) -> None:
    """Send from this process; write how long that kept it."""
    if options.device == "cuda":
        torch.cuda.set_device(0)
    model = model_of(options)
    model.config.save_pretrained(options.folder / "model.part")
    (options.folder / "model.part").rename(options.folder / "model")
    group = RefitGroup.join(options.addresses[-1], TRAINER, 2, timeout=600, secret=SECRET)
    figures, version = {}, 0
    side = None
    for way in WAYS:
        if way != "refit":
            if side is not None:
                side.link.close()
                side.link.group.close()
            address = options.addresses[WAYS.index(way) // 2]
            members = RefitGroup.join(address, TRAINER, 2, timeout=300, secret=SECRET)
            side = Trainer(model, group, connect(members, TrainedModel(model), None, **of_way(way, options)))
            side.link.refit(version)
            meet(group, "the first")
        assert side is not None
        stands = []
        for _ in range(options.syncs + 1):  # the first compiles
            version += 1
            side.prepare(options.share)
            synchronize()
            meet(group, "a sync")
            began = time.perf_counter()
            if way == "begun":
                begun = side.link.begin_refit(version)
                stands.append(1e3 * (time.perf_counter() - began))
                assert begun.wait().is_pending
            else:
                side.link.refit(version)
                stands.append(1e3 * (time.perf_counter() - began))
            meet(group, "its end")
        figures[way] = {"trainer stands still, ms": statistics.median(stands[1:])}
    meet(group, "the end")
    (options.folder / f"{TRAINER}.json").write_text(json.dumps(figures))


async def serve(options: argparse.Namespace) -> None:
    """Answer requests, and take the weights; write what came of each way."""
    while not (options.folder / "model").is_dir():
        time.sleep(0.2)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {"gpu_memory_utilization": 0.8} if options.device == "cuda" else {
        "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True, "dtype": "bfloat16"
    }  # fmt: skip
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(options.folder / "model"), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
            worker_extension_cls="reshard.engines.vllm.worker.RefitExtension", max_num_seqs=options.requests,
            **settings,
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
    for way in WAYS:
        if way != "refit":
            address = options.addresses[WAYS.index(way) // 2]
            named = {
                "secret": SECRET,
                "backend": "nccl",
                "bucket_bytes": options.bucket_bytes,
                "timeout": 300.0,
            }
            await llm.collective_rpc("reshard_connect", args=(address, 1, 2), kwargs=named)
            await llm.collective_rpc("reshard_refit")
            await asyncio.to_thread(meet, group, "the first")
        if not asking:
            asking = [asyncio.create_task(request(number)) for number in range(options.requests)]
            await asyncio.sleep(2 * SETTLE)
        began = time.monotonic()
        await asyncio.sleep(2 * (BEFORE + AFTER))
        quiet, spans = summary(came, [(began, time.monotonic())]), []
        for number in range(options.syncs + 1):
            await asyncio.to_thread(meet, group, "a sync")
            began = time.monotonic()
            if way == "begun":
                await llm.collective_rpc("reshard_begin_refit")
                await asyncio.to_thread(meet, group, "its end")
                await llm.collective_rpc("reshard_switch", kwargs={"keep_caches": True})
            else:
                await llm.pause_generation(mode="keep", clear_cache=False)
                await llm.collective_rpc("reshard_refit")
                await llm.resume_generation()
                await asyncio.to_thread(meet, group, "its end")
            await asyncio.sleep(max(AFTER, began + AFTER - time.monotonic()))
            if number:
                spans.append((began - BEFORE, began + AFTER))
        figures[way] = summary(came, spans) | {
            f"{name}, without a sync": quiet[name]
            for name in ("longest without a token, ms", "tokens a second")
        }
    await asyncio.to_thread(meet, group, "the end")
    assert all(not task.done() for task in asking), "a request has ended with an error"
    (options.folder / f"{ENGINE}.json").write_text(json.dumps(figures))
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
