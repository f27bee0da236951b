"""Refits of a running SGLang from Megatron: does it give the same answers as one that has loaded the checkpoint, and
how long does a refit take, compared with vLLM and with slime's weight sync?

    torchrun --nproc-per-node 2 -m benchmarks.refits.sglang --model qwen3-30b-a3b --layers 6 --tp 2 --ep 2 --etp 1 \\
        --engine '{"tp_size": 2, "ep_size": 2}' --vllm '{"enable_expert_parallel": true}' --slime [--json FILE]

The trainer's ranks are torchrun's processes (Megatron with Transformer Engine layers, random weights). SGLang is a
server and vLLM an engine, each in processes of its own on the same GPUs. SGLang is the environment's, with Triton's
kernels. The steps:

- SGLang starts with checkpoint 0, and is asked twice for its prompt logprobs, for eight greedy tokens with theirs, and
  for the digests of its weights, since its kernels may answer differently the second time. It then loads checkpoints 1
  and 0 by its own loader. A refit from each must leave the same state.
- Refits are timed, with the trainer's memory mapped each time and kept mapped.
- `--vllm` times the same refits into a vLLM with these options.
- `--slime` times slime's sync: whole tensors gathered on each rank, in flattened buckets of 512 MB, whose handles
  SGLang gets by HTTP.
- `--sleep`: a refit while SGLang has released its weights must be refused. A refit after it has resumed must leave the
  same state.
- `--restart` starts SGLang with checkpoint 1 and compares it with the refitted one. Use it where the running SGLang's
  own loader leaves something of the old weights, as it does GLM's router in SGLang 0.5.16 to 0.5.18.

`--times-only` writes no checkpoints, for models that take long to write and load: SGLang starts with dummy weights,
the first refits are verified, and what slime's sync leaves is compared with what they left.

With `--fp8` SGLang serves fp8 blocks: from checkpoints quantized like those of `reshard mcore-to-hf --quantize fp8`,
and from refits of the trainer's bf16.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import config_of, megatron_models, model_options, text_of
from benchmarks.processes import conclude, everyone, say, start_processes
from benchmarks.refits.served_checkpoint import served_config, write_checkpoint
from benchmarks.refits.sglang_case import Case
from benchmarks.refits.sglang_server import Server

OF_VLLM = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28, "enable_sleep_mode": False}


@contextmanager
def without_sglang() -> Iterator[None]:
    """Within it, hide SGLang's environment from new processes, also its other packages, such as its transformers."""
    path, variable = sys.path.copy(), os.environ.get("PYTHONPATH", "")
    sys.path[:] = [place for place in path if not Path(place, "sglang").is_dir()]
    kept = [place for place in variable.split(os.pathsep) if not Path(place, "sglang").is_dir()]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    try:
        yield
    finally:
        sys.path[:], os.environ["PYTHONPATH"] = path, variable


