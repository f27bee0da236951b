"""NeMo-RL's weight sync through our classes: two ranks of a Megatron in Ray actors, and two real
vLLMs, without a GPU.

    python -m tests.on_cpu.nemo_rl_on_cpu FIRST SECOND DRAFTER OTHER

``FIRST`` and ``SECOND`` are two Hugging Face directories, whose weights the policy gets in turn, ``DRAFTER`` and
``OTHER`` those of EAGLE-3 drafters for them.
``nemo_rl`` is what ``PYTHONPATH`` has: the stand-ins of ``tests/standins``, or a clone of NeMo-RL.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import ray
from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin
from nemo_rl.models.policy.workers.checkpoint_engine import (
    MegatronCheckpointEngineSendMixin,
    PolicyCheckpointEngineMixin,
)

from reshard.integrations.nemo_rl.checkpoint_engine import WORKER, ReshardCheckpointEngine
from reshard.integrations.nemo_rl.colocated import ColocatedSynchronizer
from reshard.integrations.nemo_rl.driven import BACKEND
from reshard.integrations.nemo_rl.script import with_refits
from reshard.integrations.nemo_rl.survivors import with_survivors
from reshard.integrations.nemo_rl.worker import ReshardWorker
from reshard.integrations.options import SyncOptions
from tests.tools.drafters import FusedEagle3, load_drafter
from tests.tools.probe import Probed, after, alone, caught, digest_of

REAL = importlib.util.find_spec("nemo_rl").origin is not None  # the stand-ins are a namespace
POLICIES, ENGINES = 2, 2
PROBE = "tests.on_cpu.nemo_rl_on_cpu.Probe"
EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtensionWithCheckpointEngine"


class Engines:
    """Mixed into whoever has a checkpoint engine of NeMo-RL's."""

    def put_engine_aside(self) -> None:
        """As before NeMo-RL has made one."""
        self.aside = self.checkpoint_engine
        del self.checkpoint_engine

    def take_engine_back(self) -> None:
        self.checkpoint_engine = self.aside


class Probe(Probed, Engines, ReshardWorker):
    """Our worker, and what the checks ask of it."""

    dies = dies_late = refuses = False

    def refuse_to_switch(self, refuses: bool) -> None:
        self.refuses = refuses

    def reshard_switch(self, *arguments):
        if self.refuses:
            raise RuntimeError("it refuses")
        return super().reshard_switch(*arguments)

    def die_when_asked_to_meet(self) -> None:
        self.dies = True

    def die_when_asked_to_refit(self) -> None:
        self.dies_late = True

    def reshard_refit(self, *arguments, **options):
        if self.dies_late:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reshard_refit(*arguments, **options)

    def reshard_take(self, *arguments):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reshard_take(*arguments)

    def reshard_connect_worker(self, *arguments, **options):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reshard_connect_worker(*arguments, **options)

    def load_drafter(self, folder: str) -> None:
        """A drafter's directory by its class's own loader, as NeMo-RL loads what it gets."""
        from safetensors.torch import load_file

        tensors = load_file(Path(folder) / "model.safetensors")
        self.model_runner.drafter.model.load_weights(weights=sorted(tensors.items()))

    def drafter_digests(self) -> dict[str, str]:
        """Digests of the drafter's parameters that are not the model's."""
        shared = {id(one) for one in self.get_model().parameters()}
        named = self.model_runner.drafter.model.named_parameters()
        return {n: digest_of(p) for n, p in named if id(p) not in shared}

    def load_as_nemo_rl_does(self, folder: str) -> None:
        """A directory through NeMo-RL's way into vLLM's loader."""
        from safetensors.torch import load_file

        self._load_full_hf_weights(sorted(load_file(Path(folder) / "model.safetensors").items()))


