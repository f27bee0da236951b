"""verl's own server of SGLang, refitted from a real Megatron model by verl's adapter, and by slime's updater;
run in an environment with verl and SGLang: python -m tests.on_cpu.sglang_trainers_on_cpu CHECKPOINTS FLAGS LINES

CHECKPOINTS are two checkpoints, each as (Hugging Face directory, Megatron directory), FLAGS Megatron's, as
JSON; LINES are verl's lines of config.
"""

import dataclasses
import json
import os
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

from tests.on_cpu.sglang_on_cpu import only_our_models
from tests.on_cpu.verl_on_cpu import SECRET, ended, invited, takes
from tests.starting.ranks import free_port
from tests.tools.probe import caught

ASKED = {
    "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
}
# SGLang without a GPU and its kernels.
WITHOUT_GPU = {
    "device": "cpu", "attention_backend": "torch_native", "mm_attention_backend": None, "sampling_backend": "pytorch",
    "grammar_backend": "none", "enable_memory_saver": False, "max_total_tokens": 1024, "context_length": 128,
}  # fmt: skip


def composed(directory: str, lines: list[str]):
    """verl's config of a rollout and a model."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", overrides=[*lines, f"actor_rollout_ref.model.path={directory}"]
        ).actor_rollout_ref
    config.rollout.engine_kwargs.sglang = WITHOUT_GPU
    return config


def mend_verl() -> None:
    """Give verl 0.9.1 what it lacks for SGLang's newer versions: from 0.5.21 on its client of a server has two
    abstract methods more, and where SGLang's arguments are no dataclass, but a struct of msgspec, verl asks
    `dataclasses.fields` for their names all the same."""
    import msgspec
    from sglang.srt.server_args import ServerArgs
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    AsyncHttpServerAdapter.__abstractmethods__ -= {"begin_weight_update", "end_weight_update"}
    if not dataclasses.is_dataclass(ServerArgs):
        of_dataclass = dataclasses.fields
        dataclasses.fields = lambda kind: (
            msgspec.structs.fields(kind) if kind is ServerArgs else of_dataclass(kind)
        )


def server_class():
    """verl's server, with what the tests ask of it beside."""
    only_our_models()
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    class Server(SGLangHttpServer):
        async def launch_server(self, *arguments, **options):
            mend_verl()
            return await super().launch_server(*arguments, **options)

        def steps(self) -> int | None:
            return self.global_steps

        def die(self) -> None:
            from sglang.srt.utils import kill_process_tree

            kill_process_tree(os.getpid())

    return Server


