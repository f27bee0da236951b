"""Uses of vLLM that are no part of its interface, for vLLM 0.24 to 0.33; those that concern layers
are in `reshard.engines.vllm.layers` and `reshard.engines.vllm.quantized.layers`.

Importing this changes nothing in vLLM. What has to be changed is changed while a model is made, and
put back.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from importlib.util import find_spec
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.extras import importing
from reshard.engines.tested import TestedEngine

with importing("vllm"):
    import torch
    import torch.distributed as dist

OLDEST, NEWEST = "0.24", "0.33"  # versions that refits were tested with
_TESTED = TestedEngine("vLLM", "vllm", f"{OLDEST} to {NEWEST}: use one of those")
unknown, known = _TESTED.unknown, _TESTED.known


def installed_version() -> str:
    """Return the version of vLLM in this process."""
    return _TESTED.installed


# What the names of environment variables contain that choose kernels, or how these keep weights; and of those that
# choose something else.
OF_KERNELS = (
    "MARLIN", "HUMMING", "DEEP_GEMM", "FLASHINFER", "MOE", "FP8", "FP4", "MXFP", "INT4", "QUANT"
)  # fmt: skip
OF_OTHERS = (
    "ATTN", "ATOMIC", "AUTOTUNE", "CUBIN", "DISPATCH", "MAX_TOKENS", "REDUCE", "ROUTING", "SAMPLER", "TOPK",
    "WARMUP", "WORKSPACE",
)  # fmt: skip


def set_for_kernels() -> dict[str, str]:
    """Return the values of vLLM's environment variables that choose kernels, or how these keep weights, by name."""
    with known("has its environment variables elsewhere"):
        from vllm import envs

        names = [name for name in dir(envs) if name.startswith("VLLM_")]
    chosen = [name for name in names if any(word in name for word in OF_KERNELS)]
    return {name: repr(getattr(envs, name)) for name in chosen if not any(word in name for word in OF_OTHERS)}


def in_config(config: Any) -> AbstractContextManager[Any]:
    """Return a context in which this is vLLM's current ``VllmConfig``."""
    with known("sets its config in another way"):
        from vllm.config import set_current_vllm_config
    context: AbstractContextManager[Any] = set_current_vllm_config(config)
    return context


def driver_worker(llm: Any) -> Any:
    """Return the worker of an ``LLM``, or of its ``LLMEngine``. Raises ReshardError if it runs in
    another process."""
    try:
        worker = getattr(llm, "llm_engine", llm).model_executor.driver_worker
    except AttributeError as error:
        raise ReshardError(
            "this LLM's workers run in other processes: start it with "
            "worker_extension_cls='reshard.engines.vllm.worker.RefitExtension'"
        ) from error
    return getattr(worker, "worker", worker)


def draft_model(worker: Any) -> Any:
    """Return the model that drafts tokens for that of a worker; None if there is none, or it has no
    weights."""
    runner = getattr(worker, "model_runner", None)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model: Any = getattr(drafter, "model", None)
    while hasattr(model, "unwrap"):  # vLLM's wrapper that captures it for CUDA graphs
        model = model.unwrap()
    return model if hasattr(model, "named_parameters") else None


def drafts_on_last_stage(config: Any) -> bool:
    """Return True if tokens are drafted on the last of several pipeline stages, and by nobody on the others."""
    return config.speculative_config is not None and config.parallel_config.pipeline_parallel_size > 1


def draft_load_format(config: Any) -> str:
    """Return the ``load_format`` of a drafter."""
    own = getattr(config.speculative_config, "draft_load_config", None)
    return str((own or config.load_config).load_format)


def never_slept(worker: Any) -> bool:
    """Tell whether a worker has certainly never slept, which vLLM shows from 0.26 on; and has no other way to discard
    its weights."""
    return getattr(worker, "_sleep_mode_backend", False) is None and not hasattr(worker, "discard")


def keeps_buffers_of_drafters() -> bool:
    """Tell whether vLLM keeps a drafter's buffers in sleep, as it does those of the model."""
    with known("does not say its version as it did"):
        from vllm import __version_tuple__

        major, minor = __version_tuple__[:2]
    return (int(major), int(minor)) >= (0, 32)