def keep_own_output_layers() -> None:
    """Have drafters with dummy weights keep an output layer of a vocabulary of their own, as NeMo-RL's patch of vLLM
    has it."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    plain = Eagle3LlamaForCausalLM.__init__

    @wraps(plain)
    def init(self, *args, **kwargs) -> None:
        plain(self, *args, **kwargs)
        self.has_own_lm_head = self.config.draft_vocab_size != self.config.vocab_size

    Eagle3LlamaForCausalLM.__init__ = init


class Engine(VllmCheckpointEngineRpcMixin):
    """NeMo-RL's actor of an engine, with a vLLM for the CPU."""

    def __init__(self, folder: str, worker: str, **options) -> None:
        # The worker in this process: each of its own would import vLLM anew.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        keep_own_output_layers()
        self.llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
            max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8, kv_cache_memory_bytes=1 << 24,
            worker_cls=worker, worker_extension_cls=EXTENSION, **options,
        )  # fmt: skip

    def is_alive(self) -> bool:
        return True

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Policy(Engines, MegatronCheckpointEngineSendMixin, PolicyCheckpointEngineMixin):
    """A rank of NeMo-RL's policy: its mixins, with a Megatron for the CPU."""

    def __init__(self, rank: int) -> None:
        self.rank, self.cfg = rank, {"megatron_cfg": {"enabled": True}, "generation": {"vllm_cfg": {}}}

    def start(self, folder: str, store: str) -> None:
        import torch.distributed as dist
        from megatron.core.transformer.module import Float16Module

        from reshard import MegatronLayout, read_model
        from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu

        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=POLICIES)
        with without_gpu():
            initialize_parallel(MegatronLayout(tp=POLICIES))
            [model] = build_megatron(
                read_model(folder), MegatronLayout(tp=POLICIES), transformer_impl="local"
            )
        self.model = Float16Module(model.config, model)

    def _iter_params_with_optional_kv_scales(self, kv_scales=None):
        raise AssertionError(f"{self} exports full tensors")
        yield

    async def checkpoint_engine_rpc(self, *arguments, **options):
        try:
            return await super().checkpoint_engine_rpc(*arguments, **options)
        except BaseException as error:
            self.gave_up = str(error)
            raise

    def lose_seat(self) -> None:
        """As where NeMo-RL has seated nobody: on shared GPUs."""
        self.checkpoint_engine.lobby = None

    def why(self) -> str:
        return self.gave_up

    def train(self, folder: str) -> None:
        import reshard

        reshard.load([self.model], folder, dtype="bf16")

    def attach(self, target: str, drafter: str) -> None:
        """Put a drafter into the model, where NeMo-RL has the one that it trains."""
        self.draft_model = FusedEagle3(load_drafter(drafter, target), self.rank, POLICIES)
        self.model.module.draft_model = self.draft_model

    def detach(self) -> None:
        del self.model.module.draft_model, self.draft_model

    def train_both(self, folder: str, drafter: str) -> None:
        module = self.model.module
        del module.draft_model  # which is none of the model's
        self.train(folder)
        module.draft_model = self.draft_model
        self.draft_model.take(load_drafter(drafter, folder))

    def lose(self, over: str) -> None:
        """The second rank gives up before the first comes."""
        (alone if self.rank else after)(self.checkpoint_engine.sync.link, over)

    def adapters(self, enabled: bool) -> None:
        self.cfg["megatron_cfg"]["peft"] = {"enabled": enabled}


class Group:
    """What the synchronizers ask of NeMo-RL's groups of workers."""

    def __init__(self, workers: list) -> None:
        self.workers = workers

    def get_dp_leader_worker_idx(self, dp_shard_idx):
        return dp_shard_idx

    def run_all_workers_single_data(self, method_name, run_rank_0_only_axes=None, **kwargs):
        return [getattr(one, method_name).remote(**kwargs) for one in self.workers]

    def run_all_workers_multiple_data(
        self, method_name, run_rank_0_only_axes=None, common_kwargs=None, **kwargs
    ):
        return [
            getattr(one, method_name).remote(
                **(common_kwargs or {}), **{key: each[index] for key, each in kwargs.items()}
            )
            for index, one in enumerate(self.workers)
        ]


