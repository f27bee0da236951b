"""What the real verl makes of our module and of the lines of config; run in an environment with verl: python -m tests.verl_on_cpu HF"""

import inspect
import json
import os
import sys

os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}


def name(found) -> str:
    """A class, by where it is."""
    return f"{found.__module__}.{found.__qualname__}"


def takes(ours, theirs) -> list[str]:
    """The methods of ours that cannot be called as theirs are."""
    wrong = []
    for key, method in vars(ours).items():
        if inspect.isfunction(method) and hasattr(theirs, key) and not key.startswith("__"):
            mine, its = (inspect.signature(m).parameters for m in (method, getattr(theirs, key)))
            anything = any(p.kind is p.VAR_KEYWORD for p in mine.values())
            if not anything and any(
                p not in mine for p, about in its.items() if about.kind is not about.VAR_KEYWORD
            ):
                wrong.append(key)
    return wrong


def main() -> None:
    from hydra import compose, initialize_config_module
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import MegatronEngineWithLMHead
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    said: dict = {
        "before": [
            name(EngineRegistry.get_engine_cls("language_model", "megatron")),
            name(get_rollout_class("vllm")),
        ]
    }
    lines = [*sys.argv[2:], f"actor_rollout_ref.model.path={sys.argv[1]}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    # As an actor does it; this is what imports our module.
    omega_conf_to_dataclass(config.actor_rollout_ref.model)
    said["after"] = [
        name(EngineRegistry.get_engine_cls("language_model", "megatron")),
        name(get_rollout_class("vllm")),
    ]
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    said["extension"] = rollout.engine_kwargs["vllm"]["worker_extension_cls"]

    from reshard.trainers import verl
    from reshard.trainers.verl_worker import VerlExtension

    said["options"] = verl.options_of(rollout)
    rollout.checkpoint_engine.engine_kwargs["reshard"] = {"verfy": True}
    try:
        verl.options_of(rollout)
    except verl.ReshardError as error:
        said["a wrong option"] = str(error)

    from vllm.v1.worker.gpu_worker import Worker

    said["in vLLM's worker too"] = [
        a for a in dir(VerlExtension) if not a.startswith("__") and hasattr(Worker, a)
    ]
    said["order"] = [base.__name__ for base in VerlExtension.__mro__[1:3]]
    said["called otherwise"] = [
        *takes(verl.ReshardMegatronEngine, MegatronEngineWithLMHead), *takes(verl.ReshardServerAdapter, ServerAdapter),
        *takes(verl.ReshardCheckpointEngine, CheckpointEngine),
    ]  # fmt: skip
    said["control"] = takes(
        type("Other", (), {"prepare": lambda self: 0, "send_weights": lambda self: 0}), CheckpointEngine
    )
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    said["meeting"] = meetings(CheckpointEngineRegistry.get("reshard"))
    said["live"] = live(sys.argv[1], config)
    ray.shutdown()
    print("SAID " + json.dumps(said, default=str))


def meetings(kind) -> list:
    """Two syncs of two ranks of an actor and two workers, and one after a worker was replaced, as verl's manager calls them."""
    members = [kind(bucket_size=1, is_master=index == 0) for index in range(4)]
    found = []
    for sync in range(3):
        if sync == 2:
            members[3] = kind(bucket_size=1)
        actor, rollout = kind.build_topology(2, 2, [one.prepare() for one in members])
        for index, one in enumerate(members):
            side, at = (actor, index) if index < 2 else (rollout, index - 2)
            one.init_process_group(**{key: values[at] for key, values in side.items()})
        found.append([list(one.receive_weights(sync)) for one in members[2:]])
        for one in members[:2]:  # which would have sent, and been connected
            one.new = False
    return found


class Server:
    """What verl's server of vLLM offers its adapter, with a real vLLM."""

    def start(self, folder: str) -> None:
        # The worker in this process: those of its own would import vLLM anew.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self.llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, enforce_eager=True,
                       kv_cache_memory_bytes=1 << 24, worker_extension_cls="reshard.trainers.verl_worker.VerlExtension")  # fmt: skip
        self.told: list = []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None) -> None:
        self.llm.collective_rpc(method, timeout, args, kwargs)

    def clear_kv_cache(self) -> None:
        self.told.append("cleared")
        self.llm.reset_prefix_cache()

    def set_global_steps(self, steps: int) -> None:
        self.told.append(steps)

    def serves(self) -> tuple:
        """The version that the worker has, what it was told, and tokens."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        [output] = self.llm.generate([{"prompt_token_ids": list(range(5, 25))}], greedy, use_tqdm=False)
        return self.llm.collective_rpc("reshard_version"), self.told, list(output.outputs[0].token_ids)


class Actor:
    """A rank of a trainer, with verl's adapter as its config makes it."""

    def start(self, folder: str, config) -> None:
        import torch.distributed as dist
        from megatron.core.transformer.module import Float16Module

        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "RAY_LOCAL_WORLD_SIZE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        import reshard.trainers.verl as verl
        from reshard import Layout, read_model
        from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with without_gpu():
            initialize_parallel(Layout())
            models = build_megatron(read_model(folder), Layout(), transformer_impl="local")
        self.models = [Float16Module(model.config, model) for model in models]
        self.shards = verl.Shards(verl.MegatronModel(self.models))
        from verl.workers.rollout.base import get_rollout_class

        self.adapter = get_rollout_class("vllm")(config=config.rollout, model_config=None, device_mesh=None)

    async def sync(self, steps: int, lost: bool = False) -> str:
        """Other weights, and verl's call; what it raises. With `lost`, the connection is gone."""
        import torch

        for model in self.models:
            for index, parameter in enumerate(model.parameters()):
                torch.manual_seed(1000 * steps + index)
                parameter.data.normal_(0, 0.02)
        if lost:
            self.adapter._link.members.timeout = 0.0
        try:
            await self.adapter.update_weights(
                self.shards, global_steps=steps, peft_config=None, base_sync_done=True
            )
        except Exception as error:
            return type(error).__name__
        return "no error"


def live(folder: str, config) -> list:
    """Syncs by verl's adapter into a real vLLM, one of which fails."""
    import ray

    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    server = ray.remote(Server).options(name="vllm_server_0_0", num_cpus=0).remote()
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    ray.get([server.start.remote(folder), actor.start.remote(folder, config.actor_rollout_ref)])
    found = []
    for steps, lost in ((3, False), (4, False), (5, True), (6, False)):
        said = ray.get(actor.sync.remote(steps, lost))
        found.append([said, *(ray.get(server.serves.remote()) if said == "no error" else ())])
    return found


if __name__ == "__main__":
    main()
