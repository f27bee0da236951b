"""Uses of SGLang that are no part of its interface, for SGLang 0.5.16 to 0.5.23.

Importing this changes nothing in SGLang.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError
from reshard.core.extras import importing
from reshard.engines.layout import Split
from reshard.engines.tested import TestedEngine

with importing("sglang"):
    import torch

WEIGHTS = "weights"  # the tag of their memory
# What an attention with latent keys makes of `kv_b_proj`; the copy of its weights in fp32 that a router
# makes when it first runs; and the weights of a norm that adds 1 to them, with that 1.
OF_ATTENTION = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
OF_ROUTER, OF_NORM = "_weight_fp32", "gemma_weight"
# What hooks are put around: a run of the model, a request, and what else writes or frees weights.
_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = f"{_SCHEDULER}_components.weight_updater.SchedulerWeightUpdaterManager"
RUN = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
REQUEST = f"{_SCHEDULER}.Scheduler._add_request_to_queue"
RELEASE = f"{_UPDATER}.release_memory_occupation"
LOAD = f"{_UPDATER}.update_weights_from_disk"
UPDATES = tuple(f"{_UPDATER}.update_weights_from_{name}" for name in ("tensor", "ipc"))
# From 0.5.21 on an update is a session, in which others may also write with no call of SGLang's.
BEGIN = f"{_UPDATER}.begin_weight_update"
CALL = f"{_SCHEDULER}.Scheduler.handle_rpc_request"  # of collective_rpc, which logs its arguments
# Their way to weights that come over a group of processes, and the names of their answers.
CONNECT = f"{_UPDATER}.init_weights_update_group"
UPDATE = f"{_UPDATER}.update_weights_from_distributed"
CLOSE = f"{_UPDATER}.destroy_weights_update_group"
# The route of their update, in the server's process.
SERVE_UPDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_distributed"
BUSY = (
    "this SGLang has requests under way, whose keys and values are of earlier weights: wait for them, or call "
    "pause_generation(mode='abort'), before a refit"
)
FINISHING_SECONDS = 1.0  # that a request may be on its way out, whose answer has been sent
GET_LOADER = "sglang.srt.model_loader.loader.get_model_loader"
CONNECTED = "InitWeightsUpdateGroupReqOutput"
UPDATED = "UpdateWeightsFromDistributedReqOutput"
DESTROYED = "DestroyWeightsUpdateGroupReqOutput"
_TESTED = TestedEngine("SGLang", "sglang", "0.5.16 to 0.5.23: use one of those")
unknown, known = _TESTED.unknown, _TESTED.known


def installed_version() -> str:
    """Return the version of SGLang in this process."""
    return _TESTED.installed


class Parallel(NamedTuple):
    """The places of this process in SGLang's groups."""

    tp: Split
    pp: Split
    ep: Split
    moe_tp: Split


def resolved(arguments: Any) -> Any:
    """Return a ``ServerArgs`` with what SGLang has decided in the place of what it was given: from 0.5.19 on
    it keeps the two apart."""
    view = _resolving_view()
    return arguments if view is None else view(arguments)


@cache  # an import that fails looks through all folders each time
def _resolving_view() -> Callable[[Any], Any] | None:
    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view
    except ImportError:
        return None
    view: Callable[[Any], Any] = resolving_view
    return view


def parallel() -> Parallel:
    """Return where this process is in SGLang's groups."""
    with known("does not say its parallel groups as it did"):
        from sglang.srt.runtime_context import get_parallel

        groups = get_parallel()
        return Parallel(
            Split(groups.tp_size, groups.tp_rank),
            Split(groups.pp_size, groups.pp_rank),
            Split(groups.moe_ep_size, groups.moe_ep_rank),
            Split(groups.moe_tp_size, groups.moe_tp_rank),
        )


def moves_experts(arguments: Any) -> bool:
    """Tell whether SGLang moves experts by their load (EPLB), given the ``ServerArgs``."""
    with known("does not say whether it moves experts as it did"):
        return bool(arguments.enable_eplb)