def main() -> None:
    folders, drafters = sys.argv[1:3], sys.argv[3:]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=bool(os.environ.get("LOUD")))
    phases: list = []
    config = {"vllm_cfg": {"async_engine": False}, "refit_transport": BACKEND, "colocated": {"enabled": False},
              "refit_cfg": {BACKEND: {"verify": True, "timeout": 120}}}  # fmt: skip
    policies = [ray.remote(Policy).options(num_cpus=0).remote(rank) for rank in range(POLICIES)]
    engines = [ray.remote(Engine).options(num_cpus=0).remote(folders[0], PROBE) for _ in range(ENGINES)]
    note = lambda what, *_, **kwargs: phases.append([what, *kwargs.values()])  # noqa: E731
    policy = SimpleNamespace(
        worker_group=Group(policies), prepare_refit_info=dict, offload_before_refit=partial(note, "offload the rest"),
        offload_after_refit=partial(note, "offload"),
    )  # fmt: skip
    generation = SimpleNamespace(
        worker_group=Group(engines), cfg=config, dp_size=ENGINES, prepare_refit_info=lambda _: None,
        prepare_for_generation=partial(note, "wake"),
    )  # fmt: skip
    store = f"file://{Path.cwd() / 'store'}"
    ray.get([one.start.remote(folders[0], store) for one in policies])

    def ask(method: str, *arguments) -> list:
        asked = [one.checkpoint_engine_rpc.remote(method, arguments) for one in engines]
        return [results for [results] in ray.get(asked)]

    def train(folder: str) -> None:
        ray.get([one.train.remote(folder) for one in policies])

    outcome: dict = {"real": REAL, "dummy": ask("digests"), "before": ask("ready")}
    outcome["loaded"] = []
    for folder in folders:
        ask("load_as_nemo_rl_does", folder)
        outcome["loaded"].append(ask("digests"))
    from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config
    from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import CheckpointEngineWeightSynchronizer

    separate = CheckpointEngineWeightSynchronizer(policy, generation, checkpoint_engine_refit_config(config))
    separate._bucket_size_bytes = 1 << 20  # else it asks for a GPU's memory
    for name, synchronizer in (
        ("separate", separate),
        (
            "colocated",
            ColocatedSynchronizer(policy, generation, SyncOptions(verify=True, timeout=120.0)),
        ),
    ):
        synchronizer.init_communicator()
        synced = outcome[name] = {"stale": [synchronizer.is_stale], "syncs": []}
        for folder in (*folders, folders[0]):
            train(folder)
            ask("wipe")
            del phases[:]
            error = caught(synchronizer.sync_weights)
            print(f"{name}: {error or 'no error'}", flush=True)
            synced["syncs"].append(
                {"error": error, "refitted": ask("digests"), "ready": ask("ready"), "phases": list(phases)}
            )
        synced["stale"].append(synchronizer.is_stale)
        ray.get([one.lose.remote(str(Path.cwd() / f"{name} lost")) for one in policies])
        synced["failed"] = [caught(synchronizer.sync_weights), synchronizer.is_stale]
        ask("wipe")
        synced["mended"] = [caught(synchronizer.sync_weights), ask("digests"), ask("ready")]
        print(f"{name}: {synced['failed']} {synced['mended'][0]}", flush=True)
        synchronizer.shutdown()
        ask("wipe")
        again = caught(synchronizer.sync_weights)
        synced["after a shutdown"] = [again, ask("digests") == synced["mended"][1]]
        synchronizer.shutdown()
    outcome["begun"] = begun(policy, generation, ask, train, folders)
    ray.get([one.lose_seat.remote() for one in policies])

    def replace() -> None:
        """Start another engine in the place of the second, as NeMo-RL does."""
        engines[1] = ray.remote(Engine).options(num_cpus=0).remote(folders[0], PROBE)

    outcome["drafting"] = drafting(policy, config, folders, drafters)
    outcome["survivors"] = survivors(policy, generation, train, replace, folders)
    outcome["colocated"]["died"] = died(synchronizer, policies, engines)
    replace()
    ray.get([one.adapters.remote(True) for one in policies])
    outcome["adapters"] = caught(separate.sync_weights)
    outcome["setup"] = setups(policy, generation)
    outcome["no line"] = no_line(folders[0], policy, config)
    outcome["separate"]["died"] = died(separate, policies, engines)
    ray.shutdown()
    print("SAID " + json.dumps(outcome))


