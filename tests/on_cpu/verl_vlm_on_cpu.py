"""GRPO of a model with its vision tower on the CPU, by verl's own worker, engine of FSDP2, losses and checkpoints, and
a real vLLM that is asked about images; run in an environment with verl:

    python -m tests.on_cpu.verl_vlm_on_cpu HF LINES_OF_CONFIG...
"""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from tests.on_cpu.verl_on_cpu import Server, ended, name
from tests.starting.ranks import free_port
from tests.tools.images import PROMPTS, as_trained, picture

STEPS = 3
IMAGES = [picture(seed) for seed in range(len(PROMPTS))]


class AskedAboutImages(Server):
    """A real vLLM that takes images."""

    def start(self, folder: str, **options) -> None:
        images = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True, "seed": 0}
        super().start(folder, skip_tokenizer_init=False, dtype="float32", **images | options)

    def answers(self) -> list:
        from tests.on_cpu.vlm_on_cpu import answers

        return answers(self.llm)

    def fresh(self, folders: list[str]) -> list:
        """What one answers that has loaded each of these directories."""
        from tests.on_cpu.engine_on_cpu import forget, keep_imports_frozen

        keep_imports_frozen()
        answered = []
        for folder in folders:
            self.start(folder, load_format="safetensors")
            answered.append(self.answers())
            del self.llm
            forget()
        return answered

    def rollout(self) -> list:
        from tests.on_cpu.vlm_on_cpu import rollout

        return rollout(self.llm)


def without_gpu() -> None:
    """Have verl take the CPU for its platform, as it does others that are registered with it."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class PlatformCPU(PlatformCUDA):
        device_name, device_module = "cpu", torch.cpu  # type: ignore[assignment]
        current_device = set_allocator_settings = lambda self, *settings: "cpu"
        manual_seed = manual_seed_all = empty_cache = lambda self, *seeds: None

    for figure in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, figure, lambda: 0)  # which verl logs
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    set_platform(PlatformCPU())


class Policy:
    """A rank of verl's actor: its worker, as its trainer makes it of a config."""

    def start(self, folder: str, config, port: int) -> list[str]:
        """Make the worker; return the classes of its engine and its adapter, as its config says."""
        os.environ |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        without_gpu()
        torch.distributed.init_process_group("gloo")
        from verl.workers.engine_workers import ActorRolloutRefWorker

        self.folder, self.config = Path(folder), config
        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout")
        self.worker.init_model()
        self.before = {n: p.full_tensor().clone() for n, p in self.parameters()}
        return [name(type(part)) for part in (self.worker.actor.engine, self.worker.rollout)]

    def parameters(self):
        return self.worker.actor.engine.module.named_parameters()

    async def sync(self, steps: int) -> list:
        """verl's weight sync after a step; what it raises."""
        return await ended(self.worker.update_weights(global_steps=steps, mode="naive"))

    def save(self, folder: str) -> str:
        """verl's checkpoint of the model, with what lies beside the trained one's weights."""
        self.worker.save_checkpoint(folder)
        saved = Path(folder, "huggingface")
        for beside in self.folder.iterdir():
            if not (saved / beside.name).exists() and beside.suffix != ".safetensors":
                shutil.copy(beside, saved)
        return str(saved)

    def train(self, groups) -> float:
        """A step of GRPO by verl; the largest difference between the logprobs of the rollout and its own."""
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        trainer = SimpleNamespace(config=self.config, distillation_config=None, actor_rollout_wg=self.worker)
        batch, sampled, scores = self.batch(groups)
        inputs = batch.non_tensor_batch["multi_modal_inputs"]
        batch.meta_info |= {
            "temperature": 1.0,
            "global_token_num": batch.batch["attention_mask"].sum(-1).tolist(),
            "images_seqlens": [int(one["image_grid_thw"].prod()) for one in inputs],
        }
        old, _ = RayPPOTrainer._compute_old_log_prob(trainer, batch)
        batch = batch.union(old)
        mask, index = batch.batch["response_mask"], batch.non_tensor_batch["uid"]
        advantages, _ = compute_grpo_outcome_advantage(scores, mask, index)
        batch.batch["advantages"] = advantages
        far = float((batch.batch["old_log_probs"] - sampled).abs().max())
        RayPPOTrainer._update_actor(trainer, batch)
        return far

    def batch(self, groups):
        """Rollouts as verl has them: prompts to the left and answers to the right of the same column, and what its
        processor makes of the images; also the rollout's logprobs, and rewards of the answers' last tokens."""
        import numpy as np
        from verl import DataProto
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

        from tests.on_cpu.vlm_on_cpu import WANTED

        processor = self.worker.actor.model_config.get_processor()
        width = max(
            as_trained(self.folder, p, i, [[]])["input_ids"].shape[1] for p, i in zip(PROMPTS, IMAGES)
        )
        rows, inputs, sampled, scores = [], [], [], []
        for number, (prompt, image, group) in enumerate(zip(PROMPTS, IMAGES, groups, strict=True)):
            for tokens, logprobs in group:
                one = as_trained(self.folder, prompt, image, [tokens])
                ids = one.pop("input_ids")
                left = width + len(tokens) - ids.shape[1]
                mask = torch.nn.functional.pad(torch.ones_like(ids), (left, 0))
                ids = torch.nn.functional.pad(ids, (left, 0))
                positions = AgentLoopWorker._compute_position_ids(
                    SimpleNamespace(processor=processor), ids, mask, one
                )
                rows.append((ids[0], mask[0], positions[0], number))
                inputs.append(one)
                sampled.append(logprobs)
                scores.append([0.0] * (len(tokens) - 1) + [sum(t in WANTED for t in tokens) / len(tokens)])
        ids, masks, positions = (torch.stack(column) for column in list(zip(*rows))[:3])
        response = masks[:, width:]
        batch = DataProto.from_dict(
            tensors={
                "input_ids": ids, "attention_mask": masks, "position_ids": positions, "prompts": ids[:, :width],
                "responses": ids[:, width:], "response_mask": response,
            },
            non_tensors={
                "multi_modal_inputs": np.array(inputs, dtype=object),
                "uid": np.array([number for *_, number in rows], dtype=object),
            },
        )  # fmt: skip
        return batch, torch.tensor(sampled), torch.tensor(scores)

    def untrained(self) -> list[str]:
        return [n for n, p in self.parameters() if torch.equal(self.before[n], p.full_tensor())]


