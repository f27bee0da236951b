"""vLLM's build for the CPU as the destination of a refit.

Where it can, that build serves from weights that it has packed for oneDNN, and drops the ones it has loaded. Both of its layers have
another way, which reads the weights as they were loaded, as vLLM does on a GPU; that is the way chosen here.
"""

import os
import time
from typing import Any

from reshard.errors import ReshardError


def on_cpu() -> bool:
    """Whether this process's vLLM is the build for the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def keep_weights_plain() -> None:
    """Make layers that are built from now on, in this process, serve from their weights as loaded; nothing on a GPU.

    Raises ReshardError where this vLLM has no such way.
    """
    if not on_cpu():
        return
    name_shared_memory()
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    if not hasattr(_custom_ops, "_supports_onednn") or not hasattr(CPUFusedMOE, "check_grouped_gemm"):
        raise ReshardError("this vLLM packs its weights for the CPU in a way that reshard does not know: use vLLM 0.26")
    _custom_ops._supports_onednn = False
    setattr(CPUFusedMOE, "check_grouped_gemm", lambda self, layer: (False, "none"))  # noqa: B010


def name_shared_memory() -> None:
    """Let the ranks of an engine started by torchrun share memory under a name of their own; nothing on a GPU.

    vLLM 0.26 gives that of every such engine of a host the same name, and fails where one is running or was killed.
    """
    if not on_cpu():
        return
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    if getattr(shared, "named_by_reshard", False):
        return
    plain = shared.make_group_name

    def named(communicator: Any) -> str:
        import torch.distributed as dist

        if not hasattr(communicator, "reshard_name"):
            own = [f"reshard-{os.getpid()}-{time.time_ns()}"]
            dist.broadcast_object_list(own, communicator.ranks[0], communicator.device_group)
            communicator.reshard_name = own[0]
        return f"{communicator.reshard_name}-{plain(communicator).lstrip('/')}"

    shared.make_group_name = staticmethod(named)  # type: ignore[method-assign, assignment]
    shared.named_by_reshard = True  # type: ignore[attr-defined]
