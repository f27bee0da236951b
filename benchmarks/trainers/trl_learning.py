"""GRPO of a trained model by TRL under FSDP 2, with TRL's own weight sync and with a refit: is it the same training?

    python -m benchmarks.trainers.trl_learning OUT [--steps 12] [--ranks 2] [--sleep]

SmolLM2-135M-Instruct (tests/tools/trained.py) is asked for sums of two numbers up to 20; an answer whose last number is
the sum is worth 1. Two runs with the same seeds, one after the other: `stock` with TRL's own sync, `refit` with
`reshard.integrations.trl`. Each rank of the trainer has a vLLM of its own; with `--sleep` that sleeps while TRL trains.
It runs without a GPU, too, in an environment with TRL and vLLM's build for the CPU. What PyTorch has of it is
deterministic.

Written under OUT: each run's log, and its figures of each step and sync. Printed: the rewards, whether the served
weights and TRL's figures of each step were equal, and the seconds of a sync.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.trainers.grpo import DETERMINISTIC, deterministic, digest, sums

RUNS = ("stock", "refit")
PROMPTS, ANSWERS = 4, 8  # of a step
TIMES = re.compile("time|runtime|per_second|duration")  # figures that no two runs have alike


def is_right(completions: list[Any], total: list[str], **_: Any) -> list[float]:
    """Return 1 for each answer whose last number is the sum."""
    numbers = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [float(found[-1:] == [wanted]) for found, wanted in zip(numbers, total, strict=True)]


def train(kind: str, out: Path, steps: int, sleep: bool) -> None:
    """Train on this rank; the first one writes what was noted."""
    from tests.on_cpu.trl_on_cpu import served_model, trainer_of, with_fsdp2

    with_fsdp2()
    deterministic()
    on_gpu = torch.cuda.is_available()
    if kind == "refit":
        from reshard.integrations import trl

        trl.use()
    ranks, asked = int(os.environ["WORLD_SIZE"]), sums(PROMPTS * steps)
    rows = {"prompt": [messages for messages, _ in asked], "total": [total for _, total in asked]}
    trainer = trainer_of(
        str(out / "model"), out / kind, None, is_right, rows, cache=1 << 28,
        use_cpu=not on_gpu, max_steps=steps, learning_rate=1e-5,
        lr_scheduler_type="constant", beta=0.0, num_generations=ANSWERS, max_completion_length=16, logging_steps=1,
        per_device_train_batch_size=PROMPTS * ANSWERS // ranks, vllm_mode="colocate", vllm_max_model_length=128,
        vllm_tensor_parallel_size=1, vllm_gpu_memory_utilization=0.1, vllm_enable_sleep_mode=sleep,
    )  # fmt: skip
    generation, syncs = trainer.vllm_generation, []
    own = generation.sync_weights

    def noted() -> None:
        start = time.perf_counter()
        own()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        syncs.append((seconds, digest(served_model(generation))))

    generation.sync_weights = noted
    trainer.train()
    if trainer.accelerator.is_main_process:
        steps_noted = [entry for entry in trainer.state.log_history if "reward" in entry and "loss" in entry]
        (out / f"{kind}.json").write_text(
            json.dumps({"steps": steps_noted, "syncs": syncs}), encoding="utf-8"
        )
    os._exit(0)  # vLLM's shut-down would wait for processes that have no more to say


def tell(out: Path) -> None:
    """Print what two runs had alike."""
    stock, refit = (json.loads((out / f"{run}.json").read_text(encoding="utf-8")) for run in RUNS)
    for run, noted in zip(RUNS, (stock, refit), strict=True):
        rewards = " ".join(f"{step['reward']:.3f}" for step in noted["steps"])
        seconds = [seconds for seconds, _ in noted["syncs"]]
        print(
            f"{run}: rewards {rewards}; a sync takes {median(seconds[1:]):.4f} s, the first {seconds[0]:.4f} s"
        )
    served = [(a, b) for (_, a), (_, b) in zip(stock["syncs"], refit["syncs"], strict=True)]
    different = len({digest for digest, _ in served})
    print(
        f"the same weights after {sum(a == b for a, b in served)} of {len(served)} syncs, {different} different ones"
    )
    figures = [
        [{name: value for name, value in step.items() if not TIMES.search(name)} for step in run["steps"]]
        for run in (stock, refit)
    ]
    equal = sum(a == b for a, b in zip(*figures, strict=True))
    print(f"the same {len(figures[0][0])} figures in {equal} of {len(figures[0])} steps")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--train", choices=RUNS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    if chosen.train:
        train(chosen.train, out, chosen.steps, chosen.sleep)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        from tests.tools.trained import make

        make(out / "model")
    for run in RUNS:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(chosen.ranks), "-m",
            "benchmarks.trainers.trl_learning", str(out), "--steps", str(chosen.steps), "--train", run,
            *["--sleep"] * chosen.sleep,
        ]  # fmt: skip
        with open(out / f"{run}.log", "w", encoding="utf-8") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, env=os.environ | DETERMINISTIC)
    tell(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
