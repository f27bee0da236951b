"""ROLL's weight sync through our classes: two ranks of a Megatron in Ray actors, and two real
vLLMs, without a GPU.

    python -m tests.on_cpu.roll_on_cpu FIRST SECOND

``FIRST`` and ``SECOND`` are two Hugging Face directories, whose weights the trainer gets in turn.
``roll`` is what ``PYTHONPATH`` has: the stand-ins of ``tests/standins``, or a clone of ROLL.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from roll.third_party.vllm.worker import WorkerBase

from reshard.integrations.roll import actors as ours
from reshard.integrations.roll.worker import RollExtension
from reshard.megatron.arguments import megatron_args
from tests.tools.probe import Probed, after, alone, caught, train_adapter, with_adapter

REAL = importlib.util.find_spec("roll").origin is not None  # the stand-ins are a namespace
TRAINERS, ENGINES = 2, 2


class Probe(Probed, RollExtension):
    """Our extension, and what the checks ask of a worker of vLLM."""

    dies = False

    def die_at_the_next_meeting(self) -> None:
        self.dies = True

    def reshard_meet(self, *arguments) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super().reshard_meet(*arguments)

    def load_as_roll_does(self, folder: str) -> None:
        """A directory through ROLL's own way into vLLM's loader, in two parts."""
        from safetensors.torch import load_file

        from reshard.engines.vllm.adapters.wrappers import without_adapters

        named = sorted(load_file(Path(folder) / "model.safetensors").items())
        with without_adapters(self.get_model()):
            for part in (named[::2], named[1::2]):
                self.load_weights(part)

    def fall_asleep(self) -> None:
        """As ROLL's ``offload_states`` leaves it; on a CPU there is no sleep, so that waking is only
        noted."""
        self.weight_loaded, self.woken, self.processed = False, [], 0
        self.wake_up = lambda tags: self.woken.append((tags, self.ready()))
        if not hasattr(WorkerBase, "counted"):
            plain = WorkerBase.process_weights_after_loading

            def counted(worker: Any) -> None:
                worker.processed += 1
                plain(worker)

            WorkerBase.process_weights_after_loading = WorkerBase.counted = counted

    def woke(self) -> list:
        return [self.woken, self.processed]


class Engine(ours.InferWorker):
    """A worker of the rollout, with a vLLM for the CPU where ROLL would start one for a GPU."""

    async def start(self, folder: str, extension: str, **options) -> None:
        from roll.distributed.strategy.vllm_strategy import VllmStrategy
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if REAL:
            from roll.third_party.vllm.async_llm import CustomAsyncLLM as AsyncLLM
        self.strategy = VllmStrategy(self)
        self.strategy.model = AsyncLLM.from_engine_args(AsyncEngineArgs(
            folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
            max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8, kv_cache_memory_bytes=1 << 24,
            disable_log_stats=True, worker_extension_cls=extension, **options,
        ))  # fmt: skip
        await self.strategy.model.collective_rpc("custom_init_worker")


class Trainer(ours.ActorWorker):
    """A rank of the trainer."""

    def start(self, folder: str, store: str) -> None:
        import torch.distributed as dist
        from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy

        from reshard import MegatronLayout
        from reshard.megatron.build import initialize_parallel, without_gpu

        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=TRAINERS)
        self.pipeline_config = SimpleNamespace(max_grad_norm=1.0, model_update_buffer_size_mb=64)
        self.strategy = MegatronTrainStrategy.__new__(MegatronTrainStrategy)
        if REAL:  # its own constructor wants the arguments of the transformers that ROLL pins
            from roll.distributed.strategy.strategy import InferenceStrategy

            InferenceStrategy.__init__(self.strategy, self)
            without_gpu_figures()
        with without_gpu():
            initialize_parallel(MegatronLayout(tp=TRAINERS))
            self.models = self.made(folder)
        self.strategy.models_unwrapped, self.strategy.weight_updaters = self.models, {}
        # Nothing is offloaded without a GPU.
        nothing = lambda *_, **__: None  # noqa: E731
        self.strategy.load_states = self.strategy.offload_states = nothing

    def made(self, folder: str) -> list:
        """ROLL's own model class where that is here, Megatron's otherwise."""
        from reshard import MegatronLayout, read_model
        from reshard.megatron.build import build_megatron, transformer_config

        if not REAL:
            return build_megatron(read_model(folder), MegatronLayout(tp=TRAINERS), transformer_impl="local")
        from mcore_adapter.models.model_config import McaModelConfig
        from mcore_adapter.models.model_factory import McaGPTModel

        model = read_model(folder)
        plain = vars(
            transformer_config(
                model, MegatronLayout(tp=TRAINERS), transformer_impl="local", dtype=torch.bfloat16
            )
        )
        args = megatron_args(model)
        known = {n: v for n, v in plain.items() if n in McaModelConfig.__dataclass_fields__}
        config = McaModelConfig(
            **known
            | dict(
                transformer_impl="local",
                hf_model_type="qwen3",
                padded_vocab_size=1024,
                tie_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                rotary_base=args["rotary_base"],
                rotary_percent=1.0,
                max_sequence_length=256,
            )
        )
        return [McaGPTModel(config)]

    def train(self, folder: str) -> list[str]:
        """Other weights; the kinds of what was made, for the record."""
        import reshard

        reshard.load(self.models, folder, dtype="bf16")
        return [type(one).__qualname__ for one in (self, self.strategy, self.models[0])]

    def updaters(self) -> list[str]:
        return [type(one).__name__ for one in self.strategy.weight_updaters.values()]

    def set_up_adapters(self, infer_cluster, lora: list[str], name: str) -> str:
        """What stands where a sync is asked for, after ROLL's call with a config that has adapters."""
        plain, self.worker_config = (
            self.worker_config,
            config("actor_train", "megatron_train", TRAINERS, {}, lora=lora),
        )
        self.strategy.worker_config = self.worker_config
        self.setup_model_update(infer_cluster=infer_cluster, model_update_name=name)
        self.worker_config = self.strategy.worker_config = plain
        updater = self.strategy.weight_updaters[name]
        return f"{type(updater).__name__} {getattr(updater, 'adapter', None)}"

    def sync_adapter(self, folder: str, seed: int, saved: str) -> None:
        """Another adapter, and a sync. It is PEFT's: ROLL's own is made of Transformer Engine's layers."""
        from reshard.trainers.fsdp import FsdpModel

        updater = self.strategy.weight_updaters["adapters"]
        if seed == 0:
            self.adapted = with_adapter(folder)
            updater.source = FsdpModel(self.adapted)
        train_adapter(self.adapted, seed, f"{saved} of rank {self.rank}")
        self.strategy.model_update("adapters")

    def drop_adapters(self) -> None:
        for name in ("adapters", "left"):
            del self.strategy.weight_updaters[name]

    def meet_anew(self) -> None:
        [updater] = self.strategy.weight_updaters.values()
        updater.sync.link = None

    def with_models(self, whole: bool) -> None:
        """From now on all of them, or none."""
        [updater] = self.strategy.weight_updaters.values()
        updater.sync.link, updater.source = None, None
        updater.models = self.strategy.models_unwrapped if whole else []

    def lose(self, over: str) -> None:
        """The second rank gives up before the first comes."""
        [updater] = self.strategy.weight_updaters.values()
        (alone if updater.sync.link.group.rank else after)(updater.sync.link, over)


