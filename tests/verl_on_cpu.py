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
    said["meeting"] = meetings(CheckpointEngineRegistry.get("reshard"))
    print("SAID " + json.dumps(said, default=str))


def meetings(kind) -> list:
    """Two syncs of two ranks of an actor and two workers, and one after a worker was replaced, as verl's manager calls them."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
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
    ray.shutdown()
    return found


if __name__ == "__main__":
    main()
