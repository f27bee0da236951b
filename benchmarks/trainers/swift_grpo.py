"""A few steps of GRPO by ms-swift's Megatron on one GPU, or split over several by `--tp`, vLLM colocated: with its own
weight sync, and with a refit.

    python -m benchmarks.trainers.swift_grpo OUT [--steps 3] [--layers 4] [--hidden 1024] [--vocabulary 2048]
        [--tower] [--tp 1] [--only both|refit|stock]
        [--sleep 1] [--limit 900] [--options OPTIONS OF MS-SWIFT]

A Qwen3 of random weights with a tokenizer of whole words, and rows of words to repeat; `--layers 36
--hidden 4096 --vocabulary 151936` is Qwen3-8B. ms-swift is started by its own entry (`megatron
rlhf`), with a plugin that notes its phases and syncs. In the run `both` each step overwrites vLLM's
weights, refits, overwrites them again, and lets ms-swift's own sync fill them: both must leave the
same bits. Between the runs `refit` and `stock` the first sync must be equal; later ones are as far
as training itself repeats.

With `--tower` it is a Qwen3-VL, whose tower has as many layers and is trained, too; each prompt has a picture, a word
of an even number is worth something, and all of PyTorch that can be is deterministic.

Written under OUT: each run's log, ms-swift's own figures of each step, what vLLM serves after every
sync, as digests of its parameters, the phases, and what the GPU holds each 0.2 s. Printed: seconds
of each sync, most memory by phase, and ms-swift's figures.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.trainers.grpo import (
    DETERMINISTIC,
    by_phase,
    compare,
    compare_runs,
    memory,
    model,
    model_with_tower,
    noted,
    parser_of,
    picture,
    prompt,
    told,
    wanted,
)

RUNS = ("both", "refit", "stock")
PROMPTS, ANSWERS = 8, 4
FIGURES = (
    "loss", "grad_norm", "reward", "reward_std", "kl", "entropy/entropy_mean", "completions/mean_length",
    "rollout_correction/kl", "rollout_correction/k3_kl", "rollout_correction/training_log_ppl",
    "rollout_correction/rollout_log_ppl", "rollout_correction/log_ppl_abs_diff", "rollout_correction/chi2_token",
    "memory(GiB)", "elapsed_time",
)  # fmt: skip


def repeating(steps: int, sleep: int) -> tuple[list[dict], dict]:
    """Return the rows of words to repeat, and the options of ms-swift that go with them."""
    rows = [
        {"messages": [{"role": "user", "content": prompt(row)}], "worth": wanted(row)}
        for row in range(4 * PROMPTS)
    ]
    options = {
        "model_type": "qwen3", "template": "dummy", "reward_funcs": "repeats", "train_iters": steps, "lr": 1e-5,
        "global_batch_size": PROMPTS * ANSWERS, "micro_batch_size": 4, "num_generations": ANSWERS,
        "max_completion_length": 64, "offload_model": "true", "offload_optimizer": "true", "sleep_level": sleep,
        "vllm_gpu_memory_utilization": 0.4, "vllm_enforce_eager": "true",
    }  # fmt: skip
    return rows, options


def looking(out: Path, steps: int, sleep: int) -> tuple[list[dict], dict]:
    """Return rows of words with a picture, and the options of ms-swift that go with them: the tower is trained."""
    options, rows = repeating(steps, sleep)[1], []
    (out / "pictures").mkdir(exist_ok=True)
    for row in range(4 * PROMPTS):
        file = out / "pictures" / f"{row}.png"
        picture(file, row)
        asked = {"role": "user", "content": f"<image>{prompt(row)}"}
        rows.append({"messages": [asked], "images": [str(file)]})
    options |= {
        "model_type": "qwen3_vl", "template": "qwen3_vl", "freeze_vit": "false", "freeze_aligner": "false",
        "reward_funcs": "evens", "lr": 1e-4, "lr_warmup_iters": 0, "lr_decay_style": "constant", "max_length": 128,
        "max_completion_length": 32, "vllm_limit_mm_per_prompt": json.dumps({"image": 1, "video": 0}),
    }  # fmt: skip
    return rows, options


def arguments(out: Path, run: str, rows: list[dict], chosen: dict) -> list[str]:
    """Write the rows and the plugin of a run under `out`; return the command line of ms-swift."""
    data = out / f"{run}.rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # ms-swift puts a plugin's folder first among those that modules are imported from: nothing else
    # lies there.
    (out / f"plugin-{run}").mkdir(exist_ok=True)
    plugin = out / f"plugin-{run}" / "plugin_of_benchmark.py"
    plugin.write_text(
        f"from benchmarks.trainers import swift_watch\n\nswift_watch.use({run!r})\n", encoding="utf-8"
    )
    options = {
        "rlhf_type": "grpo", "model": out / "model", "use_hf": "true", "check_model": "false",
        "dataset": data, "load_from_cache_file": "false", "split_dataset_ratio": 0, "dataset_num_proc": 1,
        "dataloader_num_workers": 0, "external_plugins": plugin, "report_to": "steps",
        "bf16": "true", "finetune": "true", "logging_steps": 1, "save_steps": 1000000, "eval_iters": 0,
        "steps_per_generation": 1, "max_length": 64, "temperature": 1.0,
        "attention_backend": "auto", "padding_free": "false",  # its own, flash with packed rows, need flash-attn
        "log_rollout_offpolicy_metrics": "true", "log_entropy": "true",
        "use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_len": 256, "output_dir": out / run,
        "add_version": "false",
    }  # fmt: skip
    return [part for key, value in (options | chosen).items() for part in (f"--{key}", str(value))]


def main() -> int:
    parser = parser_of(__doc__, RUNS)
    parser.add_argument("--tower", action="store_true", help="a Qwen3-VL whose tower is trained, too")
    parser.add_argument(
        "--tp", type=int, default=1, help="GPUs that share each layer, of Megatron and of vLLM"
    )
    parser.add_argument("--sleep", type=int, choices=[0, 1, 2], default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one run may take")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.tower:
        os.environ.update(DETERMINISTIC)
        rows_and_options = looking(out, options.steps, options.sleep)
    else:
        rows_and_options = repeating(options.steps, options.sleep)
    rows_and_options[1].update(tensor_model_parallel_size=options.tp, vllm_tensor_parallel_size=options.tp)
    if not (out / "model").exists():
        # in a process of its own, which leaves nothing on the GPU
        size = (out / "model", options.layers, options.hidden)
        make, more = (model_with_tower, ()) if options.tower else (model, (options.vocabulary,))
        making = multiprocessing.get_context("spawn").Process(target=make, args=(*size, *more))
        making.start()
        making.join()
        assert not making.exitcode, "the model could not be made"
    codes = []
    for run in [options.only] if options.only else RUNS:
        for old in out.glob(f"{run}.watch.*"):
            old.unlink()
        shutil.rmtree(out / run, ignore_errors=True)
        code = started(
            out,
            run,
            [*arguments(out, run, *rows_and_options), *options.options],
            options.limit,
            ",".join(map(str, range(options.tp))),
        )
        codes.append(code)
        print(f"{run}: exit {code}", flush=True)
        tell(out, run)
    if not options.only:
        compare_runs(out)
    return int(any(codes))


def started(out: Path, run: str, line: list[str], limit: float, gpus: str = "0") -> int:
    """Run ms-swift's own entry with this command line, as ``megatron`` calls it, on these GPUs for at
    most `limit` seconds; return its exit code."""
    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    variables = os.environ | {
        "RESHARD_WATCH": str(out / f"{run}.watch"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": paths,
        "NPROC_PER_NODE": str(len(gpus.split(","))),
        "MASTER_PORT": port,
        "CUDA_VISIBLE_DEVICES": gpus,
    }
    command = [sys.executable, "-m", "swift.cli._megatron.main", "rlhf", *line]
    with (
        open(out / f"{run}.log", "w", encoding="utf-8") as log,
        memory(out / f"{run}.memory", gpus.split(",")[0]),
    ):
        running = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            return running.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(
                running.pid, signal.SIGTERM
            )  # torchrun ends its own, which are in a session of their own
            running.wait()
            time.sleep(10)
            return 124


def tell(out: Path, run: str) -> None:
    """What one run has left."""
    found = noted(out, run)
    phases = found.pop("phases", [])
    for rank, some in found.items():
        print(f"  rank {rank}: " + ", ".join(told(one) for one in some), flush=True)
    if run == "both":
        compare(found)
    for name, seconds, held in by_phase(out / f"{run}.memory", phases):
        print(f"  {name}: {seconds:.2f} s, at most {held / 2**30:.1f} GiB")
    figures = out / run / "logging.jsonl"
    for line in figures.read_text(encoding="utf-8").splitlines() if figures.exists() else []:
        step = json.loads(line)
        if "iteration" in step:
            shown = ", ".join(f"{name} {step[name]}" for name in FIGURES if name in step)
            print(f"  step {step['iteration']}: {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