class Actor:
    """A rank of a trainer, with verl's adapter as its config makes it."""

    def adapt(self, config) -> str:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "RAY_LOCAL_WORLD_SIZE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        only_our_models()
        import torch.distributed as dist
        from sglang.srt import server_args
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.base import get_rollout_class

        mend_verl()
        server_args.get_device = lambda *_: "cpu"  # which verl's client of a server asks for
        # As an actor does it; this is what imports our module.
        model = omega_conf_to_dataclass(config.model)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made = get_rollout_class("sglang")
        self.adapter = made(
            config=omega_conf_to_dataclass(config.rollout), model_config=model, device_mesh=None
        )
        return f"{made.__module__}.{made.__qualname__}"

    def load(self, flags: list[str], directory: str) -> None:
        """Load a Megatron checkpoint, into the model that there is if there is one."""
        from reshard.integrations.verl.plugin import MegatronModel, Shards
        from tests.tools.refit_sides import trainer

        if hasattr(self, "load_other"):
            self.load_other(directory)
            return
        chunks, self.load_other = trainer(flags, directory, wide=True)
        self.shards = Shards(MegatronModel(chunks))

    def update_by_slime(self, engine, gone: str) -> list:
        """Update an engine twice as slime's actor does, whose model has been offloaded: its memory holds
        other numbers, and slime has copies. Then once more, without a copy of one parameter."""

        from slime.backends.megatron_utils import actor
        from slime.backends.megatron_utils.update_weight import common

        from reshard.integrations import slime

        wrong = takes(slime.RefitWeights, actor.UpdateWeightFromDistributed)
        wrong += takes(slime.RefitWeights, actor.UpdateWeightFromTensor)
        args = SimpleNamespace(
            update_weight_transport="nccl", offload_train=True, rollout_num_gpus_per_engine=1
        )
        slime.use_refits(args)
        assert actor.UpdateWeightFromTensor is actor.UpdateWeightFromDistributed is slime.RefitWeights
        named = dict(common.named_params_and_buffers(args, self.shards.source.models))
        copies = {name: tensor.detach().clone() for name, tensor in named.items()}
        for tensor in named.values():
            tensor.data.zero_()
        make = lambda: actor.UpdateWeightFromTensor(  # noqa: E731
            args, self.shards.source.models, lambda: copies, model_name="qwen3", quantization_config=None
        )
        os.environ |= {"RESHARD_DELTA": "1", "RESHARD_DELTA_ON_HOST": "1"}
        updater, changing = make(), next(iter(copies.values()))
        # As one says that its pipeline stages have only begun.
        ask = partial(slime._answer, engine, "update_weights_from_distributed", slime.refit_request(1, False))
        try:
            refused = ask()
        except Exception as error:
            refused = str(error)  # with the note, which its cause is without
        updater.connect_rollout_engines([engine], None, engine_gpu_counts=[1], engine_gpu_offsets=[0])
        plain, other = slime._answer, make()
        other.connect_rollout_engines([engine], None, engine_gpu_counts=[1], engine_gpu_offsets=[0])
        # As slime does where SGLang refuses that call, since it has no plugin.
        slime._answer = lambda engine, method, request: (
            None if method == "destroy_weights_update_group" else plain(engine, method, request)
        )
        without_plugin = caught(other.update_weights)
        slime._answer = plain
        for factor in (2.0, 0.5):
            changing.mul_(factor)
            updater.update_weights()
        delta = updater._sync.link.chain.report()
        for name, tensor in named.items():
            tensor.data.copy_(copies[name])
        slime.named_params_and_buffers = lambda *_: ((n, t) for n, t in named.items() if n != gone)
        args.update_weight_transport = "disk"
        return [
            updater.weight_version,
            updater.pop_metrics(),
            caught(lambda: slime.use_refits(args)),
            caught(make().source),
            wrong,
            delta.is_delta and 0 < delta.changed < 1,
            refused,
            without_plugin,
        ]

    def begin_by_slime(self, engine, flags: list[str], directories: list[str]) -> list:
        """Give an engine weights by slime's updater, and begin an update to others at the end of a step."""
        from slime.backends.megatron_utils import actor

        args = SimpleNamespace(rollout_num_gpus_per_engine=1, colocate=False, update_weights_interval=1)
        for name in ("RESHARD_DELTA", "RESHARD_DELTA_ON_HOST"):
            os.environ.pop(name, None)
        os.environ["RESHARD_BEGIN"] = "1"
        make = lambda: actor.UpdateWeightFromDistributed(  # noqa: E731
            args, self.shards.source.models, dict, model_name="qwen3", quantization_config=None
        )
        args.colocate = True
        refused = [caught(make)]
        args.colocate, args.offload_train = False, True
        refused.append(caught(make))
        args.offload_train, args.offload_rollout = False, True
        refused.append(caught(make))
        args.offload_rollout, args.update_weights_interval = False, 2
        refused.append(caught(make))
        args.update_weights_interval = 1
        self.updater = make()
        self.updater.weight_version = 40
        self.updater.connect_rollout_engines([engine], None, engine_gpu_counts=[1], engine_gpu_offsets=[0])
        self.load(flags, directories[0])
        self.updater.pop_metrics()
        self.updater.update_weights()
        return [*refused, self.updater.weight_version, self.begun(flags, directories[::-1])]

    def begun(self, flags: list[str], directories: list[str]) -> bool:
        """Take a step, after which slime asks for metrics, and go on training; return whether an update is pending."""
        self.load(flags, directories[0])
        self.updater.pop_metrics()
        pending: bool = self.updater._sync.link.begun.last().wait().is_pending
        self.load(flags, directories[1])
        return pending

    def update_begun(self, refused: str = "") -> list:
        """What slime's update raises; the engine refuses requests of this load format."""
        from reshard.integrations import slime

        plain, asked = slime._answer, []

        def answer(engine, method, request):
            if "load_format" in request:
                asked.append(request["load_format"])
                if refused and request["load_format"] == refused:
                    raise RuntimeError("it refuses")
            return plain(engine, method, request)

        slime._answer = answer
        try:
            return [caught(self.updater.update_weights), asked]
        finally:
            slime._answer = plain

    def update_rollout(self, engines: list, replaces: bool, options: dict[str, str]) -> None:
        """Make slime's updater of these engines, at version 100."""
        from slime.backends.megatron_utils import actor

        for name in ("RESHARD_BEGIN", *options):
            os.environ.pop(name, None)
        os.environ |= options
        args = SimpleNamespace(
            rollout_num_gpus_per_engine=1, update_weights_interval=1, use_fault_tolerance=replaces
        )
        self.updater = actor.UpdateWeightFromDistributed(
            args, self.shards.source.models, dict, model_name="qwen3", quantization_config=None
        )
        self.updater.weight_version = 100
        self.updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1] * len(engines))

    def replace_engines(self, engines: list) -> None:
        """As slime does where its monitor has found engines dead, and it has started others."""
        self.updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1] * len(engines))

    def meet_engines(self) -> dict:
        """What slime's updater says of engines of which one is dead when it first hears of it, one is busy, and one
        refuses while another is dead. They only answer calls: nothing is refitted."""
        import ray

        from reshard.integrations import slime

        plain, slime.ENDING_SECONDS = slime.RefitWeights._update, 3.0
        slime.RefitWeights._update = lambda self: None
        kinds = "listens", "listens", "listens", "refuses"
        ports = [free_port() for _ in kinds]
        one, other, busy, refuses = [
            ray.remote(Answers).options(num_cpus=0).remote(*of) for of in zip(ports, kinds, strict=True)
        ]
        said: dict = {}
        try:
            self.update_rollout([one], True, {"RESHARD_TIMEOUT": "8"})
            ray.kill(other)
            said["dead"] = [
                caught(lambda: self.replace_engines([one, other])),
                len(self.updater.rollout_engines),
            ]
            said["dead, asked"] = [caught(self.updater.update_weights), len(self.updater.rollout_engines)]
            self.update_rollout([one, refuses], True, {"RESHARD_TIMEOUT": "8"})
            ray.kill(one)
            said["refuses"] = caught(self.updater.update_weights)
            ray.get(busy.get_url.remote())
            busy.stall.remote()
            began = time.monotonic()
            said["busy"] = [caught(lambda: self.update_rollout([busy], True, {"RESHARD_TIMEOUT": "8"}))]
            said["busy"].append(time.monotonic() - began)
        finally:
            slime.RefitWeights._update = plain
            os.environ.pop("RESHARD_TIMEOUT")
        return said

    def update_rollout_weights(self, dies_at: str = "", victim=None) -> list:
        """What an update raises, in how many seconds, and how many engines have it; at a call of this name the
        server of a `victim` dies."""
        from reshard.integrations import slime

        plain = slime._answer

        def answer(engine, method, request):
            if method == dies_at and engine._actor_id == victim[0]._actor_id:
                end_server(victim[1])
            return plain(engine, method, request)

        slime._answer, began = answer, time.monotonic()
        try:
            raised = caught(self.updater.update_weights)
            return [raised, time.monotonic() - began, len(self.updater.rollout_engines)]
        finally:
            slime._answer = plain

    async def sync(self, steps: int, adapter: str | None = None) -> list:
        """verl's call; what it raises."""
        options = {"global_steps": steps, "peft_config": None, "base_sync_done": True}
        return await ended(self.adapter.update_weights(self.shards._replace(adapter=adapter), **options))

    async def send(self, address: str) -> list:
        """As verl's actor does where it has GPUs of its own."""
        from reshard.integrations.verl.plugin import ReshardCheckpointEngine

        engine = ReshardCheckpointEngine(timeout=60, verify=True)
        engine.init_process_group(0, 2, address, [], SECRET, True)
        return await ended(engine.send_weights(self.shards, 9))

    async def receive(self, address: str) -> list:
        """As verl's worker beside an engine elsewhere does."""
        return await ended(self.adapter.update_weights(invited(address), global_steps=9))