def without_gpu_figures() -> None:
    """ROLL counts a GPU's memory around a sync; here there is none."""
    from roll.platforms import current_platform

    for name in (
        "clear_cublas_workspaces", "device_memory_used", "empty_cache", "max_memory_allocated", "max_memory_reserved",
        "memory_allocated", "memory_reserved", "reset_max_memory_allocated", "reset_max_memory_cached",
        "reset_peak_memory_stats",
    ):  # fmt: skip
        setattr(current_platform, name, lambda *_, **__: 0)


def config(name: str, strategy: str, count: int, options: dict, lora=None):
    """What ROLL's config says of a cluster."""
    if not REAL:
        return SimpleNamespace(
            name=name,
            num_gpus_per_worker=1,
            device_mapping=list(range(count)),
            model_args=SimpleNamespace(lora_target=lora),
            strategy_args=SimpleNamespace(strategy_name=strategy, strategy_config=options),
        )
    from roll.configs import ModelArguments
    from roll.configs.training_args import TrainingArguments
    from roll.configs.worker_config import StrategyArguments, WorkerConfig

    return WorkerConfig(
        name=name, device_mapping=str(list(range(count))), strategy_args=StrategyArguments(strategy, options),
        model_args=ModelArguments(dtype="bf16", lora_target=lora), training_args=TrainingArguments(output_dir="output"),
    )  # fmt: skip


