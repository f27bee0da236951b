"""A live vLLM model as the destination of a refit: its parameters, where they lie, and the guard that keeps
it from serving.

Our rules (`reshard.engines.vllm.layout`) say what each parameter is made of; vLLM's own loader, traced, must
say the same.
"""

from collections import Counter
from collections.abc import Mapping, Set
from typing import Any
from weakref import WeakMethod

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.boxes import whole
from reshard.core.errors import ReshardError, listed
from reshard.core.gc import gc_paused
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.cuda import is_mapped
from reshard.device.memory import Region
from reshard.engines.base import Engine, Scales
from reshard.engines.vllm.accounts import ADAPTERS, LEFT_ALONE, Account, account_for, summary
from reshard.engines.vllm.alike import ExpertLayer, trace_alike
from reshard.engines.vllm.compat import draft_load_format, draft_model, driver_worker, tensor_parallel
from reshard.engines.vllm.fp8 import check_blocks
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.layers import (
    NVFP4,
    Blocks,
    absorbed_of,
    always_packed,
    blocks_of,
    compressed_of,
    derived_tensors,
    expert_backend,
    experts_of,
    is_packed,
    kernel_of,
    made_online,
    method_of,
    plain_method,
    process_in_place,
)
from reshard.engines.vllm.layout import (
    WITHOUT_PARAMETER,
    VllmRank,
    drafter_placement,
    outer_rows,
    padded,
    vllm_placement,
)
from reshard.engines.vllm.recipes import Held
from reshard.engines.vllm.reload import Reloads, same_bits
from reshard.engines.vllm.served import DRAFT, Served
from reshard.engines.vllm.trace import Canonical, Trace, trace_load
from reshard.models.model import Model
from reshard.models.published import published
from reshard.quantization.fp8_blocks import BLOCK, ROUNDINGS

# Methods that serve from weights as they were loaded.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
PLAIN_MOE_BACKENDS = ("TRITON", "BATCHED_TRITON", "OOT", "CPU")  # the last one where it has not packed them


