"""GRPO of a trained model by ms-swift's Megatron with its own weight sync and with a refit: does
the reward rise alike?

    python -m benchmarks.trainers.swift_learning OUT [--steps 150] [--limit 500] [--after SECONDS]
        [--lora RANK] [--options OPTIONS OF MS-SWIFT]

SmolLM2-135M-Instruct (tests/tools/trained.py) is asked for sums of two numbers up to 20; an answer whose
last number is the sum is worth 1. Three runs with the same seeds go side by side, each on one GPU:
`stock` with ms-swift's own sync, `refit` with a refit in its place, and `both`, where each step
overwrites vLLM's weights, refits, overwrites them again, and lets ms-swift's own sync fill them.
Attention, matrix products and sums are deterministic, so that runs differ only by what their syncs
leave.

With `--lora` an adapter of this rank on all linear layers is trained, which vLLM serves beside the
weights. Two runs go side by side: `stock-lora` with ms-swift's own sync of the adapter, and
`refit-lora`. vLLM's kernels for adapters do not repeat themselves to the last bit, so that its
answers, and with them the two trainings, may part.

Written under OUT: each run's log and ms-swift's own figures of each step, what vLLM serves after
every sync, as digests, and `curves.json`: each run's reward by step. Printed: these rewards in tens
of steps, and whether the served weights and the rewards were equal.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.trainers.grpo import DETERMINISTIC, by_phase, noted, sums
from benchmarks.trainers.swift_grpo import RUNS, arguments, started

PROMPTS, ANSWERS = 64, 4
LORA_RUNS = ("refit-lora", "stock-lora")

# A cache of its own size, since the three engines see each other's memory; CUDA graphs without
# Inductor, which takes a minute to compile.
ENGINE = {
    "kv_cache_memory_bytes": 2 << 30,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [64, 128, 192, 256],
    },
}


def rows_and_options(steps: int) -> tuple[list[dict], dict]:
    """Return the rows of sums to compute, and the options of ms-swift that go with them."""
    rows = [{"messages": messages, "total": total} for messages, total in sums(PROMPTS * steps)]
    options = {
        "model_type": "llama",
        "template": "chatml",
        "reward_funcs": "sums",
        "train_iters": steps,
        "lr": 1e-5,
        "lr_warmup_iters": 0,
        "lr_decay_style": "constant",
        "beta": 0.0,
        "seed": 1,
        "weight_decay": 0.0,
        "global_batch_size": PROMPTS * ANSWERS,
        "micro_batch_size": PROMPTS,
        "num_generations": ANSWERS,
        "max_completion_length": 24,
        "recompute_granularity": "none",
        "sleep_level": 0,
        "vllm_gpu_memory_utilization": 0.12,
        "vllm_enforce_eager": "false",
        "vllm_engine_kwargs": json.dumps(ENGINE),
    }
    return rows, options


def visible_gpus() -> list[str]:
    """Return the numbers of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(number) for number in range(len(found.stdout.splitlines()))]


def rewards(out: Path, run: str) -> list[float]:
    """Return a run's mean reward of each step, as ms-swift has noted them."""
    figures = out / run / "logging.jsonl"
    lines = figures.read_text(encoding="utf-8").splitlines() if figures.exists() else []
    steps = [json.loads(line) for line in lines]
    return [step["reward"] for step in steps if "reward" in step]


def with_adapter(rank: int) -> dict:
    """Return the options of ms-swift for an adapter of this rank that vLLM serves."""
    return {
        "tuner_type": "lora",
        "vllm_enable_lora": "true",
        "lora_rank": rank,
        "lora_alpha": 2 * rank,
        "target_modules": "all-linear",
        "lr": 1e-4,
    }


def tell(out: Path, runs: tuple[str, ...]) -> None:
    """Print the rewards in tens of steps, and what was equal; write the curves."""
    curves = {run: rewards(out, run) for run in runs}
    digests = {run: [(sync["way"], sync["weights"]) for sync in noted(out, run).get("0", [])] for run in runs}
    (out / "curves.json").write_text(json.dumps({"rewards": curves, "served": digests}), encoding="utf-8")
    for run, curve in curves.items():
        phases: dict[str, list[float]] = {}
        for name, seconds, _ in by_phase(out / f"{run}.memory", noted(out, run).get("phases", [])):
            phases.setdefault(name, []).append(seconds)
        print(f"{run}, seconds: " + ", ".join(f"{name} {median(each):.2f}" for name, each in phases.items()))
        tens = [curve[at : at + 10] for at in range(0, len(curve), 10)]
        print(f"{run}: {len(curve)} steps, reward " + " ".join(f"{sum(ten) / len(ten):.3f}" for ten in tens))
    if "both" in runs:
        refits, stocks = (
            [weights for way, weights in digests["both"] if way == kind] for kind in ("refit", "stock")
        )
        equal = sum(a == b for a, b in zip(refits, stocks))
        print(
            f"both: equal after {equal} of {len(refits)} syncs, {len(set(refits))} of them different from one another"
        )
    refit, stock = runs[-2:]
    pairs = list(zip(digests[refit], digests[stock]))
    print(
        f"refit and stock: the same weights after {sum(a[1] == b[1] for a, b in pairs)} of {len(pairs)} syncs"
    )
    both = list(zip(curves[refit], curves[stock]))
    print(f"refit and stock: the same reward in {sum(a == b for a, b in both)} of {len(both)} steps")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds that a run may take")
    parser.add_argument("--after", type=float, default=0.0, help="seconds between the starts of two runs")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        from tests.tools.trained import make

        make(out / "model")
    os.environ.update(DETERMINISTIC)

    runs = LORA_RUNS if chosen.lora else RUNS
    gpus = visible_gpus()

    def run(number: int) -> int:
        time.sleep(number * chosen.after)
        rows, options = rows_and_options(chosen.steps)
        options |= with_adapter(chosen.lora) if chosen.lora else {}
        line = [*arguments(out, runs[number], rows, options), *chosen.options]
        return started(out, runs[number], line, chosen.limit, gpus[number % len(gpus)])

    with ThreadPoolExecutor(len(runs)) as pool:
        codes = list(pool.map(run, range(len(runs))))
    print("exit codes: " + ", ".join(f"{name} {code}" for name, code in zip(runs, codes)), flush=True)
    tell(out, runs)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