def begun_by_slime(actor, engine, flags: list[str], directories: list[str], served, url: str) -> dict:
    """What the server answers and says while an update is begun, after it, and after one that it refuses."""
    import ray

    from reshard.comm.http import call_route

    says = lambda: [*served(), call_route(url, "model_info")["weight_version"]]  # noqa: E731
    said = {"first": ray.get(actor.begin_by_slime.remote(engine, flags, directories)), "pending": says()}
    ray.get(engine.flush_cache.remote())
    said["switch"], said["switched"] = ray.get(actor.update_begun.remote()), says()
    ray.get(engine.flush_cache.remote())
    said["begun"] = ray.get(actor.begun.remote(flags, directories))
    said["refused"] = ray.get(actor.update_begun.remote("switch"))
    ray.get(engine.continue_generation.remote())
    said["stays"] = says()
    ray.get(engine.flush_cache.remote())
    ray.get(actor.load.remote(flags, directories[0]))
    said["again"], said["mended"] = ray.get(actor.update_begun.remote()), says()
    return said


def end_server(server) -> None:
    """End a server's process, with its schedulers."""
    import ray

    with suppress(ray.exceptions.RayError):
        ray.get(server.die.remote())


class Steps:
    """A trainer's steps and updates, each by a call of its actor, in which one of two checkpoints is loaded."""

    def __init__(self, actor, flags: list[str], directories: list[str]) -> None:
        self.actor, self.flags, self.directories = actor, flags, directories

    def train(self, which: int) -> None:
        import ray

        ray.get(self.actor.load.remote(self.flags, self.directories[which]))

    def begin(self) -> bool:
        """Take a step to the first checkpoint, and go on to the second."""
        import ray

        return ray.get(self.actor.begun.remote(self.flags, self.directories))

    def update(self, *how) -> list:
        import ray

        return ray.get(self.actor.update_rollout_weights.remote(*how))

    def make(self, engines: list, replaces: bool, **options: str) -> None:
        import ray

        ray.get(self.actor.update_rollout.remote(engines, replaces, options))