def set_up_to_begin(policy, generation, step):
    """NeMo-RL's setup, as ours changes it where syncs are begun after each `step`; return the synchronizer."""
    from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config
    from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import CheckpointEngineWeightSynchronizer

    options = {"timeout": 120, "begin": True}
    settings = {"megatron_cfg": {"enabled": True}, "generation": generation.cfg | {
        "backend": "vllm", "refit_cfg": {BACKEND: options}}}  # fmt: skip

    def setup(config):
        """As NeMo-RL's."""
        generation.cfg = config.policy["generation"]
        theirs = CheckpointEngineWeightSynchronizer(
            policy, generation, checkpoint_engine_refit_config(generation.cfg)
        )
        theirs._bucket_size_bytes = 1 << 20
        theirs.init_communicator()
        policy.train = step
        generation.weight_synchronizer = theirs
        return policy, generation

    with_refits(setup)(SimpleNamespace(policy=settings))
    return generation.weight_synchronizer


def drafting(policy, config: dict, folders: list[str], drafters: list[str]) -> dict:
    """Syncs of a policy that trains a drafter, and of an engine that drafts by it, which starts with dummy weights."""
    policies = policy.worker_group.workers
    speculative = {"method": "eagle3", "model": drafters[0], "num_speculative_tokens": 2}
    starting = ray.remote(Engine).options(num_cpus=0)
    engine = starting.remote(folders[0], PROBE, speculative_config=speculative)
    generation = SimpleNamespace(
        worker_group=Group([engine]), cfg=config, dp_size=1, prepare_refit_info=lambda _: None
    )

    def ask(method: str, *arguments):
        [answer] = ray.get(engine.checkpoint_engine_rpc.remote(method, arguments))
        return answer

    def train(which: int) -> None:
        ray.get([one.train_both.remote(folders[which], drafters[which]) for one in policies])

    said: dict = {"dummy": ask("drafter_digests"), "loaded": []}
    for drafter in drafters:
        ask("load_drafter", drafter)
        said["loaded"].append(ask("drafter_digests"))
    ray.get([one.put_engine_aside.remote() for one in policies])
    ray.get([one.attach.remote(folders[0], drafters[0]) for one in policies])
    train(0)
    synchronizer = set_up_to_begin(policy, generation, train)

    def synced() -> list:
        return [caught(synchronizer.sync_weights), ask("digests"), ask("drafter_digests"), ask("ready")]

    said["first"] = synced()
    policy.train(1)
    said["is begun"] = synchronizer._begun is not None
    ray.get([one.checkpoint_engine_rpc.remote("settle") for one in policies])
    said["meanwhile"] = [ask("digests"), ask("drafter_digests")]
    train(0)  # what came after the step
    said["switched"] = synced()
    train(0)
    synchronizer.shutdown()
    said["again"] = synced()
    synchronizer.shutdown()
    ray.get([one.take_engine_back.remote() for one in policies])
    ray.get([one.detach.remote() for one in policies])
    return said


