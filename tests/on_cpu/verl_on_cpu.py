"""What the real verl makes of our module and of the lines of config; run in an environment with
verl: python -m tests.on_cpu.verl_on_cpu HF HF_WITH_A_TOWER"""

import inspect
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from reshard.core.errors import ReshardError
from tests.tools.probe import Probed, adapter_in_slot, alone, caught, train_adapter, with_adapter

SECRET = "between these two processes"
os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}


def name(results) -> str:
    """A class, by where it is."""
    return f"{results.__module__}.{results.__qualname__}"


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
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead
    from verl.workers.engine.megatron import MegatronEngineWithLMHead
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    outcome: dict = {
        "before": [
            name(EngineRegistry.get_engine_cls("language_model", "megatron")),
            name(EngineRegistry.get_engine_cls("language_model", "fsdp2")),
            name(get_rollout_class("vllm")),
        ]
    }
    lines = [*sys.argv[3:], f"actor_rollout_ref.model.path={sys.argv[1]}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    # As an actor does it; this is what imports our module.
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    outcome["after"] = [
        name(EngineRegistry.get_engine_cls("language_model", "megatron")),
        name(EngineRegistry.get_engine_cls("language_model", "fsdp2")),
        name(get_rollout_class("vllm")),
    ]
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    outcome["extension"] = rollout.engine_kwargs["vllm"]["worker_extension_cls"]

    from reshard.integrations.verl import plugin as verl
    from reshard.integrations.verl.vllm import ReshardServerAdapter
    from reshard.integrations.verl.worker import VerlExtension

    outcome["adapters"] = adapters(verl, model)
    outcome["options"] = verl.options_of(rollout).to_config()
    outcome["wrong options"] = []
    for given in ({"verfy": True}, {"verify": 1}, {"timeout": 0}, {"backend": "bucket"}, {"begin": True}):
        rollout.checkpoint_engine.engine_kwargs["reshard"] = given
        outcome["wrong options"].append(caught(lambda: verl.options_of(rollout)))

    from vllm.v1.worker.gpu_worker import Worker

    outcome["in vLLM's worker too"] = [
        a for a in dir(VerlExtension) if not a.startswith("__") and hasattr(Worker, a)
    ]
    outcome["order"] = [base.__name__ for base in VerlExtension.__mro__[1:3]]
    outcome["called otherwise"] = [
        *takes(verl.ReshardMegatronEngine, MegatronEngineWithLMHead),
        *takes(verl.ReshardFsdpEngine, FSDPEngineWithLMHead),
        *takes(ReshardServerAdapter, ServerAdapter),
        *takes(verl.ReshardCheckpointEngine, CheckpointEngine),
    ]
    outcome["control"] = takes(
        type("Other", (), {"prepare": lambda self: 0, "send_weights": lambda self: 0}), CheckpointEngine
    )
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    outcome["meeting"] = meetings(CheckpointEngineRegistry.get("reshard"))
    outcome["live"] = live(sys.argv[1], config)
    outcome["with a tower"] = with_a_tower(sys.argv[2], config)
    ray.shutdown()
    print("SAID " + json.dumps(outcome, default=str))


def adapters(verl, model) -> list:
    """By settings of LoRA: the adapter's name in vLLM, and why verl's own way is taken."""
    results = []
    for lora in ({}, {"rank": 8}, {"rank": 8, "merge": True}):
        model.lora.update({"rank": 0, "merge": False} | lora)
        engine = SimpleNamespace(peft_cls=object() if lora else None, model_config=model)
        results.append([verl.adapter_of(model), verl.left_to_verl(engine)])
    return results


def meetings(kind) -> list:
    """Two syncs of two ranks of an actor and two workers, and one after a worker was replaced, as
    verl's manager calls them."""
    members = [kind(bucket_size=1, is_master=index == 0) for index in range(4)]
    results = []
    for sync in range(3):
        if sync == 2:
            members[3] = kind(bucket_size=1)
        actor, rollout = kind.build_topology(2, 2, [one.prepare() for one in members])
        for index, one in enumerate(members):
            side, at = (actor, index) if index < 2 else (rollout, index - 2)
            one.init_process_group(**{key: values[at] for key, values in side.items()})
        invitations = [one.receive_weights(sync) for one in members[2:]]
        results.append([
            [*(meeting[key] for key in ("address", "first_rank", "size", "secret")), is_new]
            for meeting, is_new in invitations
        ])  # fmt: skip
        for one in members[:2]:  # which would have sent, and been connected
            one.is_new = False
    return results


class Server:
    """What verl's server of vLLM offers its adapter, with a real vLLM."""

    def start(self, folder: str, **options) -> None:
        # The worker in this process: those of its own would import vLLM anew.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        plain = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        self.llm = LLM(
            folder,
            max_model_len=64,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 24,
            worker_extension_cls="reshard.integrations.verl.VerlExtension",
            **plain | options,
        )
        self.told: list = []
        self.waits, self.dies = "", ""

    def wait_for(self, file: str) -> None:
        """Nothing is passed on to the worker before there is a file of this name."""
        self.waits = file

    def die_at(self, method: str) -> None:
        """Instead of passing this on to the worker."""
        self.dies = method

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None) -> None:
        if method == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.waits and not Path(self.waits).exists():
            time.sleep(0.01)
        self.llm.collective_rpc(method, timeout, args, kwargs)

    def clear_kv_cache(self) -> None:
        self.told.append("cleared")
        self.llm.reset_prefix_cache()

    def set_global_steps(self, steps: int) -> None:
        self.told.append(steps)

    def in_slot(self, folder: str = "") -> list:
        """What vLLM has of verl's adapter and answers as verl asks; or what it has loaded of a directory itself."""
        from vllm.lora.request import LoRARequest

        [[digests, listed]] = self.llm.collective_rpc(adapter_in_slot, args=("123", folder))
        # As verl's server asks, where vLLM lists it.
        request = LoRARequest("123", 123, "simon_lora_path") if 123 in listed else None
        return [digests, listed, [] if folder else self.tokens(request)]

    def tokens(self, adapter) -> list[int]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        prompt = [{"prompt_token_ids": list(range(5, 25))}]
        [output] = self.llm.generate(prompt, greedy, use_tqdm=False, lora_request=adapter)
        return list(output.outputs[0].token_ids)

    def serves(self) -> tuple:
        """The version that the worker has, what it was told, tokens, and digests of all its parameters."""
        return self.llm.collective_rpc("reshard_version"), self.told, *self.holds()

    def holds(self) -> tuple:
        """Tokens, and digests of all its parameters."""
        [digests] = self.llm.collective_rpc(Probed.digests)
        return self.tokens(None), digests