class Answers:
    """An engine's actor that answers slime's calls, and listens at its address."""

    def __init__(self, port: int, kind: str) -> None:
        self.url, self.kind, self.server = (
            f"http://127.0.0.1:{port}",
            kind,
            socket.create_server(("127.0.0.1", port)),
        )

    def get_url(self) -> str:
        return self.url

    def pause_generation(self) -> None:
        if self.kind == "refuses":
            raise RuntimeError("it refuses the pause")

    def flush_cache(self) -> None:
        pass

    def continue_generation(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def stall(self) -> None:
        time.sleep(60)


def replaced_in_slime(trainer: Steps, url: str, dying: tuple, replace, served) -> dict:
    """What servers of a rollout serve after updates during which one of them dies, and after slime has replaced it.
    `dying` is the second server's actor, with its address, and `replace` starts a third."""
    import ray
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    from reshard.comm.http import call_route

    made = lambda at: ray.remote(SGLangEngine).options(num_cpus=0).remote(at)  # noqa: E731
    says = lambda *urls: [[*served(one), call_route(one, "model_info")["weight_version"]] for one in urls]  # noqa: E731

    first, second = made(url), made(dying[1])
    trainer.make([first, second], True)
    trainer.train(1)
    said = {"both": [trainer.update(), says(url, dying[1])]}
    trainer.train(0)
    said["dies"] = [trainer.update("update_weights_from_distributed", (second, dying[0])), says(url)]
    said["ended"] = caught(lambda: ray.get(second.get_url.remote()))
    trainer.train(1)
    said["without it"] = [trainer.update(), says(url)]
    third, third_url = replace()
    new = made(third_url)
    said["new"] = says(third_url)
    ray.get(trainer.actor.replace_engines.remote([first, second, new]))
    trainer.train(0)
    said["replaced"] = [trainer.update(), says(url, third_url)]
    trainer.make([first, new], True, RESHARD_BEGIN="1")
    trainer.train(1)
    said["all"] = [trainer.update(), says(url, third_url)]
    said["begun"] = trainer.begin()
    end_server(third)
    trainer.train(0)
    said["died while begun"] = [trainer.update(), says(url)]
    trainer.make([first, made(third_url)], False)
    said["not replaced"] = trainer.update()
    ray.get(first.continue_generation.remote())
    trainer.make([first], True)
    return said


def main() -> None:
    import ray

    from reshard.comm.http import call_route

    checkpoints, flags = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    config = composed(checkpoints[0][0], sys.argv[3:])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    from verl.workers.rollout.replica import RolloutMode

    def launch(rank: int) -> tuple:
        """Start a server; return its actor, and what ends when it answers."""
        options = {"name": f"sglang_server_{rank}_0", "num_cpus": 0, "max_concurrency": 8}
        started = ray.remote(server_class()).options(**options).remote(
            config=config.rollout, model_config=config.model, rollout_mode=RolloutMode.HYBRID, workers=[],
            replica_rank=rank, node_rank=0, nnodes=1, cuda_visible_devices="", base_gpu_id=0,
        )  # fmt: skip
        return started, started.launch_server.remote()

    def url_of(launched: tuple) -> str:
        """Return the address of a server that answers."""
        ray.get(launched[1])
        host, port = ray.get(launched[0].get_server_address.remote())
        return f"http://{host}:{port}"

    first, second = launch(0), launch(1)
    server = first[0]
    actor, beside = (ray.remote(Actor).options(num_cpus=0).remote() for _ in range(2))
    outcome: dict = {"adapters": ray.get([actor.adapt.remote(config), beside.adapt.remote(config)])}
    ray.get(actor.load.remote(flags, checkpoints[0][1]))
    url = url_of(first)

    def served(at: str = url) -> list:
        answer = call_route(at, "generate", {"input_ids": [7, 1, 30, 4, 999, 5], **ASKED})
        return [answer["meta_info"]["input_token_logprobs"], answer["output_ids"]]

    outcome |= {"dummy": served(), "served": [], "loaded": [], "said": []}
    outcome["lora"] = ray.get(actor.sync.remote(1, "123"))[:2]
    for step, (_, mcore) in enumerate(checkpoints):
        ray.get(actor.load.remote(flags, mcore))
        outcome["said"].append(ray.get(actor.sync.remote(step + 3))[:2])
        outcome["served"].append([*served(), ray.get(server.steps.remote())])
    outcome["version"] = call_route(url, "model_info")["weight_version"]
    from reshard.integrations.sync import ray_address

    ray.get(actor.load.remote(flags, checkpoints[0][1]))
    address = ray_address()
    outcome["apart"] = [
        one[:2] for one in ray.get([actor.send.remote(address), beside.receive.remote(address)])
    ]
    outcome["served"].append([*served(), ray.get(server.steps.remote())])
    ray.get(actor.load.remote(flags, checkpoints[1][1]))
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = ray.remote(SGLangEngine).options(num_cpus=0).remote(url)
    outcome["slime"] = ray.get(actor.update_by_slime.remote(engine, "decoder.final_layernorm.weight"))
    outcome["served"].append([*served(), ray.get(server.steps.remote())])
    outcome["version of slime"] = call_route(url, "model_info")["weight_version"]
    outcome["begun"] = begun_by_slime(actor, engine, flags, [mcore for _, mcore in checkpoints], served, url)
    directories = [mcore for _, mcore in checkpoints]

    def replace() -> tuple:
        third = launch(2)
        return third[0], url_of(third)

    trainer = Steps(actor, flags, directories)
    outcome["met"] = ray.get(actor.meet_engines.remote())
    outcome["replaced"] = replaced_in_slime(trainer, url, (second[0], url_of(second)), replace, served)
    for hf, _ in (*checkpoints, *checkpoints):
        ray.get(engine.flush_cache.remote())  # with traces of requests it would end
        call_route(url, "update_weights_from_disk", {"model_path": hf, "load_format": "safetensors"})
        outcome["loaded"].append(served())
    server.die.remote()
    outcome["died"] = ray.get(actor.sync.remote(7))
    ray.shutdown()
    print("SAID " + json.dumps(outcome, default=str))


if __name__ == "__main__":
    main()