def cluster(kind, settings, count: int, **variables: str):
    """Actors as ROLL's cluster makes them, without GPUs to place them on."""
    workers = []
    for rank in range(count):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "CLUSTER_NAME": settings.name,
            "WORKER_NAME": f"{settings.name}-{rank}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            **variables,
        }
        made = ray.remote(kind).options(runtime_env={"env_vars": environment}, num_cpus=0)
        workers.append(made.remote(worker_config=settings))
    return SimpleNamespace(workers=workers, worker_config=settings, cluster_name=settings.name)


def main() -> None:
    folders = sys.argv[1:]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=bool(os.environ.get("LOUD")))
    trains = cluster(
        Trainer,
        config("actor_train", "megatron_train", TRAINERS, {}),
        TRAINERS,
        RESHARD_VERIFY="1",
        RESHARD_TIMEOUT="120",
    )
    serves = cluster(Engine, config("actor_infer", "vllm", ENGINES, {}), ENGINES)
    store = f"file://{Path.cwd() / 'store'}"
    outcome: dict = {"real": REAL}
    starting = [one.start.remote(folders[0], store) for one in trains.workers]
    with_adapters = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    starting += [
        one.start.remote(folders[0], "tests.on_cpu.roll_on_cpu.Probe", **options)
        for one, options in zip(serves.workers, ({}, with_adapters), strict=True)
    ]
    ray.get(starting)

    def ask(method: str, *arguments) -> list:
        return [
            results
            for [results] in ray.get([one.reshard_call.remote(method, *arguments) for one in serves.workers])
        ]

    outcome["left"], outcome["wrong options"] = left(trains, serves), wrong_options()
    outcome["drafts"] = drafts(trains)
    from roll.distributed.executor.model_update_group import ModelUpdateGroup

    group = ModelUpdateGroup(trains, serves, None)
    outcome["updaters"] = ray.get([one.updaters.remote() for one in trains.workers])
    outcome["dummy"], outcome["before"] = ask("digests"), ask("ready")
    outcome["syncs"] = []
    for folder in (*folders, folders[0]):
        [outcome["kinds"], *_] = ray.get([one.train.remote(folder) for one in trains.workers])
        ask("fall_asleep")
        wrong = caught(lambda: group.model_update(0))
        print(f"a sync: {wrong or 'no error'}", flush=True)
        ray.get([one.process_weights_after_loading.remote() for one in serves.workers])
        results = {"error": wrong, "refitted": ask("digests"), "ready": ask("ready"), "woke": ask("woke")}
        # The same weights once more, by ROLL's way into vLLM's own loader.
        ask("wipe")
        results["wiped"] = ask("digests")
        ask("load_as_roll_does", folder)
        ray.get([one.process_weights_after_loading.remote() for one in serves.workers])
        outcome["syncs"].append(
            results | {"loaded": ask("digests"), "then ready": ask("ready"), "then": ask("woke")}
        )
    ray.get([one.lose.remote(str(Path.cwd() / "lost")) for one in trains.workers])
    outcome["failed"] = [caught(lambda: group.model_update(0)), ask("ready")]
    ask("wipe")
    outcome["mended"] = [caught(lambda: group.model_update(0)), ask("digests"), ask("ready")]
    outcome["no model"] = no_model(trains, group)
    outcome["adapters"] = adapters(trains, serves, folders[0])
    outcome["died"] = died(trains, serves, group)
    outcome["no line"] = no_line(trains, folders[0])
    ray.shutdown()
    print("SAID " + json.dumps(outcome))