def begun(policy, generation, ask, train, folders: list[str]) -> dict:
    """Syncs that are begun at the end of each training step, of which an engine refuses one."""
    ray.get([one.put_engine_aside.remote() for one in policy.worker_group.workers])
    ask("put_engine_aside")
    plain = generation.cfg

    def stepped(folder: str, loss_fn: str | None, eval_mode: bool = False) -> None:
        """A training step, which fails where the loss says so."""
        train(folder)
        if loss_fn is not None:
            raise ValueError(loss_fn)

    synchronizer = set_up_to_begin(policy, generation, stepped)

    def synced() -> dict:
        error = caught(synchronizer.sync_weights)
        return {"error": error, "stale": synchronizer.is_stale, "serves": [ask("digests"), ask("ready")]}

    def step(folder: str, other: str) -> dict:
        """Train, which ends with other weights, and sync."""
        policy.train(folder, None)
        is_begun = synchronizer._begun is not None
        said = {"begun": is_begun, "meanwhile": [ask("digests"), ask("ready")]}
        ray.get([one.checkpoint_engine_rpc.remote("settle") for one in policy.worker_group.workers])
        train(other)
        return said | synced()

    first, second = folders
    said = {"kind": type(synchronizer).__name__, "first": step(first, first), "second": step(second, first)}
    said["back"] = step(first, second)
    refusing = generation.worker_group.workers[1].checkpoint_engine_rpc
    ray.get(refusing.remote("refuse_to_switch", (True,)))
    said["refused"] = step(second, second)
    ray.get(refusing.remote("refuse_to_switch", (False,)))
    said["mended"] = synced()
    policy.train(first, None, eval_mode=True)
    said["evaluated"] = synchronizer._begun is not None
    train(second)
    said["again"] = step(first, second)
    policy.train(first, None)
    with suppress(ValueError):
        policy.train(second, "is not a number")
    said["failed"] = {"begun": synchronizer._begun is not None} | synced()
    synchronizer.shutdown()
    generation.cfg = plain
    ray.get([one.take_engine_back.remote() for one in policy.worker_group.workers])
    ask("take_engine_back")
    return said


def survivors(policy, generation, train, replace, folders: list[str]) -> dict:
    """Syncs of NeMo-RL's SingleController, in and before which the second engine dies, and after it was replaced."""
    from nemo_rl.weight_sync.factory import create_weight_synchronizer

    engines = generation.worker_group.workers

    def made(of=generation, **changes):
        of = SimpleNamespace(**vars(of) | {"cfg": of.cfg | changes})
        create = with_survivors(create_weight_synchronizer)
        return create(policy=policy, generation=of, generation_backend="vllm", colocated=False)

    ours = {"worker_cls": WORKER}
    synchronizer = made(vllm_kwargs=ours)
    synchronizer.init_communicator()

    def says(*which: int) -> list:
        asked = [[engines[index].checkpoint_engine_rpc.remote(what) for what in ("digests", "ready")]
                 for index in which]  # fmt: skip
        return [[one for [one] in ray.get(each)] for each in asked]

    def synced(folder: str, *which: int) -> dict:
        train(folder)
        began = time.monotonic()
        error = caught(synchronizer.sync_weights)
        seconds = time.monotonic() - began
        return {"error": error, "seconds": seconds, "stale": synchronizer.is_stale, "serves": says(*which)}

    first, second = folders
    said: dict = {"kind": type(synchronizer).__name__}
    said["first"] = [synchronizer.reconcile_communicator([]), synced(first, 0, 1)]
    said["same"] = [synchronizer.reconcile_communicator([]), synced(second, 0, 1)]
    ray.get(engines[1].checkpoint_engine_rpc.remote("die_when_asked_to_refit"))
    said["dies"] = synced(first, 0)
    said["without it"] = [synchronizer.reconcile_communicator([]), synced(second, 0)]
    replace()
    said["new"] = says(1)
    said["replaced"] = [synchronizer.reconcile_communicator([]), synced(first, 0, 1)]
    said["absent"] = [synchronizer.reconcile_communicator([1]), synced(second, 0, 1)]
    said["back"] = [synchronizer.reconcile_communicator([], force=False), synced(second, 0, 1)]
    with suppress(ray.exceptions.RayError):
        ray.get(engines[1].die.remote())
    replace()  # between two syncs, before anybody has noticed
    said["swiftly"] = [synchronizer.reconcile_communicator([]), synced(first, 0, 1)]
    said["none left"] = caught(lambda: synchronizer.reconcile_communicator([0, 1]))
    shared = made(vllm_kwargs=ours, vllm_cfg=generation.cfg["vllm_cfg"] | {"expert_parallel_size": 2})
    said["shared"] = caught(lambda: shared.reconcile_communicator([1]))
    said["begin"] = caught(lambda: made(vllm_kwargs=ours, refit_cfg={BACKEND: {"begin": True}}))
    said["no line"] = caught(made)
    said["another transport"] = caught(lambda: made(refit_transport="nixl"))
    synchronizer.reconcile_communicator([])
    synchronizer.shutdown()
    return said


