"""A live vLLM model as the destination of a refit: its parameters, where they lie, and the guard that keeps it from serving.

Our rules (`reshard.vllm_layout`) say what each parameter is made of; vLLM's own loader, traced, must say the same.
"""

from collections.abc import Callable
from typing import Any

import torch

from reshard.boxes import whole
from reshard.collector import collector_paused
from reshard.errors import ReshardError, listed
from reshard.live.memory import Region
from reshard.live.trace import Trace, trace_load
from reshard.model import Model
from reshard.placement import LocalTensor, Part, Placement
from reshard.vllm_layout import VllmRank, vllm_placement

# Methods that serve from weights as they were loaded.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
PLAIN_MOE_BACKENDS = ("TRITON", "BATCHED_TRITON", "OOT", "CPU")  # the last one where it has not packed them


class VllmModel:
    """One rank of a running vLLM: a model, its ``VllmConfig``, and, where there are, the worker that runs it and the engine of this
    process that takes the requests.

    Raises ReshardError, before anything is changed, where the model serves from another arrangement of its weights than the
    loaded one, and where vLLM's loader disagrees with our rules.
    """

    def __init__(self, model: torch.nn.Module, config: Any, worker: Any = None, front: Any = None) -> None:
        self.module, self.vllm_config, self.worker, self.front = model, config, worker, front
        self.hf_config = _published(config.model_config.hf_config.to_dict())
        self.model = Model.from_hf(self.hf_config, f"vLLM's config of {config.model_config.model}")
        _refuse_processed(model)
        named = [*model.named_parameters(remove_duplicate=True), *model.named_buffers()]
        self.tensors: dict[str, torch.Tensor] = dict(named)
        self.rank = self._rank()
        with collector_paused():
            self.placement, self.regions = self._placement()
        self.derived = _derived_attention(model)
        self.version: int | None = None
        self._fit, self._guarded = True, False

    @staticmethod
    def from_worker(worker: Any, front: Any = None) -> "VllmModel":
        """The model of a vLLM worker (``vllm.v1.worker.gpu_worker.Worker``); `front` is the engine of this process, if it is here."""
        return VllmModel(worker.get_model(), worker.vllm_config, worker, front)

    @staticmethod
    def from_llm(llm: Any) -> "VllmModel":
        """The model of an ``LLM`` whose worker runs in this process (``external_launcher``, or without multiprocessing)."""
        try:
            worker = llm.llm_engine.model_executor.driver_worker
        except AttributeError as error:
            raise ReshardError(
                "this LLM's workers run in other processes: start it with worker_extension_cls='reshard.vllm_worker.RefitExtension'"
            ) from error
        return VllmModel.from_worker(getattr(worker, "worker", worker), llm.llm_engine)

    def _rank(self) -> VllmRank:
        from vllm.distributed import parallel_state

        tp = parallel_state.get_tp_group()
        moe_tp, moe_tp_rank, experts = tp.world_size, tp.rank_in_group, tuple(range(self.model.num_experts))
        for name, module in self.module.named_modules():
            config = getattr(module, "moe_config", None)
            if config is None or not hasattr(module, "expert_map_manager"):
                continue
            sizes = config.moe_parallel_config
            if sizes.enable_eplb or config.num_experts != self.model.num_experts:
                raise ReshardError(f"{name} has redundant experts (EPLB), which a refit does not support: set enable_eplb=False")
            moe_tp, moe_tp_rank = sizes.tp_size, sizes.tp_rank
            table = module.expert_map_manager.expert_map
            if table is not None:
                placed = sorted((local, expert) for expert, local in enumerate(table.tolist()[: self.model.num_experts]) if local >= 0)
                experts = tuple(expert for _, expert in placed)
            break
        layers = sorted({int(name.split(".")[2]) for name in self.tensors if name.startswith("model.layers.")})
        # Not by the stage: some of vLLM's models have the output on every one.
        outer = frozenset(row.hf for row in self.model.rows("model") if row.vllm and row.hf in self.tensors)
        sequence_parallel = self.vllm_config.parallel_config.use_sequence_parallel_moe
        return VllmRank(tp.world_size, tp.rank_in_group, moe_tp, moe_tp_rank, experts, tuple(layers), outer, sequence_parallel)

    def _placement(self) -> tuple[Placement, dict[Any, Region]]:
        """What the rules say, checked against what vLLM's loader does; or that alone, for a family without vLLM names, and where vLLM
        builds other modules than the rules know (DeepSeek's attention with ``VLLM_MLA_DISABLE=1``)."""
        family = self.model.family
        rules = any(row.vllm for row in family.layer)
        trace = trace_load(self.module, self._canonical())
        stray = sorted({copy.parameter for copy in trace.copies if copy.parameter not in self.tensors})
        if stray:
            raise ReshardError(f"vLLM's loader writes to {listed(stray, 3)}, which the running model no longer has")
        if not rules:
            return self._traced(trace)
        placement = vllm_placement(self.model, self.rank)
        if any(name not in self.tensors for name, _ in placement.tensors):
            return self._traced(trace)
        regions: dict[Any, Region] = {}
        said: dict[tuple, str] = {}
        for tensor in placement.tensors.values():
            name, expert = tensor.id
            live = self.tensors.get(name)
            shape = tensor.shape if expert is None else (len(self.rank.experts), *tensor.shape)
            if live is None or tuple(live.shape) != shape or not live.is_contiguous():
                has = "nothing of this name" if live is None else f"shape {list(live.shape)}, strides {list(live.stride())}"
                raise ReshardError(f"{name} should have shape {list(shape)} in vLLM, which has {has}")
            width = tensor.shape[1] if len(tensor.shape) == 2 else 1
            start = (expert or 0) * tensor.shape[0] * width
            regions[tensor.id] = Region(live, start, width)
            for part in tensor.parts:
                at = start + part.at[0] * width + (part.at[1] if len(part.at) == 2 else 0)
                said[name, at, part.name, part.box] = name
        found = {(c.parameter, c.offset, c.name, c.box): c.parameter for c in trace.copies}
        pitches = {c.parameter for c in trace.copies if c.pitch not in (0, self.tensors[c.parameter].shape[-1])}
        wrong = sorted({said.get(key) or found[key] for key in said.keys() ^ found.keys()} | pitches)
        if wrong:
            name = wrong[0]
            ours = sorted(str(key[1:]) for key in said if key[0] == name and key not in found)[:2]
            theirs = sorted(str(key[1:]) for key in found if key[0] == name and key not in said)[:2]
            raise ReshardError(
                f"vLLM's loader and the mapping table disagree on {listed(wrong, 3)}: "
                f"vLLM puts {theirs or 'nothing'}, the table {ours or 'nothing'}"
            )
        return placement, regions

    def _canonical(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every published tensor, without MTP layers, which vLLM's main model does not hold."""
        dtype = self.vllm_config.model_config.dtype
        named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

        def add(prefix: str, rows: list) -> None:
            for row in rows:
                if row.arrangement in ("ignored", "copy"):
                    continue
                shape = self.model.shape(row.shape)
                for expert in range(self.model.num_experts) if "{expert}" in row.hf else [None]:
                    name = prefix + (row.hf if expert is None else row.hf.replace("{expert}", str(expert)))
                    named[name] = (shape, torch.float32 if row.fp32 else dtype)

        add("", self.model.rows("model"))
        for layer, kind in enumerate(self.model.kinds):
            add(f"model.layers.{layer}.", self.model.rows("layer", kind))
        return named

    def _traced(self, trace: Trace) -> tuple[Placement, dict[Any, Region]]:
        """The traced copies themselves as a placement: one local tensor for each."""
        shapes = {name: shape for name, (shape, _) in self._canonical().items()}
        tensors, regions = [], {}
        covered: dict[str, int] = {}
        for copy in trace.copies:
            identity = (copy.parameter, copy.offset, copy.name)
            zero = (0,) * len(copy.box.lengths)
            tensors.append(LocalTensor(identity, copy.box.lengths, (Part(copy.name, copy.box, zero),)))
            regions[identity] = Region(self.tensors[copy.parameter], copy.offset, copy.pitch or copy.box.lengths[-1])
            covered[copy.parameter] = covered.get(copy.parameter, 0) + copy.box.volume
        for fill in trace.fills:
            identity = (fill.parameter, fill.offset, "")
            zeros = Region(self.tensors[fill.parameter], fill.offset, fill.elements)
            tensors.append(LocalTensor(identity, (fill.elements,), (), (whole((fill.elements,)),)))
            regions[identity] = zeros
            covered[fill.parameter] = covered.get(fill.parameter, 0) + fill.elements
        wrong = [name for name, n in covered.items() if n != self.tensors[name].numel()]
        if wrong:
            raise ReshardError(f"vLLM's loader does not fill {listed(wrong, 3)} exactly once")
        return Placement.of(shapes, tensors), regions

    def begin(self) -> None:
        """Mark the model unfit: from now on it refuses to run, until `end`."""
        self._fit = False
        self._guard()

    def end(self, version: int) -> None:
        """Mark the model fit again, with the version of the weights that it now has."""
        for module, dtype in self.derived:
            module.process_weights_after_loading(dtype)
        self._fit, self.version = True, version

    @property
    def fit(self) -> bool:
        """Whether the last refit, if any, was whole."""
        return self._fit

    def _guard(self) -> None:
        """From the first refit on, every run of the model asks first whether it is fit."""
        if self._guarded:
            return
        self._guarded = True
        if self.front is not None:
            # Before a request is scheduled: a worker that raises leaves vLLM's scheduler waiting for what will not come.
            self.front.add_request = self._asking_first(self.front.add_request)
        runner = getattr(self.worker, "model_runner", None)
        if runner is None:
            self.module.register_forward_pre_hook(lambda *_: self._refuse_unfit())
            return
        runner.execute_model = self._asking_first(runner.execute_model)

    def _asking_first(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._refuse_unfit()
            return plain(*args, **kwargs)

        return guarded

    def _refuse_unfit(self) -> None:
        if not self._fit:
            raise ReshardError("this vLLM holds a half-written model: a refit failed or is under way; refit it before it serves")


def _published(config: dict[str, Any]) -> dict[str, Any]:
    """The config as it is published, without what transformers adds; DeepSeek's model class renames the rope type in place."""
    config = {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and str(rope.get("rope_type", "")).startswith("deepseek_"):
        config = config | {"rope_parameters": rope | {"rope_type": rope["rope_type"].removeprefix("deepseek_")}}
    return config


def _refuse_processed(model: torch.nn.Module) -> None:
    """Raise ReshardError where a layer keeps its weights in another order or precision than they are loaded in."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__name__ in ("NoneType",):
            continue
        kind = type(method).__name__
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if kind.endswith("KVCacheMethod"):
            continue
        if kind not in PLAIN_METHODS:
            raise ReshardError(f"{name} serves from weights that {kind} has changed, which a refit cannot write in place: serve in bf16")
        packed = backend == "CPU" and getattr(getattr(method, "cpu_fused_moe", None), "isa", None) != "none"
        if packed or (hasattr(module, "cpu_linear") and not module.weight.numel()):
            raise ReshardError(f"{name} serves from weights that vLLM has packed for the CPU, which a refit cannot write: call "
                               "reshard.live.cpu_engine.keep_weights_plain() before vLLM is started, or start it with "
                               "worker_extension_cls='reshard.vllm_worker.RefitExtension'")  # fmt: skip
        if backend is not None and backend not in PLAIN_MOE_BACKENDS:
            raise ReshardError(f"{name} keeps its experts in the order of {backend}, which a refit cannot write: pass moe_backend='triton'")


def _derived_attention(model: torch.nn.Module) -> list[tuple[Any, torch.dtype]]:
    """MLA layers whose absorbed matrices are copies of kv_b_proj, not views: vLLM makes them again after a refit."""
    found = []
    for module in model.modules():
        absorbed = getattr(module, "W_UV", None)
        projection = getattr(module, "kv_b_proj", None)
        if not isinstance(absorbed, torch.Tensor) or projection is None:
            continue
        if absorbed.untyped_storage().data_ptr() != projection.weight.untyped_storage().data_ptr():
            found.append((module, absorbed.dtype))
    return found
