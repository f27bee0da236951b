"""vLLM's build for the CPU as the destination of a refit.

Where it can, that build serves from weights that it has packed for oneDNN, and drops the ones it has loaded. Both of its layers have
another way, which reads the weights as they were loaded, as vLLM does on a GPU; that is the way chosen here.
"""

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
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    if not hasattr(_custom_ops, "_supports_onednn") or not hasattr(CPUFusedMOE, "check_grouped_gemm"):
        raise ReshardError("this vLLM packs its weights for the CPU in a way that reshard does not know: use vLLM 0.26")
    _custom_ops._supports_onednn = False
    setattr(CPUFusedMOE, "check_grouped_gemm", lambda self, layer: (False, "none"))  # noqa: B010