def expert_moves(worker: Any) -> list[Any]:
    """Return the states of the moves of experts by their load (EPLB), of a worker's model and its drafter, that vLLM
    carries out in the background now: ``rebalanced`` until they end, ``pending_result`` once a layer is copied."""
    state = getattr(getattr(worker, "model_runner", None), "eplb_state", None)
    if state is None:
        return []
    with known("moves experts in the background in another way"):
        if not state.is_async:
            return []
        return [
            one for one in state.model_states.values() if one.rebalanced or one.pending_result is not None
        ]


def call_before_moves(worker: Any, moving: Callable[[], None]) -> bool:
    """Have `moving` called before a worker moves experts by their load (EPLB), which it does in its own steps; return
    False if there is no worker to see that."""
    state = getattr(getattr(worker, "model_runner", None), "eplb_state", None)
    if state is None:
        return False
    with known("moves experts by their load in another way"):
        step, rearrange = state.step, state.rearrange
    if getattr(step, "calls_before_moves", None) == moving:
        return True

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if expert_moves(worker):  # which this step may take over, and a later one begins
            moving()
        return step(*args, **kwargs)

    def rearranged(*args: Any, **kwargs: Any) -> Any:
        moving()
        return rearrange(*args, **kwargs)

    stepped.calls_before_moves = moving  # type: ignore[attr-defined]
    state.step, state.rearrange = stepped, rearranged
    return True


def tensor_parallel() -> tuple[int, int]:
    """Return the size of this rank's tensor parallel group, and its rank there."""
    with known("does not say its tensor parallel group as it did"):
        from vllm.distributed import parallel_state

        group = parallel_state.get_tp_group()
        return group.world_size, group.rank_in_group


def pipeline_parallel() -> tuple[int, int]:
    """Return the number of pipeline stages, and which of them this rank is in."""
    with known("does not say its pipeline parallel group as it did"):
        from vllm.distributed import parallel_state

        group = parallel_state.get_pp_group()
        return group.world_size, group.rank_in_group


def tensor_parallel_group() -> Any:
    """Return the process group of this rank's tensor parallel ranks, for tensors on their
    devices."""
    with known("keeps its process groups elsewhere"):
        from vllm.distributed import parallel_state

        return parallel_state.get_tp_group().device_group


def end_update(worker: Any) -> None:
    """End an update of vLLM's weight transfer that a worker has under way, as far as its vLLM counts them."""
    if getattr(worker, "_weight_update_active", False):
        worker._weight_update_active = False


def agree(is_done: bool) -> bool:
    """Return True if all workers of this engine, who all call this, say so."""
    import torch
    import torch.distributed as dist

    with known("has other groups of workers"):
        from vllm.distributed import parallel_state

        groups = [parallel_state.get_tp_group(), parallel_state.get_pp_group()]
        said = torch.tensor([int(is_done)])
        for group in groups:
            if group.world_size > 1:
                dist.all_reduce(said, dist.ReduceOp.MIN, group.cpu_group)
    return bool(said.item())


def end_groups() -> None:
    """End vLLM's groups in this process, once it holds no engine; torch's own group stays."""
    with known("keeps its process groups elsewhere"):
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None


def is_batch_invariant() -> bool:
    """Tell whether engines in this process run kernels whose results do not depend on the batch
    (``VLLM_BATCH_INVARIANT=1``)."""
    with known("does not say whether it is batch invariant"):
        from vllm import envs

        return bool(envs.VLLM_BATCH_INVARIANT)


def end_batch_invariance() -> None:
    """Give torch the operators back that a batch invariant engine has replaced in this process, once it holds no
    engine; the next engine replaces them again."""
    if not is_batch_invariant():
        return
    with known("keeps torch's operators elsewhere"):
        from vllm.model_executor.layers import batch_invariant

        if batch_invariant._batch_invariant_LIB is not None:
            batch_invariant._batch_invariant_LIB._destroy()
        batch_invariant._batch_invariant_LIB = None
        batch_invariant._batch_invariant_MODE = False
        torch.bmm = torch._C._VariableFunctions.bmm


def on_cpu() -> bool:
    """Tell whether this process's vLLM is the build for the CPU."""
    with known("does not say its platform"):
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())