def located_experts(arguments: Any) -> torch.Tensor | None:
    """Return the experts in the places of all ranks ``[layers, places]``, given the ``ServerArgs``; None where they are
    in order, each once, and stay there."""
    with known("does not say where experts lie as it did"):
        located = _located_metadata()
        if located is None:
            return None
        table: torch.Tensor = located.physical_to_logical_map_cpu
        in_order = torch.arange(table.shape[1]).expand_as(table)
        stay = not moves_experts(arguments) and torch.equal(table, in_order)
        return None if stay else table


def _located_metadata() -> Any:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


@contextmanager
def experts_in_turn(arguments: Any) -> Iterator[None]:
    """While it is open, SGLang's loader puts experts into all places in turn, wherever it has moved them since, and
    whichever copies it would pass over; given the ``ServerArgs``."""
    table = located_experts(arguments)
    if table is None:
        yield
        return
    with known("does not say where experts lie as it did"):
        located = _located_metadata()
        name = "logical_to_all_physical_map_cpu"  # which the loader reads
        before = getattr(located, name)
        experts, places = located.num_logical_experts, table.shape[1]
        copies = torch.full((experts, -(-places // experts) * experts), -1)
        copies[torch.arange(places) % experts, torch.arange(places)] = torch.arange(places)
    setattr(located, name, copies.expand(len(table), *copies.shape))
    try:
        yield
    finally:
        setattr(located, name, before)


def expert_runner(module: torch.nn.Module) -> str:
    """Return the kernels that run a layer's experts, which decide the order of their weights:
    ``triton``."""
    with known("does not say its kernels of experts as it did"):
        method: Any = module.quant_method
        if getattr(method, "_aiter_runner", None) is not None:
            return "aiter"
        return str(method.runner.runner_backend.value)


def idle_indexers(model: torch.nn.Module) -> tuple[str, ...]:
    """Return what the names of those indexers begin with whose layers take the tokens that another
    layer's has chosen: SGLang makes them, and never runs them."""
    modules = model.named_modules()
    return tuple(f"{path}.indexer." for path, module in modules if getattr(module, "skip_topk", None))


def is_moe(module: torch.nn.Module) -> bool:
    """Tell whether a module holds routed experts."""
    return hasattr(module, "moe_runner_config") and hasattr(module, "num_local_experts")


# Methods that serve from fp8 blocks, and the kernels of linear layers that read them as they were loaded.
BLOCK_METHODS = ("Fp8LinearMethod", "Fp8MoEMethod")
BLOCK_KERNELS = (
    "triton_w8a8_block_fp8_linear",
    "cutlass_w8a8_block_fp8_linear_with_fallback",
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
    "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
    "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback",
)


def block_kernel(module: torch.nn.Module) -> str | None:
    """Return the kernel that multiplies by a layer's fp8 blocks of 128x128, with scales in fp32 or, after
    DeepGEMM's preparation, packed; None for a layer that serves from something else."""
    method: Any = module.quant_method
    if type(method).__name__ not in BLOCK_METHODS:
        return None
    with known("does not say how fp8 is served as it did"):
        is_plain = method.quant_config.is_checkpoint_fp8_serialized and not method.use_mxfp8
        if not is_plain or list(method.weight_block_size or []) != [128, 128]:
            return None
        if is_moe(module):
            return None if method.is_fp4_expert else expert_runner(module)
        linear = method.w8a8_block_fp8_linear
        kernel = str(getattr(linear, "func", linear).__name__)  # which 0.5.19 binds options to
        return kernel if kernel in BLOCK_KERNELS and not method.use_marlin else None


def packs_scales(module: torch.nn.Module) -> bool:
    """Tell whether DeepGEMM's preparation has packed the scales of a layer's blocks."""
    return any(getattr(parameter, "format_ue8m0", False) for parameter in module.parameters(recurse=False))


def is_made_later(value: Any) -> bool:
    """Tell whether a value is one that SGLang makes of a model's tensors when it first needs it, and has not yet: the
    experts that it moves by their load."""
    return type(value).__name__ == "LazyValue" and getattr(value, "_creator", None) is not None


def is_cache(module: torch.nn.Module) -> bool:
    """Tell whether a module's method is that of a quantized cache of keys and values."""
    return type(module.quant_method).__name__.endswith("KVCacheMethod")


class Experts(NamedTuple):
    """The experts of a layer: how many places for them this rank has, which of all ranks' is the first, and how many of
    them are shared ones that every token goes to."""

    local: int
    first: int
    fused_shared: int

    @property
    def places(self) -> range:
        """The places of this rank among those of all."""
        return range(self.first, self.first + self.local - self.fused_shared)


def experts_of(module: torch.nn.Module) -> Experts | None:
    """Return where a layer's experts lie, or None if it has none."""
    if not is_moe(module):
        return None
    with known("does not say where a layer's experts are as it did"):
        layer: Any = module
        local, shared = int(layer.num_local_experts), int(layer.num_fused_shared_experts)
        return Experts(local, int(layer.moe_ep_rank) * (local - shared), shared)


def layer_of(module: torch.nn.Module) -> int:
    """Return the number of the layer that a module with experts is of."""
    with known("does not number its layers as it did"):
        layer: Any = module
        return int(layer.layer_id)


def split_of(module: torch.nn.Module) -> Split | None:
    """Return by how many ranks a linear layer or an embedding is split, None for other modules."""
    ranks = getattr(module, "tp_size", None)
    if ranks is None:
        return _split_of_group(module)
    indices = getattr(module, "shard_indices", None)
    if indices is None:
        return Split(ranks, getattr(module, "tp_rank", 0))
    # An embedding does not say its rank, only where its rows begin.
    rows = indices.num_elements_padded
    return Split(ranks, int(indices.padded_org_vocab_start_index // rows))


def _split_of_group(module: torch.nn.Module) -> Split | None:
    """Return by how many ranks a linear layer is split, which from 0.5.22 on has a group in the place of
    sizes, and none if it is not split."""
    if not hasattr(module, "tp_group"):
        return None
    with known("does not say how a layer is split as it did"):
        group: Any = module.tp_group
        return Split(1, 0) if group is None else Split(group.world_size, group.rank_in_group)


@contextmanager
def without_processing(model: torch.nn.Module) -> Iterator[None]:
    """While it is open, the model's loader does not derive matrices from the weights, of which it has
    none."""
    deriving = [module for module in model.modules() if hasattr(module, "post_load_weights")]
    for module in deriving:
        vars(module)["post_load_weights"] = lambda *_, **__: None
    try:
        yield
    finally:
        for module in deriving:
            del vars(module)["post_load_weights"]


def derive(model: torch.nn.Module) -> None:
    """Let the model derive matrices from its weights, in place."""
    if hasattr(model, "post_load_weights"):
        with torch.no_grad():
            model.post_load_weights()  # type: ignore[operator]


def published_config(arguments: Any) -> dict[str, Any]:
    """Return the config that an engine was started with, as it was published: SGLang's classes change
    theirs."""
    with known("reads its config in another way"):
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(arguments.model_path, revision=arguments.revision)
        overrides: dict[str, Any] = json.loads(arguments.json_model_override_args or "{}")
    return config | overrides


def interleaves_gate_and_up() -> bool:
    """Tell whether rows of gate and up take turns in experts, which SGLang has from 0.5.18 on."""
    return os.environ.get("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "").lower() in ("1", "true", "yes", "y")


def frozen_copies(module: torch.nn.Module) -> str | None:
    """Return why SGLang takes no other weights for a module, of which it keeps copies that it does not make
    anew, as a sentence of its own; None if it does."""
    return getattr(module, "_derived_weight_cache_error", None)


def served_model(scheduler: Any) -> tuple[torch.nn.Module, Any]:
    """Return the model that a scheduler runs, and its ``ServerArgs``, resolved."""
    with known("keeps its model elsewhere"):
        return scheduler.tp_worker.model_runner.model, resolved(scheduler.server_args)


def draft_worker(scheduler: Any) -> Any:
    """Return what holds the drafter of a scheduler that is a model of its own; None if it drafts by none."""
    arguments = resolved(scheduler.server_args)
    if getattr(arguments, "speculative_algorithm", None) is None:
        return None
    with known("keeps its drafter elsewhere"):
        worker = scheduler.draft_worker.draft_worker
        _ = model_of_drafter(worker), worker.hot_token_id
        return worker


def model_of_drafter(worker: Any) -> torch.nn.Module:
    """Return the model of a ``draft_worker``."""
    model: torch.nn.Module = worker.draft_runner.model
    return model


def config_of_drafter(worker: Any) -> dict[str, Any]:
    """Return the config of a ``draft_worker``'s model."""
    with known("keeps its drafter's config elsewhere"):
        config: dict[str, Any] = worker.draft_runner.model_config.hf_config.to_dict()
        return config


def draft_load_format(arguments: Any) -> str:
    """Return the ``load_format`` of a drafter."""
    return str(getattr(arguments, "speculative_draft_load_format", None) or arguments.load_format)


def rank_in_engine(scheduler: Any) -> int:
    """Return the rank of a scheduler within its engine.

    Raises ReshardError if SGLang does not call all of an engine's schedulers: replicas of a model are
    called each on its own.
    """
    arguments = resolved(scheduler.server_args)
    if arguments.dp_size > 1 and not has_dp_attention(arguments):
        raise ReshardError(
            "SGLang's replicas of one server (--dp-size without --enable-dp-attention) cannot be called "
            "together: start a server for each, and connect them as engines of their own"
        )
    places = parallel()
    return places.pp.rank * places.tp.ranks + places.tp.rank


def has_dp_attention(arguments: Any) -> bool:
    """Tell whether attention is data parallel, given the ``ServerArgs``: ``--attn-dp-size`` from 0.5.22 on."""
    arguments = resolved(arguments)
    return bool(arguments.enable_dp_attention) or getattr(arguments, "attn_dp_size", None) not in (None, 1)


def ranks_of_engine() -> int:
    """Return how many schedulers this process's engine has."""
    places = parallel()
    return places.pp.ranks * places.tp.ranks


def has_stages(scheduler: Any) -> bool:
    """Tell whether an engine has stages of a pipeline, which SGLang calls one after the other."""
    return bool(resolved(scheduler.server_args).pp_size > 1)


def agree(scheduler: Any, is_done: bool) -> bool:
    """Return True if all schedulers of an engine without pipeline stages, who all call this, say so."""
    import torch.distributed as dist

    with known("has other groups of schedulers"):
        group, said = scheduler.tp_cpu_group, torch.tensor([int(is_done)])
        if dist.get_world_size(group) > 1:
            dist.all_reduce(said, dist.ReduceOp.MIN, group)
    return bool(said.item())


def is_asleep(scheduler: Any) -> bool:
    """Tell whether the memory of the weights has been released."""
    if scheduler is None:
        return False
    with known("does not say what memory it has released"):
        return WEIGHTS in scheduler.weight_updater.offload_tags


def check_idle(scheduler: Any) -> None:
    """Raise ReshardError while a scheduler has requests under way."""
    if scheduler is None:
        return
    drop_finished(scheduler)
    with known("does not say whether it has requests"):
        is_idle = scheduler.is_fully_idle()
    if not is_idle:
        raise ReshardError(BUSY)


def running_requests(scheduler: Any) -> list[Any]:
    """Return the requests that a scheduler runs, whose ``finished()`` tells when they are at their end; none
    if others wait for their turn."""
    with known("does not say whether it has requests"):
        running = [request for batch in _batches(scheduler) for request in batch.reqs]
        return [] if scheduler.waiting_queue or scheduler.grammar_manager.grammar_queue else running


async def is_busy(manager: Any) -> bool:
    """Tell whether a server runs requests, and does so for `FINISHING_SECONDS`; a paused one runs none."""
    with known("does not say whether it has requests"):
        end = time.monotonic() + FINISHING_SECONDS
        while not manager.is_pause and manager.model_update_lock._readers:
            if time.monotonic() > end:
                return True
            await asyncio.sleep(0.02)
    return False


def _batches(scheduler: Any) -> list[Any]:
    """Return the batches of a scheduler, of each turn of its loop with pipeline stages; some twice."""
    batches = [scheduler.last_batch, scheduler.running_batch]
    if has_stages(scheduler):
        batches += [*scheduler.running_mbs, *scheduler.mbs, *scheduler.last_mbs]
    return [batch for batch in batches if batch is not None]


def drop_finished(scheduler: Any) -> None:
    """Drop a scheduler's last batches if all of their requests have been answered: it would do so in the
    next turns of its loop, which wait for this call."""
    with known("does not say whether it has requests"):
        batches = _batches(scheduler)
        if not all(request.finished() for batch in batches for request in batch.reqs):
            return
        while scheduler.enable_overlap and scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        for batch in batches:
            batch.filter_batch()
        scheduler.last_batch = None


def flush_cache(scheduler: Any) -> None:
    """Forget the keys and values of earlier weights. Raises ReshardError if the scheduler has requests
    all the same."""
    if scheduler is None:
        return
    with known("flushes its cache in another way"):
        flushed = scheduler.flush_cache(empty_cache=False)
    if not flushed:
        raise ReshardError("this SGLang did not flush its cache of keys and values: refit it once more")


def forget_images() -> None:
    """Forget what a vision tower has made of images: SGLang keeps that in its process, by the image, and does not
    flush it with the keys and values."""
    places = [sys.modules.get(f"sglang.srt.managers.{name}") for name in ("mm_schedule", "mm_utils")]
    found = [vars(place)["embedding_cache"] for place in places if hasattr(place, "embedding_cache")]
    if any(places) and not found:
        raise unknown("keeps what it makes of images elsewhere")
    for images in found:
        if images is not None:
            images.clear()


def model_of(updater: Any) -> torch.nn.Module:
    """Return the model whose weights a scheduler's updater writes."""
    with known("keeps its model elsewhere"):
        model: torch.nn.Module = updater.tp_worker.model_runner.model
        return model


def keeps_released_weights(updater: Any) -> bool:
    """Tell whether weights whose memory was released come back with it."""
    return backs_up_weights(resolved(updater.scheduler.server_args))


def backs_up_weights(arguments: Any) -> bool:
    """Tell whether SGLang copies weights to the host before it releases their memory, given its ``ServerArgs``."""
    return bool(getattr(arguments, "enable_weights_cpu_backup", False))


def refuse_request(scheduler: Any, request: Any, why: str) -> None:
    """Answer a request with an error (503) in place of scheduling it."""
    with known("refuses requests in another way"):
        from http import HTTPStatus

        from sglang.srt.managers.io_struct import AbortReq

        reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": why}
        abort = AbortReq(finished_reason=reason, rid=request.rid)
        if hasattr(scheduler, "send_abort_output"):
            scheduler.send_abort_output(abort, request)
        else:
            scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)


def record_version(scheduler: Any, version: str | None) -> None:
    """Let a scheduler tell this version of the requests that it serves from now on, where it does that."""
    record = getattr(scheduler, "record_weight_version_change", None)
    if record is not None:
        record(new_version=version)


def answer(kind: str, success: bool, message: str) -> Any:
    """Return an answer to a request that changes weights, of this class."""
    with known("answers requests in another way"):
        from sglang.srt.managers import io_struct

        return getattr(io_struct, kind)(success=success, message=message)


def loader_of(load_config: Any, weights: Callable[[Any, torch.nn.Module], Iterator[Any]]) -> Any:
    """Return a loader of SGLang's that loads `weights`, which get a ``ModelConfig`` and the model, in the place
    of files."""
    with known("loads models in another way"):
        from sglang.srt.model_loader.loader import DefaultModelLoader

        class Loader(DefaultModelLoader):  # type: ignore[misc]
            def download_model(self, model_config: Any) -> None:
                """Fetch nothing."""

            def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[Any]:
                return weights(model_config, model)

        return Loader(replace(load_config, model_loader_extra_config={}))


def add_to_scheduler(methods: Mapping[str, Any]) -> None:
    """Give SGLang's scheduler these methods and attributes, by name."""
    with known("keeps its scheduler elsewhere"):
        from sglang.srt.managers.scheduler import Scheduler

        for name, method in methods.items():
            setattr(Scheduler, name, method)


def has_sessions() -> bool:
    """Tell whether SGLang's updates of weights are sessions."""
    with known("keeps its updates elsewhere"):
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        return hasattr(SchedulerWeightUpdaterManager, "begin_weight_update")


def hook_around(target: str, hook: Callable[..., Any]) -> None:
    """Have SGLang call `hook` with a function and its arguments in place of the function `target`."""
    with known("has no hooks for plugins"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, hook, HookType.AROUND)