class VllmModel(Engine):
    """One rank of a running vLLM: a model, its ``VllmConfig``, and, where there are, the worker that runs it
    and the engine of this process that takes the requests.

    Layers that vLLM serves from fp8 blocks are quantized by the refit: with the least error, or, `exact`, bit for bit
    as vLLM's own loading of the same weights would have left them.

    Raises ReshardError, before anything is changed, where the model serves from another arrangement of its
    weights than the loaded one, and where vLLM's loader disagrees with our rules.
    """

    def __init__(
        self, model: torch.nn.Module, config: Any, worker: Any = None, front: Any = None, exact: bool = False
    ) -> None:
        self.module, self.vllm_config, self.worker, self.front = model, config, worker, front
        self.exact = exact
        # Before anything can fail: an engine that cannot be connected must not serve weights of no meaning
        # either.
        self._guard = guard_of(model, config)
        self._guard.watch(model, worker, front)
        self.hf_config = published(config.model_config.hf_config.to_dict(), "vLLM's config")
        self.model = Model.from_hf(self.hf_config, f"vLLM's config of {config.model_config.model}")
        self.draft = draft_model(worker)
        mtp = self._is_mtp()
        if not mtp:
            self._refuse_dummy_drafter("no trainer has the weights of a drafter of this kind")
        self.optional = self._mtp_names() if mtp else frozenset()
        self._main_trace: Trace | None = None
        # On the host: what a refit leaves alone, and would not be there any more after vLLM has lost it.
        self._kept: dict[str, torch.Tensor] = {}
        self._losses, self._buffer_losses = self._guard.losses, self._guard.buffer_losses
        self._look(drafts=mtp)
        self._guard.when_loaded.append(WeakMethod(self._loaded_again))

    def _look(self, drafts: bool) -> None:
        """Find out what this rank holds, and where; with its drafter, if a refit is to bring that too."""
        model, config, exact = self.module, self.vllm_config, self.exact
        self.served = Served(model, self.draft if drafts else None)
        self.blocks = _blocks_of(self.served)
        _refuse_processed(self.served, config)
        self.reloads = Reloads(self.served, config, self._guard.ready)
        self.tensors: dict[str, torch.Tensor] = dict(self.served.named_tensors())
        # As vLLM's loader knows them: of what it quantizes after loading, what it loads into.
        self.loaded = self.tensors | self.reloads.loaded
        self.rank = self._rank()
        self.tp = self.rank.tp
        with gc_paused():
            self.placement, self.regions = self._placement()
            self.reloads.share(self._held())
        self.scales = self._scales(exact)
        rounds = self.reloads.round_of
        layers = {identity: identity[0].rpartition(".")[0] for identity in self.regions}
        self.staged_rounds = {
            identity: rounds[layer] for identity, layer in layers.items() if layer in rounds
        }
        self.derived = _derived_attention(self.served)
        everything = Served(model, self.draft)
        self._modules = dict(everything.named_modules)
        # Of a drafter that a refit leaves alone.
        self._left = {name: one for name, one in everything.named_tensors() if name not in self.tensors}
        self._homes = {name: _home(self._modules, name) for name in self.tensors | self._left}
        self.accounts = self._account()
        self._keep_aside()
        self._addresses = self.addresses()

    @staticmethod
    def from_worker(worker: Any, front: Any = None, exact: bool = False) -> "VllmModel":
        """The model of a vLLM worker (``vllm.v1.worker.gpu_worker.Worker``); `front` is the engine of this
        process, if it is here."""
        return VllmModel(worker.get_model(), worker.vllm_config, worker, front, exact)

    @staticmethod
    def from_llm(llm: Any, exact: bool = False) -> "VllmModel":
        """The model of an ``LLM``, or of an ``LLMEngine``, whose worker runs in this process
        (``external_launcher``, or without multiprocessing)."""
        return VllmModel.from_worker(driver_worker(llm), getattr(llm, "llm_engine", llm), exact)

    def _rank(self) -> VllmRank:
        tp, tp_rank = tensor_parallel()
        moe_tp, moe_tp_rank, experts = tp, tp_rank, tuple(range(self.model.num_experts))
        for name, module in self.module.named_modules():
            found = experts_of(module)
            if found is None:
                continue
            if found.redundant or found.total != self.model.num_experts:
                raise ReshardError(
                    f"{name} has redundant experts (EPLB), which a refit does not support: "
                    f"set enable_eplb=False"
                )
            moe_tp, moe_tp_rank = found.tp, found.tp_rank
            experts = (
                experts
                if found.placed is None
                else tuple(expert for expert in found.placed if expert < self.model.num_experts)
            )
            break
        layers = sorted(
            {int(name.split(".")[2]) for name in self.tensors if name.startswith("model.layers.")}
        )
        # Not by the stage: some of vLLM's models have the output on every one.
        outer = frozenset(row.hf for row in outer_rows(self.model) if row.hf in self.tensors)
        sequence_parallel = self.vllm_config.parallel_config.use_sequence_parallel_moe
        return VllmRank(tp, tp_rank, moe_tp, moe_tp_rank, experts, tuple(layers), outer, sequence_parallel)

    # Drafting

    def _mtp_names(self) -> frozenset[str]:
        """The published names of the MTP layers."""
        experts = range(self.model.num_experts)
        return frozenset(
            name for block in self.model.blocks() if block.mtp
            for row in block.rows if row.arrangement not in WITHOUT_PARAMETER
            for _, name in row.names(block.published, experts)
        )  # fmt: skip

    def _is_mtp(self) -> bool:
        """Tell whether the drafter is made of the model's own MTP layers."""
        held = {name for name, _ in self.draft.named_parameters()} if self.draft is not None else set()
        return bool(held & self._mtp_names())

    def offered(self, names: Set[str]) -> None:
        """Leave the drafter alone where the trainer has no MTP layers; see `Engine.offered`."""
        if not names:
            self._refuse_dummy_drafter("the trainer's model has no MTP layers")
        if bool(names) != (self.served.draft is not None):
            self._look(drafts=bool(names))

    def _refuse_dummy_drafter(self, why: str) -> None:
        if self.draft is not None and draft_load_format(self.vllm_config) == "dummy":
            raise ReshardError(
                f"this vLLM drafts tokens by weights of no meaning (load_format='dummy'), and {why}: load a checkpoint, or serve "
                f"without speculative_config"
            )

    def _drafter_trace(self) -> Trace:
        """What vLLM's loader puts into the drafter's own parameters, under the names of the tensors that a trainer has: MTP layers
        have copies of embedding and output."""
        model, dtype = self.model, self.vllm_config.model_config.dtype
        outer = {row.megatron: row.hf for row in outer_rows(model)}
        canonical: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        original: dict[str, str] = {}
        for block in model.blocks():
            for row in block.rows if block.mtp or block.layer is None else ():
                if row.arrangement == "ignored":
                    continue
                for _, name in row.names(block.published, range(model.num_experts)):
                    canonical[name] = model.shape(row.shape), torch.float32 if row.fp32 else dtype
                    original[name] = outer[row.megatron] if row.arrangement == "copy" else name
        trace = trace_load(self.draft, canonical)
        live = dict([*self.draft.named_parameters(), *self.draft.named_buffers()])
        own = {id(tensor): name for name, tensor in self.tensors.items()}

        def name_of(parameter: str) -> str:
            return own.get(id(live.get(parameter)), DRAFT + parameter)

        copies = dict.fromkeys(
            copy._replace(parameter=name_of(copy.parameter), name=original[copy.name])
            for copy in trace.copies
        )
        fills = [fill._replace(parameter=name_of(fill.parameter)) for fill in trace.fills]
        return Trace(
            [copy for copy in copies if copy.parameter.startswith(DRAFT)],
            [fill for fill in fills if fill.parameter.startswith(DRAFT)],
        )

    def _drafter_placement(self) -> tuple[Placement, dict[Any, Region]]:
        """As `_placement`, of the drafter; what it has around its transformer layers goes by the trace alone."""
        trace = self._drafter_trace()
        rules = drafter_placement(self.model, self.rank, DRAFT)
        ruled = {name for name, _ in rules.tensors}
        if self.model.family.vllm_names is None or not ruled <= self.loaded.keys():
            return self._traced(trace)
        by_rules = Trace(
            [copy for copy in trace.copies if copy.parameter in ruled],
            [fill for fill in trace.fills if fill.parameter in ruled],
        )
        others = Trace(
            [copy for copy in trace.copies if copy.parameter not in ruled],
            [fill for fill in trace.fills if fill.parameter not in ruled],
        )
        return _joined(self._checked(by_rules, rules), self._traced(others))

    # What it holds

    def _placement(self) -> tuple[Placement, dict[Any, Region]]:
        """What the rules say of the model, and of its drafter where that is brought too."""
        main = self._main_placement()
        return main if self.served.draft is None else _joined(main, self._drafter_placement())

    def _main_placement(self) -> tuple[Placement, dict[Any, Region]]:
        """What the rules say, checked against what vLLM's loader does; or that alone, for a family without
        vLLM names, and where vLLM builds other modules than the rules know (DeepSeek's attention with
        ``VLLM_MLA_DISABLE=1``)."""
        if self._main_trace is None:
            layers = self._expert_layers()
            self._main_trace = trace_alike(self.module, self._canonical(), layers, self.rank.experts)
        trace = self._main_trace
        stray = sorted({copy.parameter for copy in trace.copies if copy.parameter not in self.loaded})
        if stray:
            raise ReshardError(
                f"vLLM's loader writes to {listed(stray, 3)}, which the running model no longer has"
            )
        if self.model.family.vllm_names is None:
            return self._traced(trace)
        placement = vllm_placement(self.model, self.rank)
        if any(name not in self.loaded for name, _ in placement.tensors):
            return self._traced(trace)
        return self._checked(trace, placement)

    def _checked(self, trace: Trace, placement: Placement) -> tuple[Placement, dict[Any, Region]]:
        """The placement of the rules, and where its tensors lie. Raises ReshardError where vLLM's loader does something else."""
        regions: dict[Any, Region] = {}
        # Both as (parameter, offset of the first element, published name, box).
        ours: set[tuple] = set()
        theirs = {(copy.parameter, copy.offset, copy.name, copy.box) for copy in trace.copies}
        placement = self._with_padding(placement)
        for tensor in placement.tensors.values():
            name, expert = tensor.id
            live = self.loaded.get(name)
            shape = tensor.shape if expert is None else (len(self.rank.experts), *tensor.shape)
            if live is None or tuple(live.shape) != shape or not live.is_contiguous():
                has = (
                    "nothing of this name"
                    if live is None
                    else f"shape {list(live.shape)}, strides {list(live.stride())}"
                )
                raise ReshardError(f"{name} should have shape {list(shape)} in vLLM, which has {has}")
            width = tensor.shape[1] if len(tensor.shape) == 2 else 1
            start = (expert or 0) * tensor.shape[0] * width
            regions[tensor.id] = Region(live, start, width)
            for part in tensor.parts:
                at = start + part.at[0] * width + (part.at[1] if len(part.at) == 2 else 0)
                ours.add((name, at, part.name, part.box))
        disputed = {parameter for parameter, *_ in (ours - theirs) | (theirs - ours)}
        rows = {name: tensor.shape[-1] for name, tensor in self.loaded.items() if tensor.ndim}
        spread = {copy.parameter for copy in trace.copies if copy.pitch not in (0, rows.get(copy.parameter))}
        wrong = sorted(disputed | spread)
        if wrong:
            only_ours = sorted(str(copy[1:]) for copy in ours - theirs if copy[0] == wrong[0])[:2]
            only_theirs = sorted(str(copy[1:]) for copy in theirs - ours if copy[0] == wrong[0])[:2]
            raise ReshardError(
                f"vLLM's loader and the mapping table disagree on {listed(wrong, 3)}: "
                f"vLLM puts {only_theirs or 'nothing'}, the table {only_ours or 'nothing'}"
            )
        return placement, regions

    def _with_padding(self, placement: Placement) -> Placement:
        """The placement, with the zeros by which vLLM rounds experts in blocks up to whole ones."""
        tensors = []
        for tensor in placement.tensors.values():
            name, expert = tensor.id
            live, layer = self.loaded[name], name.rpartition(".")[0]
            quantized = layer in self.blocks or layer in self.reloads.round_of
            if expert is not None and quantized and tuple(live.shape[1:]) != tensor.shape:
                tensor = padded(tensor, tuple(live.shape[1:]), 2 if name.endswith("w13_weight") else 1)
            tensors.append(tensor)
        return Placement.of(placement.shapes, tensors)

    def _canonical(self, mtp: bool = False) -> Canonical:
        """Shape and dtype of every published tensor; those of MTP layers, which vLLM's main model does not hold, where asked
        for."""
        dtype = self.vllm_config.model_config.dtype
        return {
            name: (self.model.shape(row.shape), torch.float32 if row.fp32 else dtype)
            for block in self.model.blocks() if mtp or not block.mtp
            for row in block.rows if row.arrangement not in WITHOUT_PARAMETER
            for _, name in row.names(block.published, range(self.model.num_experts))
        }  # fmt: skip

    def _expert_layers(self) -> list[ExpertLayer]:
        """The published names of every layer's routed experts."""
        layers: list[ExpertLayer] = []
        for block in self.model.blocks():
            rows = [row for row in block.rows if row.of_experts and row.arrangement not in WITHOUT_PARAMETER]
            if rows and not block.mtp:
                named = zip(
                    *(row.names(block.published, range(self.model.num_experts)) for row in rows), strict=True
                )
                layers.append(
                    ExpertLayer(block.published, {some[0][0]: [name for _, name in some] for some in named})
                )
        return layers

    def _traced(self, trace: Trace) -> tuple[Placement, dict[Any, Region]]:
        """The traced copies themselves as a placement: one local tensor for each."""
        shapes = {name: shape for name, (shape, _) in self._canonical(mtp=True).items()}
        tensors, regions = [], {}
        covered: dict[str, int] = {}
        for copy in trace.copies:
            identity = (copy.parameter, copy.offset, copy.name)
            zero = (0,) * len(copy.box.lengths)
            tensors.append(LocalTensor(identity, copy.box.lengths, (Part(copy.name, copy.box, zero),)))
            live = self.loaded[copy.parameter]
            regions[identity] = Region(live, copy.offset, copy.pitch or copy.box.lengths[-1])
            covered[copy.parameter] = covered.get(copy.parameter, 0) + copy.box.volume
        for fill in trace.fills:
            identity = (fill.parameter, fill.offset, "")
            zeros = Region(self.loaded[fill.parameter], fill.offset, fill.elements)
            tensors.append(LocalTensor(identity, (fill.elements,), (), (whole((fill.elements,)),)))
            regions[identity] = zeros
            covered[fill.parameter] = covered.get(fill.parameter, 0) + fill.elements
        wrong = [name for name, n in covered.items() if n != self.loaded[name].numel()]
        if wrong:
            raise ReshardError(f"vLLM's loader does not fill {listed(wrong, 3)} exactly once")
        return Placement.of(shapes, tensors), regions

    def _held(self) -> dict[str, list[Held]]:
        """The parts of matrices that each layer holds which vLLM processes itself, by the layer's name."""
        found: dict[str, list[Held]] = {}
        for identity, region in self.regions.items():
            layer, _, parameter = identity[0].rpartition(".")
            if layer not in self.reloads.round_of or region.tensor.ndim < 2:
                continue
            width = region.tensor.shape[-1]
            for part in self.placement.tensors[identity].parts:
                row = (region.offset + part.at[0] * region.pitch) // width
                shape = self.placement.shapes[part.name]
                found.setdefault(layer, []).append(Held(parameter, part.name, shape, part.box, row))
        return found

    def _scales(self, exact: bool) -> dict[Any, Scales]:
        """Where the scales of local tensors in fp8 lie. Raises ReshardError where they have another shape than
        their blocks, and where what we make of blocks differs from what vLLM makes of them."""
        if not self.blocks:
            return {}
        found = {}
        for identity, region in self.regions.items():
            name = identity[0]
            layer = self.blocks.get(name.rpartition(".")[0])
            if region.tensor.dtype != torch.float8_e4m3fn:
                continue
            tensor = self.placement.tensors[identity]
            if layer is None or len(identity) != 2 or len(tensor.shape) != 2:
                raise ReshardError(f"{name} is in fp8 in an order that a refit does not know: serve in bf16")
            where = f"{name.rpartition('.')[0]}.{layer.scales[name.rpartition('.')[2]]}"
            scales, (rows, columns) = self.tensors[where], (-(-n // BLOCK) for n in tensor.shape)
            experts = [] if identity[1] is None else [region.tensor.shape[0]]
            if (
                scales.dtype != torch.float32
                or [*scales.shape] != [*experts, rows, columns]
                or not scales.is_contiguous()
            ):
                raise ReshardError(
                    f"{where} is {scales.dtype} {list(scales.shape)} with strides {list(scales.stride())}, where "
                    f"{[*experts, rows, columns]} in float32 are known to a refit: serve in bf16"
                )
            twice = "twice" if exact else "ue8m0"
            rounding = twice if layer.powers_of_two else "fp32"
            found[identity] = Scales(Region(scales, (identity[1] or 0) * rows * columns, columns), rounding)
        for rounding in {some.rounding for some in found.values()}:
            check_blocks(rounding, next(iter(self.tensors.values())).device)
        return found

    def _account(self) -> dict[str, Account]:
        """What a refit does to each of the tensors. Raises ReshardError for those that it would leave as they are, unknown."""
        written = [*self.regions.values(), *(scales.region for scales in self.scales.values())]
        written_ids = {id(region.tensor) for region in written}
        brought = {name: tensor for name, tensor in self.tensors.items() if id(tensor) in written_ids}
        accounts = account_for(self._modules, self.tensors, brought, self.reloads.round_of, self.derived)
        why = (
            f"of the drafter, as it was loaded (load_format={draft_load_format(self.vllm_config)!r})"
            if self._left
            else ""
        )
        adapters = {f"{name} (LoRA)": ADAPTERS for name in self.served.adapters}
        return accounts | dict.fromkeys(self._left, Account(LEFT_ALONE, why)) | adapters

    def _is_lost(self, name: str, losses: int, buffer_losses: int) -> bool:
        """Tell whether vLLM may have lost a tensor, and not have brought it back, since it had lost as often as this."""
        module, key = self._homes[name]
        # While vLLM sleeps it keeps the model's buffers itself, but not, before 0.32, those of the drafter.
        keeps = key in module._buffers and not name.startswith(DRAFT)
        return buffer_losses != self._guard.buffer_losses if keeps else losses != self._guard.losses

    def _keep_aside(self) -> None:
        """Copy to the host what a refit leaves alone, as far as it has a meaning: buffers until they are lost, parameters
        while the weights are whole."""
        self._keeps_parameters = False
        if not self._has_memory():
            return
        for name, tensor in (self.tensors | self._left).items():
            module, key = self._homes[name]
            is_buffer = key in module._buffers
            has_meaning = (
                not self._is_lost(name, 0, 0) if is_buffer or name in self._left else self._guard.ready
            )
            if self.accounts[name].what == LEFT_ALONE and has_meaning:
                self._kept[name] = tensor.detach().cpu().clone()
        self._keeps_parameters = self._guard.ready

    def _put_back(self) -> None:
        """Write again what vLLM has lost and no trainer has."""
        tensors = self.tensors | self._left
        for name, value in self._kept.items():
            if name in tensors and self._is_lost(name, self._losses, self._buffer_losses):
                tensors[name].data.copy_(value)
        self._losses, self._buffer_losses = self._guard.losses, self._guard.buffer_losses

    def _loaded_again(self) -> None:
        """Note what a checkpoint has brought that vLLM has loaded since."""
        self.reloads.keep_inputs()
        self._keep_aside()

    @property
    def version(self) -> int | None:
        """The version of the weights that the last whole refit brought; None before."""
        return self._guard.version

    @property
    def ready(self) -> bool:
        """Whether the model holds whole weights: those it has loaded, if it has, or those of a refit that
        succeeded."""
        return self._guard.ready

    def addresses(self) -> list[int]:
        """Where the parameters and buffers are now."""
        return list(map(torch.Tensor.data_ptr, self.tensors.values()))

    def follow(self) -> bool:
        """Find the parameters again that vLLM has replaced or moved; whether there were any.

        Raises ReshardError where one has no memory, which sleep takes away, or another shape, dtype or order
        than at connect.
        """
        for name, before in self.tensors.items():
            module, key = self._homes[name]
            now = module._parameters.get(key, module._buffers.get(key))
            if now is not before:
                self._replace(name, now)
        now_at = self.addresses()
        self._refuse_asleep()
        moved, self._addresses = now_at != self._addresses, now_at
        if moved:
            self.derived = _derived_attention(self.served)
            self.accounts = self._account()
        return moved

    def _replace(self, name: str, now: torch.Tensor | None) -> None:
        before = self.tensors[name]
        same = now is not None and all(
            getattr(now, what) == getattr(before, what) for what in ("shape", "dtype", "device")
        )
        if now is None or not same or now.stride() != before.stride():
            raise ReshardError(
                f"vLLM's {name} has been replaced by one of another shape, dtype or order "
                f"since connect: connect again"
            )
        self.tensors[name] = now
        self.regions = {
            key: region._replace(tensor=now) if region.tensor is before else region
            for key, region in self.regions.items()
        }
        self.scales = {
            key: some._replace(region=some.region._replace(tensor=now))
            if some.region.tensor is before
            else some
            for key, some in self.scales.items()
        }

    def _has_memory(self) -> bool:
        """Tell whether the weights have memory, which sleep takes away."""
        first = next(iter(self.tensors.values()))
        return not self._guard.asleep and (first.device.type != "cuda" or is_mapped(first.data_ptr()))

    def _refuse_asleep(self) -> None:
        if not self._has_memory():
            raise ReshardError(
                "this vLLM sleeps, and its weights have no memory: call "
                "wake_up(tags=['weights']) before a refit"
            )

    def begin(self) -> None:
        """Mark the model unfit: from now on it refuses to run, until `end`."""
        if self._guard.ready and not self._keeps_parameters:
            self._keep_aside()
        self._guard.spoil("a half-written model, since a refit failed or is under way")

    def quantized(self) -> list[dict[str, Any]]:
        """Blocks, by how their scales are rounded, and what vLLM's own processing makes of whole layers."""
        layers: dict[str, tuple[str, str]] = {}
        for (name, *_), scales in self.scales.items():
            layer = name.rpartition(".")[0]
            how = f"blocks of 128x128 in fp8, {ROUNDINGS[scales.rounding]}, while they are copied"
            layers[layer] = how, self.blocks[layer].kernel
        for layer in self.reloads.round_of:
            module = self._modules[layer]
            layers[layer] = f"{_processed_as(module)} of vLLM, by a slab", kernel_of(module)
        counted = Counter(layers.values())
        return [{"how": how, "kernel": kernel, "layers": n} for (how, kernel), n in sorted(counted.items())]

    def process_round(self, number: int) -> None:
        """Let vLLM quantize the layers of a round."""
        self.reloads.process_round(number, self.timeout)

    def mismatches(self, number: int) -> list[Any]:
        """The local tensors of a round's layers that serve from something else."""
        layers = {name.rpartition(".")[0] for name in self.reloads.mismatches(number, self.timeout)}
        return [identity for identity in self.staged_rounds if identity[0].rpartition(".")[0] in layers]

    def update_derived(self) -> None:
        """After the bytes have come: make again what vLLM keeps derived from them, and write again what it has forgotten and no
        trainer has."""
        self._put_back()
        for module, dtype in self.derived.values():
            process_in_place(module, dtype)

    def stale_derived(self) -> list[str]:
        """The tensors that are not what vLLM derives from the weights that it has now."""
        found = []
        for name, (module, dtype) in self.derived.items():
            before = {key: tensor.clone() for key, tensor in derived_tensors(module).items()}
            process_in_place(module, dtype)
            now = derived_tensors(module)
            found += [f"{name}.{key}" for key, tensor in before.items() if not same_bits(tensor, now[key])]
        return found

    def tensor_accounts(self) -> list[dict[str, Any]]:
        """What a refit does to its tensors, by how many and for what reason, for logs."""
        return summary(self.accounts)

    def end(self, version: int) -> None:
        """Mark the model ready again, with the version of the weights that it now has."""
        self._guard.ready, self._guard.version = True, version


def _processed_as(module: torch.nn.Module) -> str:
    """How vLLM quantizes a layer, for logs."""
    how = compressed_of(module)
    if how is None:
        return method_of(module)
    inputs = ", scales of the input as they were loaded" if how.inputs and how.reads_inputs else ""
    size = "" if how.block is None else f" of {how.block[0]}x{how.block[1]}"
    size += " and one for all of it" if how.codes == NVFP4 else ""
    return f"{how.scheme} ({how.codes}, a scale for each {how.strategy}{size}{inputs})"


def _home(modules: Mapping[str, torch.nn.Module], name: str) -> tuple[torch.nn.Module, str]:
    """The module that holds a parameter or buffer, and the name it has there."""
    path, _, key = name.rpartition(".")
    return modules[path], key


def _joined(
    one: tuple[Placement, dict[Any, Region]], other: tuple[Placement, dict[Any, Region]]
) -> tuple[Placement, dict[Any, Region]]:
    """Two placements, and where their tensors lie, as one."""
    (a, regions), (b, more) = one, other
    tensors = [*a.tensors.values(), *b.tensors.values()]
    return Placement.of({**a.shapes, **b.shapes}, tensors), regions | more


def _refuse_processed(model: Served, config: Any) -> None:
    """Raise ReshardError where a layer keeps its weights in another order or precision than they are loaded
    in."""
    for name, module in model.named_modules:
        method = plain_method(getattr(module, "quant_method", None))
        if method is None or type(method).__name__ in ("NoneType",):
            continue
        kind = type(method).__name__
        backend = expert_backend(method)
        if kind.endswith("KVCacheMethod"):
            # They come with a checkpoint, or are 1 without; dummy weights make them up.
            if config.load_config.load_format == "dummy" and str(config.cache_config.cache_dtype).startswith(
                "fp8"
            ):
                raise ReshardError(
                    f"{name} scales its fp8 keys and values by numbers that load_format='dummy' has made up, and that no "
                    f"trainer has: load the checkpoint once, or pass kv_cache_dtype='auto'"
                )
            continue
        if (
            blocks_of(module, module.quant_method) is not None
            or made_online(module)
            or compressed_of(module) is not None
        ):
            continue
        if kind not in PLAIN_METHODS:
            raise ReshardError(
                f"{name} serves from weights that {method_of(module)} has changed, which a refit cannot "
                f"write in place: serve in bf16, or let vLLM quantize it as it loads (quantization='fp8_per_block' and the like)"
            )
        if always_packed(method):
            raise ReshardError(
                f"{name} serves from experts that vLLM's build for the CPU has packed, which a refit cannot write, and from "
                f"0.28 on it has no other way: use vLLM 0.26 or an older one, or let it quantize them as it loads "
                f"(quantization='int8_per_channel_weight_only')"
            )
        if is_packed(module, method):
            raise ReshardError(
                f"{name} serves from weights that vLLM has packed for the CPU, which a refit "
                f"cannot write: make it inside `with "
                f"reshard.engines.vllm.compat.plain_weights():`, or start it with "
                f"worker_extension_cls='reshard.engines.vllm.worker.RefitExtension'"
            )
        if backend is not None and backend not in PLAIN_MOE_BACKENDS:
            raise ReshardError(
                f"{name} keeps its experts in the order of {backend}, which a refit cannot "
                f"write: pass moe_backend='triton'"
            )


def _blocks_of(model: Served) -> dict[str, Blocks]:
    """The layers that serve from fp8 blocks, by name."""
    found = {}
    for name, module in model.named_modules:
        some = blocks_of(module, getattr(module, "quant_method", None))
        if some is not None:
            found[name] = some
    return found


def _derived_attention(model: Served) -> dict[str, tuple[Any, torch.dtype]]:
    """MLA layers, by name, that have matrices which are copies of kv_b_proj's, not views: vLLM makes them again after a
    refit."""
    found = {}
    for name, module in model.named_modules:
        absorbed, projection = absorbed_of(module), getattr(module, "kv_b_proj", None)
        if absorbed is None or projection is None:
            continue
        weight = getattr(projection, "weight", None)  # none where codes are packed
        viewed = None if weight is None else weight.untyped_storage().data_ptr()
        storages = {tensor.untyped_storage().data_ptr() for tensor in derived_tensors(module).values()}
        if storages != {viewed}:
            found[name] = module, absorbed.dtype
    return found