def adapters(trains, serves, folder: str) -> dict:
    """Syncs of an adapter into the second engine, which serves some, beside its own loading of PEFT's files; and
    what stands where a sync is asked for, with a rollout that serves some and one that does not."""
    saved = str(Path.cwd() / "adapter")
    ways = {}
    for name, lora in (("adapters", ["q_proj"]), ("left", None)):
        rollout = SimpleNamespace(
            workers=serves.workers[1:], worker_config=config("actor_infer", "vllm", 1, {}, lora=lora)
        )
        asked = [one.set_up_adapters.remote(rollout, ["q_proj"], name) for one in trains.workers]
        ways[name] = ray.get(asked)

    def in_slot(of: str = "") -> list:
        [results] = ray.get(serves.workers[1].reshard_call.remote("adapter", "1", of))
        return results

    syncs = []
    for seed in range(2):
        ray.get([one.sync_adapter.remote(folder, seed, saved) for one in trains.workers])
        syncs.append([in_slot(), in_slot(f"{saved} of rank 0")])
    ray.get([one.drop_adapters.remote() for one in trains.workers])
    return {"ways": ways, "syncs": syncs}


def wrong_options() -> list[str]:
    """What is said of values that are none."""
    results = []
    for name, value in (
        ("RESHARD_VERIFY", "yes"),
        ("RESHARD_TIMEOUT", "0"),
        ("RESHARD_TIMEOUT", "soon"),
        ("RESHARD_BACKEND", "ring"),
        ("RESHARD_DELTA", "yes"),
        ("RESHARD_KEEP_MAPPED", "yes"),
        ("RESHARD_BEGIN", "1"),
        ("RESHARD_VERIFI", "1"),
        ("RESHARD_TEST_VERIFIED", "1"),
    ):
        os.environ[name] = value
        results.append(caught(ours.options))
        del os.environ[name]
    return results


def left(trains, serves) -> list:
    """Why ROLL's own way is taken, for configs that a refit does not cover; and for one that it does."""
    lora = config("actor_train", "megatron_train", TRAINERS, {}, lora=["q_proj"])
    of = lambda settings, **more: SimpleNamespace(  # noqa: E731
        worker_config=settings, strategy=SimpleNamespace(**more)
    )
    plain = of(trains.worker_config)
    others = [
        config("actor_infer", "vllm", 1, {"quantization": "fp8"}),
        config("actor_infer", "sglang", 1, {}),
    ]
    return [
        ours.left_to_roll(plain, serves), ours.left_to_roll(of(lora), serves),
        *[ours.left_to_roll(plain, of(one)) for one in others],
        ours.left_to_roll(of(config("actor_train", "fsdp2_train", 1, {})), serves),
        ours.left_to_roll(of(trains.worker_config, is_multimodal=True), serves),
    ]  # fmt: skip


def drafts(trains) -> str:
    """Why ROLL's own way is taken for a rollout that drafts tokens; empty if it is not."""
    rollout = config("actor_infer", "vllm", 1, {"speculative_config": {"method": "mtp"}})
    worker = SimpleNamespace(worker_config=trains.worker_config, strategy=SimpleNamespace())
    return ours.left_to_roll(worker, SimpleNamespace(worker_config=rollout))


def died(trains, serves, group) -> list:
    """A sync at which all meet anew, and the second engine's process dies before it has come."""
    ray.get([one.meet_anew.remote() for one in trains.workers])
    ray.get(serves.workers[1].reshard_call.remote("die_at_the_next_meeting"))
    return on_all_ranks(trains, group)


def no_model(trains, group) -> list:
    """A sync for which the trainer's second rank has nothing that it can give."""
    ray.get(trains.workers[1].with_models.remote(False))
    results = on_all_ranks(trains, group)
    ray.get(trains.workers[1].with_models.remote(True))
    return results


def on_all_ranks(trains, group) -> list:
    """What a sync raises on each of the trainer's ranks, and after how many seconds."""
    began = time.monotonic()
    asked = [
        one.start_model_update.remote(model_update_name=group.model_update_name) for one in trains.workers
    ]
    return [[caught(lambda one=one: ray.get(one)), time.monotonic() - began] for one in asked]


def no_line(trains, folder: str) -> str:
    """What a rollout says whose vLLM has ROLL's own extension."""
    from roll.distributed.executor.model_update_group import ModelUpdateGroup

    serves = cluster(Engine, config("actor_infer", "vllm", 1, {}), 1)
    ray.get(serves.workers[0].start.remote(folder, "roll.third_party.vllm.worker.WorkerV1"))
    serves.cluster_name = "another"
    return caught(lambda: ModelUpdateGroup(trains, serves, None).model_update(0))


if __name__ == "__main__":
    main()
