"""Trainer and vLLM as plain Ray actors: after each training step vLLM serves the new weights.

    python examples/refit_ray.py [MODEL] [--trainers 2] [--engine-tp 1] [--colocate]

MODEL is a directory with a config.json, or a hub id, of a dense model; without it a small one is
made up, with random weights. The trainer's ranks take a GPU each, the engine `--engine-tp` others;
with `--colocate` one rank and an engine of one GPU take half of the same one each, and the engine
sleeps while the trainer trains. With `--lose 2` the engine is killed in step 2, and another one takes
its place and gets that step's weights. Without GPUs bytes travel over Gloo, and vLLM's build for the
CPU serves. Needs `pip install ray` besides reshard[megatron,vllm].
"""

import argparse
import json
import os
import secrets
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

try:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError:
    sys.exit(f"this example needs Ray, which is not installed here: {sys.executable} -m pip install ray")

SMALL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 128,
         "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
         "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
         "torch_dtype": "bfloat16"}  # fmt: skip


def free_address() -> str:
    """An address of this host, with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


@ray.remote
class Trainer:
    """One rank of a Megatron trainer."""

    def address(self) -> str:
        """Where the first rank can serve."""
        return free_address()

    def start(self, folder: str, rank: int, size: int, address: str) -> None:
        """Build the model, as a trainer would load its own."""
        import torch
        import torch.distributed as dist

        os.environ |= {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": "0",
        }
        from megatron.core.transformer.module import Float16Module

        from reshard import MegatronLayout, read_model
        from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu
        from reshard.trainers import MegatronModel

        self.rank, self.cuda = rank, torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=size)
        layout = MegatronLayout(tp=size)
        with without_gpu():
            initialize_parallel(layout)
            kind = "transformer_engine" if self.cuda else "local"
            models = build_megatron(read_model(folder), layout, transformer_impl=kind)
        self.models = [Float16Module(m.config, m.cuda() if self.cuda else m) for m in models]
        self.source = MegatronModel(self.models)

    def train(self, step: int) -> None:
        """In the place of a training step: other weights."""
        import torch

        for model in self.models:
            for index, parameter in enumerate(model.parameters()):
                torch.manual_seed(1000 * step + index)
                parameter.data.normal_(0, 0.02)

    def connect(self, address: str, size: int, secret: str) -> None:
        """Meet the engine; again after either side was restarted."""
        from reshard import ReshardError
        from reshard.refit import RefitGroup, connect

        if hasattr(self, "link"):
            with suppress(ReshardError):  # of the engine that is gone
                self.link.close()
        members = RefitGroup.join(address, self.rank, size, timeout=300, secret=secret)
        self.link = connect(members, self.source)

    def refit(self, version: int) -> dict:
        """Give the weights."""
        return self.link.refit(version, verify=True).to_dict()


@ray.remote
class Engine:
    """A vLLM."""

    def start(self, folder: str, tp: int, sleeps: bool) -> None:
        """Start it with dummy weights."""
        from vllm import LLM

        memory = {"gpu_memory_utilization": 0.3} if ray.get_gpu_ids() else {"kv_cache_memory_bytes": 1 << 27}
        self.llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            enforce_eager=True,
            tensor_parallel_size=tp,
            enable_sleep_mode=sleeps,
            worker_extension_cls="reshard.engines.vllm.worker.RefitExtension",
            **memory,
        )

    def connect(self, address: str, first_rank: int, size: int, secret: str) -> None:
        """Meet the trainer."""
        options = {"bucket_bytes": 1 << 28, "timeout": 300.0, "secret": secret}
        self.llm.collective_rpc("reshard_connect", args=(address, first_rank, size), kwargs=options)

    def refit(self, version: int) -> list[dict]:
        """Take the weights."""
        reports = self.llm.collective_rpc("reshard_refit", args=(version, True))
        self.llm.reset_prefix_cache()
        return reports

    def sleep(self) -> None:
        """Give the memory away, weights and all."""
        self.llm.sleep(level=2)

    def wake(self, what: str) -> None:
        """Take memory again, of ``weights`` or ``kv_cache``."""
        self.llm.wake_up(tags=[what])

    def generate(self) -> list[int]:
        """A few tokens."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        [output] = self.llm.generate([{"prompt_token_ids": list(range(5, 25))}], greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def is_dead(actor) -> bool:
    """Return True if an actor has died, False if it lives and has failed."""
    try:
        ray.get(actor.__ray_ready__.remote())
    except ray.exceptions.ActorDiedError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engine-tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--colocate", action="store_true")
    parser.add_argument("--lose", type=int)
    options = parser.parse_args()
    if options.colocate and (options.trainers, options.engine_tp) != (1, 1):
        parser.error("--colocate shares one GPU: give --trainers 1 --engine-tp 1")
    if options.lose is not None and not 0 <= options.lose < options.steps:
        parser.error(f"--lose {options.lose} is none of the steps 0 to {options.steps - 1}")
    if options.colocate and options.lose is not None:
        parser.error("--lose starts an engine beside a trainer with weights: leave out --colocate")
    from reshard import read_model

    variables = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ray.init(runtime_env={"env_vars": variables}, include_dashboard=False)
    gpus = int(ray.cluster_resources().get("GPU", 0)) > 0
    sleeps = options.colocate and gpus
    folder = tempfile.mkdtemp()
    config = dict(read_model(options.model).config) if options.model else SMALL
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def on(group, bundle: int, share: float):
        where = (
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            if group
            else "DEFAULT"
        )
        return {"num_cpus": 0, "num_gpus": share if gpus else 0, "scheduling_strategy": where}

    n, tp = options.trainers, options.engine_tp
    # vLLM's workers are children of its actor, which therefore has all of the engine's GPUs.
    group = placement_group([{"GPU": 1, "CPU": 1}] * n) if sleeps else None
    trainers = [Trainer.options(**on(group, rank, 0.5 if group else 1)).remote() for rank in range(n)]

    def new_engine():
        """Make an engine's actor."""
        return Engine.options(**on(group, 0, 0.5 if group else tp)).remote()

    def meet(engine) -> None:
        """Connect all, at a port and with a secret of their own: whoever does not know it is no member."""
        meeting, size, secret = ray.get(trainers[0].address.remote()), n + tp, secrets.token_hex(32)
        connecting = [trainer.connect.remote(meeting, size, secret) for trainer in trainers]
        ray.get([engine.connect.remote(meeting, n, size, secret), *connecting])

    def refit(engine, step: int) -> list[dict]:
        """Refit the engine; return what it reports."""
        refitting = [engine.refit.remote(step), *(trainer.refit.remote(step) for trainer in trainers)]
        return ray.get(refitting)[0]

    engine, address = new_engine(), ray.get(trainers[0].address.remote())
    ray.get(
        [
            engine.start.remote(folder, tp, sleeps),
            *(t.start.remote(folder, r, n, address) for r, t in enumerate(trainers)),
        ]
    )
    meet(engine)
    for step in range(options.steps):
        if sleeps:
            ray.get(engine.sleep.remote())
        ray.get([trainer.train.remote(step) for trainer in trainers])
        if sleeps:
            ray.get(engine.wake.remote("weights"))
        if step == options.lose:
            ray.kill(engine)
        try:
            reports = refit(engine, step)
        except ray.exceptions.RayError:
            if not is_dead(engine):
                raise
            engine = new_engine()
            ray.get(engine.start.remote(folder, tp, sleeps))
            meet(engine)
            reports = refit(engine, step)
        if sleeps:
            ray.get(engine.wake.remote("kv_cache"))
        moved = sum(report["received_bytes"] for report in reports)
        tokens = ray.get(engine.generate.remote())
        print(
            f"step {step}: version {reports[0]['version']}, {moved / 1e6:.1f} MB, then {tokens}", flush=True
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
