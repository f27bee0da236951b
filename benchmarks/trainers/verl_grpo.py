"""A few steps of GRPO by verl on two GPUs, Megatron TP2 and vLLM TP2 colocated: with verl's own
weight sync, and with a refit.

    python -m benchmarks.trainers.verl_grpo OUT [--steps 3] [--layers 4] [--hidden 1024] [--vocabulary 2048]
        [--tp 2] [--pp 1]
        [--gpus 2] [--only both|refit|stock] [--check]

A Qwen3 of random weights with a tokenizer of whole words, and rows of numbers to repeat; `--layers
36 --hidden 4096 --vocabulary 151936` is Qwen3-8B. Written under OUT: each run's log, and what every
worker of vLLM serves after every sync, as digests of its parameters. In the run `both` each step
refits, overwrites vLLM's weights, and lets verl's own sync fill them: both must leave the same bits
after every step. Between the runs `refit` and `stock` the first sync must be equal; later ones are
as far as training itself repeats. Printed: also what verl itself counts of every step. ``--check``
only lets verl compose the config, for which no GPU is needed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.trainers.grpo import compare, compare_runs, model, noted, parser_of, prompt, told, wanted

EXTENSION = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.trainers.verl_watch."
)
RUNS = {
    "stock": [EXTENSION + "Stock"],
    "both": [EXTENSION + "Refit", "actor_rollout_ref.model.external_lib=benchmarks.trainers.verl_both"],
    "refit": [EXTENSION + "Refit", "actor_rollout_ref.model.external_lib=reshard.integrations.verl.plugin"],
}
# What verl counts of a step: seconds, gigabytes, and how far the rollout's probabilities lie from
# the trainer's.
COUNTED = re.compile(
    r"(?:timing_s/(?:step|gen|update_weights|update_actor|old_log_prob)|perf/max_memory_\w+_gb|perf/cpu_memory_used_gb"
    r"|training/rollout_\w+|critic/score/mean):\S+"
)
REWARD = """from benchmarks.trainers.grpo import reward


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return reward(solution_str, ground_truth)
"""


def rows(path: Path, count: int) -> None:
    """Prompts as verl reads them."""
    import pandas

    pandas.DataFrame(
        [
            {
                "data_source": "numbers",
                "prompt": [{"role": "user", "content": prompt(i)}],
                "ability": "repeat",
                "reward_model": {"style": "rule", "ground_truth": wanted(i)},
                "extra_info": {"index": i},
            }
            for i in range(count)
        ]
    ).to_parquet(path)


def lines(out: Path, steps: int, tp: int, pp: int, gpus: int) -> list[str]:
    """The config that both runs have."""
    batch = 8
    rows(out / "rows.parquet", batch)
    (out / "reward.py").write_text(REWARD, encoding="utf-8")
    return [
        "model_engine=megatron",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={out}/rows.parquet",
        f"data.val_files={out}/rows.parquet",
        f"data.train_batch_size={batch}",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"actor_rollout_ref.model.path={out}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tp}",
        f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={pp}",
        "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",
        "actor_rollout_ref.actor.megatron.param_offload=True",
        # verl's own attention backend needs flash-attn.
        "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=auto",
        "actor_rollout_ref.actor.megatron.optimizer_offload=True",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={gpus}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.load_format=dummy",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"reward.custom_reward_function.path={out}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "trainer.logger=[console]",
        f"trainer.n_gpus_per_node={gpus}",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={out}/checkpoints",
    ]


def check(config: list[str]) -> None:
    """Let verl compose the config, and make its own objects of it."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", overrides=config)
    for part in ("rollout", "actor"):
        omega_conf_to_dataclass(composed.actor_rollout_ref[part])


def main() -> None:
    parser = parser_of(__doc__, RUNS)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        model(out / "model", options.layers, options.hidden, options.vocabulary)
    common = lines(out, options.steps, options.tp, options.pp, options.gpus)
    for run in [options.only] if options.only else RUNS:
        if options.check:
            check([*common, *RUNS[run]])
            print(f"{run}: verl takes the config")
            continue
        for old in out.glob(f"{run}.watch.*"):
            old.unlink()
        paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        variables = os.environ | {
            "RESHARD_WATCH": str(out / f"{run}.watch"),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": paths,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with open(out / f"{run}.log", "w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "verl.trainer.main_ppo", *common, *RUNS[run]]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=variables).returncode
        for line in (out / f"{run}.log").read_text(encoding="utf-8", errors="replace").splitlines():
            if "step:" in line and (counted := COUNTED.findall(line)):
                print(f"  {run}: " + ", ".join(counted), flush=True)
        syncs = noted(out, run)
        print(
            f"{run}: exit {code}, syncs by rank { {rank: len(some) for rank, some in syncs.items()} }",
            flush=True,
        )
        for rank, some in syncs.items():
            print(f"  {rank}: " + ", ".join(told(one) for one in some), flush=True)
        if run == "both":
            compare(syncs)
    if not options.check and not options.only:
        compare_runs(out)


if __name__ == "__main__":
    main()