def main() -> None:
    from hydra import compose, initialize_config_module

    hf, *lines = sys.argv[1:]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*lines, f"actor_rollout_ref.model.path={hf}"])
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    remote = ray.remote(AskedAboutImages).options
    policy = ray.remote(Policy).options(num_cpus=0).remote()
    server = remote(name="vllm_server_0_0", num_cpus=0).remote()
    made, _ = ray.get([policy.start.remote(hf, config, free_port()), server.start.remote(hf)])
    results: dict = {"made": made, "syncs": [], "served": [], "furthest": []}
    saved = []
    for step in range(STEPS):
        if step:
            results["furthest"].append(ray.get(policy.train.remote(ray.get(server.rollout.remote()))))
        results["syncs"].append(ray.get(policy.sync.remote(step))[:2])
        results["served"].append(ray.get(server.answers.remote()))
        saved.append(ray.get(policy.save.remote(f"{Path.cwd()}/step{step}")))
    results["untrained"] = ray.get(policy.untrained.remote())
    for actor in (policy, server):
        ray.kill(actor)
    every = [*saved, with_tower_of(saved[0], saved[-1])]
    results["loaded"] = ray.get(remote(num_cpus=0).remote().fresh.remote(every))
    ray.shutdown()
    print("SAID " + json.dumps(results, default=str))


def with_tower_of(first: str, last: str) -> str:
    """A directory with the language model of the last and the tower of the first."""
    made = f"{last}-with-first-tower"
    shutil.copytree(last, made)
    tower = {n: t for n, t in load_file(f"{first}/model.safetensors").items() if "visual." in n}
    tensors = load_file(f"{last}/model.safetensors") | tower
    save_file(tensors, f"{made}/model.safetensors", metadata={"format": "pt"})
    return made


if __name__ == "__main__":
    from tests.on_cpu import verl_vlm_on_cpu

    verl_vlm_on_cpu.main()  # whose classes Ray finds by the name of a module
