"""NeMo-RL on GPUs that policy and vLLM share, with refits, or on others, with refits that are begun: its script, which
runs with another synchronizer of weights.

    python -m reshard.integrations.nemo_rl examples/run_grpo.py --config ...

`examples/run_grpo_single_controller.py` gets a synchronizer that goes on without engines that have died.
With ``RESHARD_MONITOR`` its rollouts are checked too (`reshard.integrations.nemo_rl.monitored`).
"""

import functools
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reshard.core.errors import ReshardError
from reshard.integrations.monitoring import monitor
from reshard.integrations.nemo_rl.begun import BegunSynchronizer, begins_after_training
from reshard.integrations.nemo_rl.checkpoint_engine import WHERE, WORKER, checked_options, not_covered
from reshard.integrations.nemo_rl.colocated import ColocatedSynchronizer
from reshard.integrations.nemo_rl.driven import BACKEND
from reshard.integrations.nemo_rl.monitored import watch
from reshard.integrations.nemo_rl.survivors import with_survivors


def with_refits(setup: Callable[..., Any]) -> Callable[..., Any]:
    """Return NeMo-RL's ``setup`` of a run, changed so that policy and vLLM sync by refits.

    It raises ReshardError, before anything is started, for what a refit does not cover.
    """

    @functools.wraps(setup)
    def refitting(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        policy_config = master_config.policy
        generation = policy_config.get("generation") or {}
        if generation.get("backend") != "vllm":
            raise ReshardError(
                f"policy.generation.backend is {generation.get('backend')}: reshard refits vllm"
            )
        if not (policy_config.get("megatron_cfg") or {}).get("enabled"):
            raise ReshardError("reshard refits from Megatron here: set policy.megatron_cfg.enabled=true")
        given = (generation.get("refit_cfg") or {}).get(BACKEND) or {}
        is_separate = not generation["colocated"]["enabled"]
        options = checked_options(given)
        begins = is_separate and generation.get("refit_transport") == BACKEND and options.begin
        if not begins and (is_separate or generation.get("refit_transport") is not None):
            raise ReshardError(
                "policy and vLLM do not share GPUs: run NeMo-RL's own script, with policy.generation."
                f"refit_transport={BACKEND}"
            )
        why = not_covered(policy_config)
        if why:
            raise ReshardError(f"{why}, which reshard does not refit: run NeMo-RL's own script")
        if not is_separate:
            options.check_not_begun(f"begin of {WHERE}", "policy and vLLM share GPUs")
        engine = generation.setdefault("vllm_kwargs", {})
        if engine.setdefault("worker_cls", WORKER) != WORKER:
            raise ReshardError(
                f"vllm_kwargs.worker_cls is {engine['worker_cls']}: make that {WORKER}, or unset it"
            )
        if begins:
            generation["refit_cfg"][BACKEND] = {**given, "is_driven": True}
        started = setup(master_config, *args, **kwargs)
        policy, rollout = started[:2]
        if begins:
            begun = BegunSynchronizer(policy, rollout, options, rollout.weight_synchronizer)
            rollout.weight_synchronizer = begun
            policy.train = begins_after_training(policy.train, begun.begin, begun.forget)
            return started
        rollout.weight_synchronizer = ColocatedSynchronizer(policy, rollout, options)
        rollout.weight_synchronizer.init_communicator()
        return started

    return refitting


def main() -> None:
    """Run a script of NeMo-RL's that trains by GRPO, with refits."""
    if len(sys.argv) < 2:
        raise SystemExit(
            "python -m reshard.integrations.nemo_rl SCRIPT ...: give NeMo-RL's examples/run_grpo.py"
        )
    from nemo_rl.algorithms import grpo

    grpo.setup = with_refits(grpo.setup)
    with suppress(ImportError):  # which needs packages that other scripts do without
        from nemo_rl.algorithms.single_controller_utils import setup

        setup.create_weight_synchronizer = with_survivors(setup.create_weight_synchronizer)
    if monitor() is not None:
        watch(grpo)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