def died(synchronizer, policies, engines) -> list:
    """A sync before which the second engine's process dies: what it raises, after how many seconds
    the policy's ranks do something else, and why they gave up."""
    ray.get([one.adapters.remote(False) for one in policies])
    ray.get(engines[1].checkpoint_engine_rpc.remote("die_when_asked_to_meet"))
    synchronizer.init_communicator()
    began = time.monotonic()
    error = caught(synchronizer.sync_weights)
    why = ray.get([one.why.remote() for one in policies])
    return [error, time.monotonic() - began, why]


def no_line(folder: str, policy, config: dict) -> str:
    """A vLLM with its own worker."""
    from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config
    from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import CheckpointEngineWeightSynchronizer

    engine = ray.remote(Engine).options(num_cpus=0).remote(folder, "auto")
    generation = SimpleNamespace(
        worker_group=Group([engine]), cfg=config, dp_size=1, prepare_refit_info=lambda _: None
    )
    synchronizer = CheckpointEngineWeightSynchronizer(
        policy, generation, checkpoint_engine_refit_config(config)
    )
    synchronizer._bucket_size_bytes = 1 << 20
    return caught(synchronizer.init_communicator)


def setups(policy, generation) -> dict:
    """What NeMo-RL's ``setup`` becomes, for several configs."""
    ray.get([one.adapters.remote(False) for one in policy.worker_group.workers])
    plain = {
        "megatron_cfg": {"enabled": True},
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": True},
            "vllm_cfg": {"async_engine": False},
        },
    }

    def made(**changes):
        config = json.loads(json.dumps(plain))
        for key, value in changes.items():
            (
                config["generation"]
                if key in ("backend", "colocated", "vllm_cfg", "vllm_kwargs", "refit_cfg")
                else config
            )[key] = value
        seen = []
        refitting = with_refits(
            lambda settings, more: seen.append(settings.policy) or (policy, generation, more)
        )
        error = caught(lambda: seen.append(refitting(SimpleNamespace(policy=config), "more")))
        if error:
            return [error, len(seen)]
        results = [
            seen[0]["generation"]["vllm_kwargs"],
            type(generation.weight_synchronizer).__name__,
            seen[1][2],
        ]
        options = generation.weight_synchronizer._options
        return [*results, options.verify, options.timeout]

    return {
        "plain": made(),
        "options": made(refit_cfg={BACKEND: {"verify": True, "timeout": 5}}),
        "a wrong option": made(refit_cfg={BACKEND: {"verfy": True}}),
        "a wrong time": made(refit_cfg={BACKEND: {"timeout": 0}}),
        "separate": made(colocated={"enabled": False}),
        "begun on one GPU": made(refit_cfg={BACKEND: {"begin": True}}),
        "begun and released": made(refit_cfg={BACKEND: {"begin": True, "release_after_refit": True}}),
        "begun by another way": made(refit_cfg={BACKEND: {"begin": True, "backend": "staged"}}),
        "begun by nobody": [caught(lambda: ReshardCheckpointEngine(begin=True)), 0],
        "another backend": made(backend="sglang"),
        "no Megatron": made(megatron_cfg={"enabled": False}),
        "another worker": made(vllm_kwargs={"worker_cls": "a.B"}),
        "adapters": made(megatron_cfg={"enabled": True, "peft": {"enabled": True}}),
        "fp8": made(vllm_cfg={"precision": "fp8"}),
        "drafts": made(vllm_kwargs={"speculative_config": {"num_speculative_tokens": 2}}),
        "fp8 cache": made(vllm_cfg={"kv_cache_dtype": "fp8_e4m3"}),
        "quantized": made(quant_cfg="a"),
    }


if __name__ == "__main__":
    main()