class Actor:
    """A rank of a trainer, with verl's adapter as its config makes it."""

    def adapt(self, config) -> None:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "RAY_LOCAL_WORLD_SIZE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        from verl.workers.rollout.base import get_rollout_class

        import reshard.integrations.verl.plugin  # noqa: F401

        self.adapter = get_rollout_class("vllm")(config=config.rollout, model_config=None, device_mesh=None)

    def start(self, folder: str, config) -> None:
        import torch.distributed as dist
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        self.adapt(config)
        import reshard.integrations.verl.plugin as verl
        from reshard import MegatronLayout, read_model
        from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        with without_gpu():
            initialize_parallel(MegatronLayout())
            models = build_megatron(read_model(folder), MegatronLayout(), transformer_impl="local")
            models = [Float16Module(model.config, model) for model in models]
            models = [DistributedDataParallel(model.config, ddp, model) for model in models]
        # What verl's engine has once it is initialized, of which its methods here make use.
        self.engine = object.__new__(verl.ReshardMegatronEngine)
        self.engine.module, self.engine.peft_cls, self.engine.model_config = models, None, None
        self.loads = loads_of(verl)

    def start_fsdp(self, folder: str, config) -> None:
        """With a whole model under FSDP2, in fp32."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForImageTextToText
        from verl.utils import fsdp_utils

        self.adapt(config)
        import reshard.integrations.verl.plugin as verl

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fsdp_utils.get_device_id = lambda: "cpu"
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (1,))
        for layer in (*model.model.language_model.layers, *model.model.visual.blocks):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.engine = object.__new__(verl.ReshardFsdpEngine)
        self.engine.module = model

    async def sync_fsdp(self, steps: int, saved: str) -> list:
        """A step of training, after which the model is saved and verl offloads it, and a sync in verl's order; what it
        raises."""
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from verl.utils.fsdp_utils import offload_fsdp_model_to_cpu

        model = self.engine.module
        torch.manual_seed(steps)
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local()
                local.add_(torch.randn_like(local).mul(0.02))
        state = {key: one.full_tensor() for key, one in model.state_dict().items()}
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
        model.save_pretrained(saved, state_dict=state)
        offload_fsdp_model_to_cpu(model)
        weights, peft_config = self.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        options = {"global_steps": steps, "peft_config": peft_config, "base_sync_done": True}
        outcome = await ended(self.adapter.update_weights(weights, **options))
        offload_fsdp_model_to_cpu(model)
        return outcome

    def left(self) -> dict[str, str]:
        """Why verl's own way is taken, by what is changed of this engine."""
        import torch

        import reshard.integrations.verl.plugin as verl
        from tests.tools.model_classes import config_of

        engine, results = self.engine, {"fits": verl.fsdp_left_to_verl(self.engine)}
        for key in ("_qat_enabled", "_uses_fsdp2_cpu_offload_policy"):
            setattr(engine, key, True)
            results[key] = verl.fsdp_left_to_verl(engine)
            setattr(engine, key, False)
        engine.module.peft_config = {}
        results["peft"] = verl.fsdp_left_to_verl(engine)
        del engine.module.peft_config
        model, engine.module = engine.module, torch.nn.Linear(1, 1)
        results["whole"] = verl.fsdp_left_to_verl(engine)
        engine.module = model
        for kind, adapted in (("multimodal", None), ("multimodal, adapted", object())):
            of_megatron = SimpleNamespace(
                model_config=SimpleNamespace(hf_config=model.config, lora={"rank": 8}), peft_cls=adapted
            )
            results[kind] = verl.left_to_verl(of_megatron)
        of_megatron.peft_cls, of_megatron.engine_config = None, SimpleNamespace(vanilla_mbridge=True)
        results["by mbridge"] = verl.left_to_verl(of_megatron)
        of_megatron.model_config.hf_config = config_of("Qwen2_5_VLForConditionalGeneration")
        results["another by mbridge"] = verl.left_to_verl(of_megatron)
        of_megatron.engine_config.vanilla_mbridge = False
        results["another"] = verl.left_to_verl(of_megatron)
        return results

    async def sync(
        self, steps: int, lost: str = "", new: bool = False, seed: int | None = None, several: int = 1
    ) -> list:
        """A step of training, after which verl offloads the model, and a sync in verl's order; what it raises,
        after how many seconds, how often the model was loaded for it, and the bytes of its parameters that
        were on the GPU at its end. With `lost`, this side waits for nobody, and leaves a file of that name
        when it has given up; with `new` all meet anew; `several` is how often engines read each number."""
        from verl.utils.megatron_utils import offload_megatron_model_to_cpu

        self.train(steps if seed is None else seed)
        offload_megatron_model_to_cpu(self.engine.module)
        if lost:
            alone(self.adapter._sync.link, lost)
        if new:
            self.adapter._sync.link = None
        if several > 1:
            sender = self.adapter._sync.link.sender
            sender.sizes = sender.sizes._replace(shapes=sender.sizes.shapes // [several, 1])
        self.loads.clear()
        weights, peft_config = self.engine.get_per_tensor_param(base_sync_done=True)
        options = {"global_steps": steps, "peft_config": peft_config, "base_sync_done": True}
        outcome = await ended(self.adapter.update_weights(weights, **options))
        loaded = sum(buffer.param_data.untyped_storage().nbytes() for buffer in self.engine.module[0].buffers)
        offload_megatron_model_to_cpu(self.engine.module)
        return [*outcome, len(self.loads), loaded]

    def train(self, seed: int) -> None:
        """Other weights, on the GPU."""
        import torch
        from verl.utils import megatron_utils

        megatron_utils.load_megatron_model_to_gpu(self.engine.module)
        for model in self.engine.module:
            for index, parameter in enumerate(model.parameters()):
                torch.manual_seed(1000 * seed + index)
                parameter.data.normal_(0, 0.02)

    def train_adapter(self, folder: str, seed: int, saved: str) -> None:
        """Other numbers in an adapter, and its files. It is PEFT's: Megatron-Bridge's is not in this environment."""
        from reshard.integrations.verl.plugin import Shards
        from reshard.trainers.fsdp import FsdpModel

        if not hasattr(self, "adapted"):
            self.adapted = with_adapter(folder)
            self.adapted_shards = Shards(FsdpModel(self.adapted), "123")
            # All meet anew, at another server.
            self.adapter._sync.link = self.adapter.server_handle = None
        train_adapter(self.adapted, seed, saved)

    async def sync_adapter(self, steps: int) -> list:
        """verl's call; what it raises."""
        options = {"global_steps": steps, "peft_config": None, "base_sync_done": True}
        return await ended(self.adapter.update_weights(self.adapted_shards, **options))

    async def send(self, address: str) -> list:
        """As verl's actor does where it has GPUs of its own: with the adapter that another process has."""
        from reshard.integrations.verl.plugin import ReshardCheckpointEngine

        engine = ReshardCheckpointEngine(timeout=60)
        engine.init_process_group(0, 2, address, [], SECRET, True)
        weights, _ = self.engine.get_per_tensor_param()
        return await ended(engine.send_weights(weights, 1))

    async def receive(self, address: str) -> list:
        """As verl's worker beside an engine elsewhere does."""
        return await ended(self.adapter.update_weights(invited(address), global_steps=1))


def invited(address: str):
    """What a worker gets of the checkpoint engine beside it, that has to connect as the second of two members."""
    from reshard.integrations.sync import Meeting
    from reshard.integrations.verl.plugin import Invitation

    return Invitation(Meeting(address, 2, 60.0, SECRET).arguments(1), True)


def loads_of(verl) -> list:
    """A list that grows by what our module lets verl load; verl's functions work without a GPU from then on."""
    import torch
    from verl.utils import megatron_utils

    plain, load, loads = torch.empty, verl.load_megatron_model_to_gpu, []
    megatron_utils.get_device_id = lambda: "cpu"
    torch.empty = lambda *sizes, pin_memory=False, **options: plain(*sizes, **options)

    def counted(models, **options):
        loads.append(options)
        load(models, **options)

    verl.load_megatron_model_to_gpu = counted
    return loads


async def ended(call) -> list:
    """What a call raises, by type and text, and after how many seconds."""
    began, wrong = time.monotonic(), ["no error", ""]
    try:
        await call
    except Exception as error:
        wrong = ["ReshardError" if isinstance(error, ReshardError) else type(error).__name__, str(error)]
    return [*wrong, time.monotonic() - began]


def live(folder: str, config) -> dict:
    """Syncs by verl's adapter into a real vLLM, one of which fails; and syncs before which the
    engine's process dies, in either placement."""
    import ray

    from reshard.integrations.sync import ray_address

    def served(**options):
        server = ray.remote(Server).options(name="vllm_server_0_0", num_cpus=0).remote()
        ray.get(server.start.remote(folder, **options))
        return server

    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    actor, beside = (ray.remote(Actor).options(num_cpus=0).remote() for _ in range(2))
    starting = [
        actor.start.remote(folder, config.actor_rollout_ref), beside.adapt.remote(config.actor_rollout_ref)
    ]  # fmt: skip
    server = served()
    ray.get(starting)
    results: dict = {"syncs": [], "loads": []}
    lost = str(Path.cwd() / "lost")
    for steps, options in (
        (3, {}),
        (4, {}),
        (5, {"lost": lost}),
        (6, {}),
        (7, {"seed": 3}),
        (8, {"several": 3}),
    ):
        ray.get(server.wait_for.remote(options.get("lost", "")))
        outcome = ray.get(actor.sync.remote(steps, **options))
        served_then = ray.get(server.serves.remote()) if outcome[0] == "no error" else ()
        results["syncs"].append([*outcome[:2], *served_then])
        results["loads"].append(outcome[3:])
    ray.get(server.die_at.remote("reshard_connect"))
    results["died together"] = ray.get(actor.sync.remote(9, new=True))[:3]
    ray.kill(server)  # which gives its name back
    server = served(enable_lora=True, max_loras=1, max_lora_rank=8)
    saved, results["adapters"] = str(Path.cwd() / "adapter"), []
    ray.get(actor.train_adapter.remote(folder, 0, saved))
    theirs = ray.get(server.in_slot.remote(saved))
    for steps in range(2):
        ray.get(actor.train_adapter.remote(folder, steps, saved))
        outcome = ray.get(actor.sync_adapter.remote(steps))
        served_then = ray.get(server.in_slot.remote()) if outcome[0] == "no error" else []
        results["adapters"].append([*outcome[:2], *served_then])
    results["loaded"] = [theirs, ray.get(server.serves.remote())]
    ray.get(server.die_at.remote("reshard_connect"))
    address = ray_address()
    results["died elsewhere"] = ray.get([actor.send.remote(address), beside.receive.remote(address)])
    return results


def with_a_tower(folder: str, config) -> dict:
    """Syncs by verl's adapter from a whole model under FSDP2: what a vLLM that has started with dummy weights holds
    after each, and what one has loaded of the model that was saved; and why verl's own way would be taken."""
    import ray

    options = {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "skip_mm_profiling": True,
    }
    remote = ray.remote(Server).options
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    starting = actor.start_fsdp.remote(folder, config.actor_rollout_ref)
    server = remote(name="vllm_server_0_0", num_cpus=0).remote()
    ray.get([starting, server.start.remote(folder, **options)])
    results: dict = {"syncs": [], "held": [], "loaded": []}
    for steps in (1, 2):
        saved = f"{folder}-{steps}"
        results["syncs"].append(ray.get(actor.sync_fsdp.remote(steps, saved)))
        if results["syncs"][-1][0] != "no error":
            return results
        results["held"].append(ray.get(server.serves.remote()))
    results["left"] = ray.get(actor.left.remote())
    ray.kill(server)
    for steps in (1, 2):
        Path(f"{folder}-{steps}").mkdir(exist_ok=True)
        for beside in Path(folder).iterdir():
            if beside.name not in ("model.safetensors", "config.json"):
                shutil.copy(beside, f"{folder}-{steps}")
        server = remote(num_cpus=0).remote()
        ray.get(server.start.remote(f"{folder}-{steps}", **options, load_format="safetensors"))
        results["loaded"].append(ray.get(server.holds.remote()))
        ray.kill(server)
    return results


if __name__ == "__main__":
    main()