def wait_for(files: list[Path], limit: float = 120.0) -> None:
    """Wait until all of these files exist, for at most `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end and not all(file.exists() for file in files):
        time.sleep(0.5)
    missing = [str(file) for file in files if not file.exists()]
    say(f"waited; missing: {missing}")
    dist.barrier()


def steps_of(case: Case, options: argparse.Namespace, pipe: Any) -> dict[str, Callable[[], None]]:
    """Return the steps of a case in order, by name."""
    steps: dict[str, Callable[[], None]] = {}
    if not options.times_only:
        steps["load"] = case.load_both
    steps["refit"] = case.there_and_back
    if options.after:
        steps["wait"] = lambda: wait_for(options.after)
    if options.rounds:
        steps["time"] = case.time_refits
    if options.vllm is not None:
        steps["vllm"] = lambda: case.time_vllm(pipe)
    if options.slime:
        steps["slime"] = case.time_slime
    if options.sleep:
        steps["sleep"] = case.sleep
    if options.restart:
        steps["restart"] = case.restart
    return steps


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_options(parser)
    parser.add_argument(
        "--config", type=json.loads, default={}, help="fields of the language model's config, as JSON"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="SGLang's ServerArgs, as JSON")
    parser.add_argument("--vllm", type=json.loads, help="vLLM's options, as JSON: time it too")
    parser.add_argument("--slime", action="store_true")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--times-only", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--after",
        type=Path,
        nargs="*",
        default=[],
        help="files to wait for, at most two minutes, before anything is timed: of other cases on these GPUs",
    )
    parser.add_argument("--port", type=int, default=29700)
    parser.add_argument(
        "--start-limit", type=float, default=150.0, help="seconds that SGLang may take to start"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for configs, checkpoints and logs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.restart and options.times_only:
        parser.error("--restart needs checkpoints, which --times-only does not write")
    return options


def main() -> None:
    options, rank = parsed_options(), int(os.environ["RANK"])
    config = config_of(options.model, options.layers, options.config)
    server = pipe = None
    if rank == 0:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "config.json").write_text(json.dumps(served_config(config, options.fp8)))
        server = Server(options.folder, options.engine, options.port)
        if options.times_only:
            server.start(options.folder, "dummy")
        if options.vllm is not None:
            from benchmarks.refits.offload import start_engine

            gpus = ",".join(map(str, range(int(os.environ["WORLD_SIZE"]))))
            settings = OF_VLLM | {"tensor_parallel_size": int(os.environ["WORLD_SIZE"])} | options.vllm
            with without_sglang():
                _, pipe = start_engine(config, gpus, settings)
    start_processes()
    result = {
        "model": options.model,
        "config": {"layers": text_of(config)["num_hidden_layers"], **options.config},
        "engine": options.engine,
        "gpus": dist.get_world_size(),
    }
    case = None
    try:
        case = prepared(options, config, server, pipe)
        for name, step in steps_of(case, options, pipe).items():
            step()
            say(f"-- {name} is done")
    except Exception:
        text = traceback.format_exc()
        print(f"rank {rank}: {text}\n{server.tail() if server else ''}", flush=True)
        result["failed"] = text[-1500:]
    finally:
        if server:
            server.stop()
        with suppress(OSError):  # vLLM has ended
            if pipe:
                pipe.send(None)
    result |= case.result if case else {}
    if "failed" in result:  # the others may wait for this one: no barrier
        if rank == 0 and options.json:
            options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
        os._exit(1)
    conclude(result, options.json)


def prepared(options: argparse.Namespace, config: dict, server: Server | None, pipe: Any) -> Case:
    """Return a case whose engines have started, and whose checkpoints are written unless `--times-only`."""
    from benchmarks.refits.refit import memory_rate
    from reshard import MegatronLayout

    layout = MegatronLayout(tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp)
    models = megatron_models(config, layout)
    if server:
        (options.folder / "trainer").mkdir(exist_ok=True)
        (options.folder / "trainer" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    case = Case(options, config, models, server)
    size = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
    case.result |= {"megatron": str(layout), "trainer_bytes": everyone(size)}
    if torch.cuda.is_available():
        rate = min(everyone(memory_rate()))
        case.result |= {"gpu": torch.cuda.get_device_name(), "memory_bytes_per_second": rate}
        case.note("floor: a copy of a trainer's rank on its GPU, ms", 2e3 * size / rate)
    dist.barrier()
    for seed in () if options.times_only else (0, 1):
        case.step(seed)
        write_checkpoint(models, config, case.checkpoint(seed), options.fp8)
        if server and seed == 0:
            server.start(case.checkpoint(0), "auto")
    if server:
        case.result["start_seconds"] = server.wait(options.start_limit)
        say(f"SGLang started in {case.result['start_seconds']:.0f} s")
    if pipe:
        pipe.poll(120)  # nothing is timed while vLLM starts
    dist.barrier()
    return case


if __name__ == "__main__":
    main()