@contextmanager
def plain_weights() -> Iterator[None]:
    """Let models that vLLM makes or loads inside this context, in this process, serve from weights
    as they are loaded.

    On a GPU they do, and this changes nothing. The build for the CPU packs weights for oneDNN if it
    can, and drops the loaded ones. Its linear layers and experts can also read weights as they were
    loaded, which is chosen here. From 0.28 on experts in bf16 cannot: they stay packed, and a refit
    refuses them. Also, engines of one host that torchrun started get shared memory by different
    names.

    Raises ReshardError if this vLLM's linear layers cannot read plain weights.
    """
    if not on_cpu():
        yield
        return
    from vllm import _custom_ops

    what = "packs its weights for the CPU in a way that reshard does not know"
    plain_linear = _replaced(_custom_ops, "_supports_onednn", False, what)
    plain_experts: AbstractContextManager[None] = nullcontext()
    if find_spec("vllm.model_executor.layers.fused_moe.cpu_fused_moe") is not None:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        plain_experts = _replaced(
            CPUFusedMOE, "check_grouped_gemm", lambda self, layer: (False, "none"), what
        )
    with own_shared_memory(), plain_linear, plain_experts:
        yield


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """While it is open, the ranks of an engine started by torchrun share memory under a name of
    their own, and under none once all have mapped it; nothing on a GPU.

    vLLM gives that of every such engine of a host the same name, and fails where one is running or
    was killed. It takes the name away when it ends, and so leaves the memory where it is killed.
    """
    if not on_cpu():
        yield
        return
    from vllm.distributed.device_communicators import cpu_communicator

    shared = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    what = "names its shared memory in another way"
    if shared is None or not (hasattr(shared, "make_group_name") and hasattr(shared, "_init_cpu_shm")):
        raise unknown(what)
    if hasattr(shared.make_group_name, "of_vllm"):  # opened twice
        yield
        return
    plain, plain_init = shared.make_group_name, shared._init_cpu_shm

    def mapped(self: Any) -> int:
        handle: int = plain_init(self)  # whose last step is a barrier, when each rank has mapped that of all
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank}")
        return handle

    def named(communicator: Any) -> str:
        if not hasattr(communicator, "reshard_name"):
            own = [f"reshard-{os.getpid()}-{time.time_ns()}"]
            dist.broadcast_object_list(own, communicator.ranks[0], communicator.device_group)
            communicator.reshard_name = own[0]
        return f"{communicator.reshard_name}-{plain(communicator).lstrip('/')}"

    named.of_vllm = plain  # type: ignore[attr-defined]
    with (
        _replaced(shared, "make_group_name", staticmethod(named), what),
        _replaced(shared, "_init_cpu_shm", mapped, what),
    ):
        yield


def with_plain_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, called within `plain_weights`."""

    @wraps(method)
    def opened(*args: Any, **kwargs: Any) -> Any:
        with plain_weights():
            return method(*args, **kwargs)

    return opened


@contextmanager
def _replaced(owner: Any, name: str, value: Any, what: str) -> Iterator[None]:
    """Replace an attribute of a module or class while this is open."""
    if name not in vars(owner):
        raise unknown(what)
    before = vars(owner)[name]  # not by getattr, which takes a static method's wrapping off
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def register_loader(load_format: str, loader: type) -> None:
    """Let vLLM load weights with this class for this ``load_format``; may be called again."""
    with known("registers no loaders, or elsewhere"):
        from vllm.model_executor import model_loader

        if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(load_format) is not loader:
            model_loader.register_model_loader(load_format)(loader)


def register_transfer(backend: str, module: str, name: str) -> None:
    """Let vLLM make the class `name` of `module` for this backend of ``weight_transfer_config``;
    may be called again."""
    with known("registers no weight transfer, or elsewhere"):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)


def before_engine_config(complete: Callable[[Any], None]) -> None:
    """Let `complete` complete an engine's arguments, in this process, before vLLM makes its config
    of them.

    vLLM has no such call for plugins. The first `complete` stays.
    """
    with known("makes an engine's config elsewhere"):
        from vllm.engine.arg_utils import EngineArgs

        plain = EngineArgs.create_engine_config
    if hasattr(plain, "of_vllm"):
        return

    @wraps(plain)
    def completed(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        complete(arguments)
        return plain(arguments, *args, **kwargs)

    completed.of_vllm = plain  # type: ignore[attr-defined]
    setattr(EngineArgs, "create_engine_config", completed)  # noqa: B010
