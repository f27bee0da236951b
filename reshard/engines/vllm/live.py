"""A live vLLM model as the destination of a refit."""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.errors import ReshardError
from reshard.core.gc import gc_paused
from reshard.device.cuda import device_of_process, is_mapped
from reshard.engines.live import LiveEngine, check_towers_loaded, owners_of
from reshard.engines.placing.accounts import LEFT_ALONE, OF_DRAFTER, SCALE_OF_CACHE, Account, account_for
from reshard.engines.placing.blocks import counted, served_in_blocks
from reshard.engines.placing.drafter import check_is_current
from reshard.engines.placing.left_alone import DRAFT, LeftAlone, left_alone
from reshard.engines.placing.places import Placer
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.placing.saved import saved_form
from reshard.engines.placing.taken import check_all_taken
from reshard.engines.placing.tower import Tower, announced
from reshard.engines.placing.turned import TurnedMatrices, no_moved_turned
from reshard.engines.placing.twins import part_of_model, scales_of_cache, written_tensors
from reshard.engines.tested import version_of
from reshard.engines.tracing.canonical import expert_layers, mtp_names, stored_tensors
from reshard.engines.tracing.deduplicated import ExpertLayer, trace_deduplicated
from reshard.engines.tracing.trace import Canonical, Trace
from reshard.engines.vllm.adapters.live import VllmAdapter
from reshard.engines.vllm.compat import (
    call_before_moves,
    draft_load_format,
    draft_model,
    drafts_on_last_stage,
    driver_worker,
    in_config,
    installed_version,
    keeps_buffers_of_drafters,
    never_slept,
    pipeline_parallel,
    set_for_kernels,
)
from reshard.engines.vllm.guard import VllmGuard, guard_of
from reshard.engines.vllm.layers import is_rearranged
from reshard.engines.vllm.layout import drafter_placement
from reshard.engines.vllm.names import VLLM
from reshard.engines.vllm.quantized.layers import kernel_of, processing_of
from reshard.engines.vllm.quantized.recipes import Held
from reshard.engines.vllm.quantized.reload import Reloads
from reshard.engines.vllm.requests.core import put_before
from reshard.engines.vllm.weights.accounts import ADAPTERS, other_accounts
from reshard.engines.vllm.weights.block_scales import begin_compiling, find_scales, layers_in_blocks
from reshard.engines.vllm.weights.derived import DerivedWeights
from reshard.engines.vllm.weights.drafter import (
    NO_SHIFTS,
    check_drafter,
    is_mtp,
    own_parameters,
    place_separate,
    trace_drafter,
    without_shifts,
)
from reshard.engines.vllm.weights.exchanged import exchange, exchanged_layers
from reshard.engines.vllm.weights.moved_experts import (
    VllmExperts,
    check_moves,
    leave_where_they_are,
    moves_experts,
)
from reshard.engines.vllm.weights.rank import rank_of
from reshard.engines.vllm.weights.served import Served
from reshard.engines.vllm.weights.stand_ins import layer_fingerprint, trace_model
from reshard.engines.vllm.weights.supported import check_supported
from reshard.engines.vllm.weights.tower import tower_in
from reshard.engines.vllm.weights.twins import beside_parameters, facts_of_layers, methods_of_layers
from reshard.models.class_fields import with_class_fields
from reshard.models.model import Model
from reshard.models.published import published
from reshard.models.without_table import ClassFamily, any_model
from reshard.refit.drafter import DeclaredDrafter, declared_drafter, no_drafter_error
from reshard.refit.served import ServedWeights
from reshard.refit.twins import Arrangement
from reshard.refit.unmoved import Unmoved

FLASHINFER = "flashinfer-python"


class VllmModel(LiveEngine):
    """One rank of a running vLLM: a model and its ``VllmConfig``; if there are, the `worker` that
    runs it, and the engine of this process that takes the requests (`front`).

    Layers that vLLM serves from fp8 blocks are quantized by the refit: with the least error, or,
    with `match_vllm_rounding`, bit for bit as vLLM's own loading of the same weights would have left them.

    Raises ReshardError, before anything is changed, if the model serves from another arrangement of
    its weights than the loaded one, or if vLLM's loader disagrees with our rules.
    """

    engine = "vLLM"
    guard: VllmGuard

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any,
        worker: Any = None,
        front: Any = None,
        match_vllm_rounding: bool = False,
    ) -> None:
        self.module, self.vllm_config, self.worker, self.front = model, config, worker, front
        self.match_vllm_rounding = match_vllm_rounding
        # Before anything can fail: an engine that cannot be connected must not serve dummy weights
        # either.
        self.guard = guard_of(model, config, never_slept=never_slept(worker))
        parallel = config.parallel_config
        self.guard.shared = parallel.data_parallel_size > 1 and parallel.enable_expert_parallel
        self.guard.watch(model, worker)
        put_before(front)
        self.hf_config = published(config.model_config.hf_config.to_dict(), "vLLM's config")
        with in_config(config):  # vLLM may have changed transformers' class
            self.model = any_model(self.hf_config, f"vLLM's config of {config.model_config.model}")
            self._saved_form = saved_form(self.model, config.model_config.dtype)
        if isinstance(self.model.family, ClassFamily):
            self.hf_config = with_class_fields(
                self.hf_config, config.model_config.hf_config, self.model.family.architecture
            )
        self.draft = draft_model(worker)
        self._announce_mtp()
        drafts_by_mtp = is_mtp(self.draft, self.model)
        self._has_separate_drafter = self.draft is not None and not drafts_by_mtp
        self._declared: DeclaredDrafter | None = None  # the separate one that a trainer brings
        self._of_drafter = frozenset(mtp_names(self.model)) if drafts_by_mtp else frozenset()
        self._tower = self._find_tower()
        if VLLM.tower_prefixes(self.model):
            stages = config.parallel_config.pipeline_parallel_size
            self.hf_config = announced(self._tower, self.hf_config, stages)
        self.optional = self._of_drafter | (self._tower.names if self._tower is not None else frozenset())
        if self._saved_form is not None:
            self.optional |= self._saved_form.names | self._saved_form.others
        self._as_saved = False  # as the trainer has it
        self._main_trace: Trace | None = None
        self._adapters: dict[str, VllmAdapter] = {}
        self._left = LeftAlone(model, self.guard)
        self.derived = DerivedWeights()
        self._find_tensors(with_drafter=drafts_by_mtp, with_tower=False)
        self.guard.when_loaded.append(WeakMethod(self._loaded_again))
        if config.parallel_config.data_parallel_size > 1:
            # Its engines take a call at steps of their own, and experts of one answer the other.
            self.cannot_switch = "it has data parallel engines"

    def _announce_mtp(self) -> None:
        """Take the MTP layer that a drafter is made of for one of the model's, where the config does not announce it:
        vLLM takes it for granted, and Qwen3-Next is published so."""
        field = self.model.family.field_of("mtp_num_layers")
        if self.draft is None or field is None or self.model.wrapped or self.hf_config.get(field) is not None:
            return
        announced = self.hf_config | {field: 1}
        model = Model.from_hf(announced, self.model.where)
        if is_mtp(self.draft, model):
            self.hf_config, self.model = announced, model

    @staticmethod
    def from_worker(worker: Any, front: Any = None, match_vllm_rounding: bool = False) -> "VllmModel":
        """Return the model of a vLLM worker (``vllm.v1.worker.gpu_worker.Worker``); `front` is the
        engine of this process, if it is in this process."""
        return VllmModel(worker.get_model(), worker.vllm_config, worker, front, match_vllm_rounding)

    @staticmethod
    def from_llm(llm: Any, match_vllm_rounding: bool = False) -> "VllmModel":
        """Return the model of an ``LLM``, or of an ``LLMEngine``, whose worker runs in this process
        (``external_launcher``, or without multiprocessing)."""
        return VllmModel.from_worker(driver_worker(llm), getattr(llm, "llm_engine", llm), match_vllm_rounding)

    def adapter(self, name: str) -> VllmAdapter:
        """Return the adapter that this vLLM serves by a name, the same as before; see
        `AdaptedEngine.adapter`."""
        if self.experts is not None:
            raise ReshardError(
                "this vLLM moves experts by their load (EPLB), and a refit of an adapter does not follow them: start "
                "vLLM without enable_eplb"
            )
        if name not in self._adapters:
            self._adapters[name] = VllmAdapter(self, name)
        return self._adapters[name]

    # Finding tensors

    def _find_tower(self) -> Tower | None:
        """Return the parts beside the language model that a refit may bring; None if there are none, or vLLM serves
        them otherwise than its loader copies them."""
        prefixes = VLLM.tower_prefixes(self.model)
        with in_config(self.vllm_config):
            return tower_in(self.module, prefixes, self.model, self.hf_config, self.vllm_config)

    def _find_tensors(self, with_drafter: bool, with_tower: bool) -> None:
        """Find what this rank holds and where; `with_drafter` and `with_tower` if a refit is to bring the drafter,
        and the parts beside the language model, too."""
        self.served = Served(self.module, self.draft if with_drafter else None)
        check_supported(self.served, self.vllm_config)
        self._towers = VLLM.tower_prefixes(self.model)
        language_model = self.served.without(self._towers)  # of a tower no layer is processed again
        self.blocks = layers_in_blocks(language_model)
        device = next((one.device for one in self.module.parameters()), device_of_process())
        begin_compiling(self.blocks, device)
        self._with_tower = with_tower
        if self._tower is None:
            self._check_tower_loaded()
        self.reloads = Reloads(language_model, self.vllm_config, self.guard.ready)
        if not self.model.family.experts_apart and (self.blocks or self.reloads.round_of):
            changed, instead = self._changed_layer()
            raise ReshardError(
                f"{changed}, which a refit of {self.model.family.architecture} does not support: {instead}"
            )
        self.tensors: dict[str, torch.Tensor] = dict(self.served.named_tensors())
        # What vLLM's loader writes into: of layers that it quantizes after loading, not what they
        # serve from.
        self.derived.find(self.served, self.tensors)
        self.loaded = self.tensors | self.reloads.loaded | self.derived.logarithms()
        self.rank = rank_of(self.module, self.model, self.tensors, self.vllm_config)
        self.tp = self.rank.tp
        self.pp, self.pp_rank = pipeline_parallel()
        with gc_paused():
            placed = exchange(self._place_tensors(), exchanged_layers(language_model))
            self.turned = TurnedMatrices.of(placed, len(self.reloads.rounds))
            if self.turned.matrices and (self.blocks or self.reloads.round_of):
                self.turned.check_as_loaded({*self.blocks, *self.reloads.round_of}, *self._changed_layer())
            self.placement, self.regions = placed.placement, placed.regions | self.turned.staged
            self.reloads.share(self._parts_of_reloads())
            self.experts = self._find_experts(placed)
        self.scales = find_scales(placed, self.blocks, self.tensors, self.match_vllm_rounding)
        rounds = self.reloads.round_of
        layers = {identity: _layer_of(identity) for identity in self.regions}
        self.staged_rounds = {
            identity: rounds[layer] for identity, layer in layers.items() if layer in rounds
        } | self.turned.rounds
        everything = Served(self.module, self.draft)
        self._modules = dict(everything.named_modules)
        # Tensors of a drafter that a refit leaves alone.
        self._idle_drafter = {
            name: tensor for name, tensor in everything.named_tensors() if name not in self.tensors
        }
        tensors = self.tensors | self._idle_drafter
        self.owners = owners_of(self._modules, tensors)
        kinds = other_accounts(self._modules, tensors, (), (), ())
        self._scales_of_cache = {name for name, kind in kinds.items() if kind == SCALE_OF_CACHE}
        drafters = () if keeps_buffers_of_drafters() else DRAFT
        self._left.kept = {
            name
            for name, (module, key) in self.owners.items()
            if key in module._buffers and not name.startswith(drafters)
        }
        self.accounts = self._account()
        zeros = [name for name, account in self.accounts.items() if account == NO_SHIFTS]
        self._left.end(zeros)  # as it has just seen
        self._save_left(anew=True)
        self._addresses = self.tensor_addresses()
        self._follow_experts()

    def _changed_layer(self) -> tuple[str, str]:
        """Return what vLLM makes of the first layer that it does not serve as it is loaded, for errors, and what a
        user may do instead."""
        layer = min({*self.blocks, *self.reloads.round_of})
        module = dict(self.served.named_modules)[layer]
        if is_rearranged(module):
            return (
                f"{layer} is rearranged for {kernel_of(module)} after loading",
                "start vLLM with moe_backend='triton'",
            )
        return f"{layer} is quantized", "serve it in bf16"

    def _find_experts(self, placed: PlacedTensors) -> VllmExperts | None:
        """Return the experts that vLLM moves by their load; None if it moves none. Raises ReshardError where a refit
        could not follow them."""
        if not moves_experts(self.served.main) and not (self.draft is not None and moves_experts(self.draft)):
            return None
        check_moves(self.served, self.draft, self.vllm_config.parallel_config, self.worker)
        if self.blocks or self.reloads.round_of:
            changed, instead = self._changed_layer()
            raise ReshardError(
                f"{changed}, which a refit of experts that vLLM moves by their load (EPLB) does not support: "
                f"{instead}, or without enable_eplb"
            )
        if placed.turned:
            raise no_moved_turned(self.engine, placed)
        self.cannot_switch = "its experts move (EPLB)"
        return VllmExperts(self.served, placed, self.model, self.worker)

    def _follow_experts(self) -> None:
        """Take the experts for those that vLLM has in this rank's places now; in sleep, when it forgets that too, as
        they were."""
        if self.experts is not None and self._has_memory():
            self.placement = self.experts.moved.follow(self.experts.held())

    def _place_tensors(self) -> PlacedTensors:
        """Return the boxes of the model, and of its drafter if that is brought too."""
        dtype = self.vllm_config.model_config.dtype
        padded_layers = {*self.blocks, *self.reloads.round_of}
        placer = Placer(VLLM, self.model, self.rank, self.loaded, padded_layers, dtype)
        if self._main_trace is None:
            self._main_trace = self._trace_main(dtype)
            if isinstance(self.model.family, ClassFamily):  # of others our rules say what vLLM takes
                check_all_taken(self.engine, self.module, self.model, self.rank, self._main_trace, self.pp)
        as_saved = self._saved_form if self._as_saved else None
        main = placer if as_saved is None else replace(placer, model=as_saved.model)
        placed = main.main(self._main_trace)
        if self._with_tower and self._tower is not None:
            of_tower = Placer(VLLM, self._tower.model, self.rank, self.loaded, (), dtype)
            placed = placed.joined(of_tower.main(self._tower.trace))
        if self.served.draft is None:
            return placed
        if self._declared is not None:
            return placed.joined(place_separate(self.served.draft, self._declared, self.served, self.tensors))
        drafter_trace = trace_drafter(self.served.draft, self.model, dtype, self.tensors)
        of_layers = drafter_placement(self.model, self.rank, DRAFT)
        return placed.joined(placer.partly(of_layers, drafter_trace))

    def _trace_main(self, dtype: torch.dtype) -> Trace:
        def trace(canonical: Canonical) -> Trace:
            return trace_model(self.module, canonical, self.derived.decays)

        def fingerprint(layer: ExpertLayer) -> tuple:
            return layer_fingerprint(self.module, layer)

        stored, layers = stored_tensors(self.model, dtype), expert_layers(VLLM, self.model)
        return trace_deduplicated(trace, stored, layers, fingerprint, self.rank.experts)

    def _parts_of_reloads(self) -> dict[str, list[Held]]:
        """Return the parts of matrices in each layer that vLLM processes after loading, by the
        layer's name."""
        parts: dict[str, list[Held]] = {}
        for identity, region in self.regions.items():
            layer, _, parameter = identity[0].rpartition(".")
            if layer not in self.reloads.round_of or region.tensor.ndim < 2:
                continue
            width = region.tensor.shape[-1]
            for part in self.placement.tensors[identity].parts:
                row = (region.offset + part.at[0] * region.pitch) // width
                shape = self.placement.shapes[part.name]
                parts.setdefault(layer, []).append(Held(parameter, part.name, shape, part.box, row))
        return parts

    def _account(self) -> dict[str, Account]:
        """Return what a refit does to each tensor. Raises ReshardError for tensors that have no
        account."""
        written = self.written()
        brought = {name: tensor for name, tensor in self.tensors.items() if id(tensor) in written}
        others = other_accounts(
            self._modules,
            self.tensors,
            self.reloads.round_of,
            self.derived.attentions,
            self.derived.decays,
            () if self._with_tower else self._towers,
        )
        others |= without_shifts(self.tensors, self._declared)
        # Of layers that vLLM processes after loading, a refit fills what they are loaded into.
        unfilled = [name for name, tensor in self.reloads.loaded.items() if id(tensor) not in written]
        accounts = account_for("vLLM", self.tensors, brought, others, unfilled)
        if self._declared is not None:
            of_drafter = (name for name in brought if name.startswith(DRAFT))
            accounts |= dict.fromkeys(of_drafter, OF_DRAFTER)
        if self._idle_drafter:
            load_format = draft_load_format(self.vllm_config)
            account = Account(LEFT_ALONE, f"of the drafter, as it was loaded (load_format={load_format!r})")
            accounts |= dict.fromkeys(self._idle_drafter, account)
        return accounts | {f"{name} (LoRA)": ADAPTERS for name in self.served.adapters}

    def take_facts(self, facts: Mapping[str, bytes]) -> None:
        """Take the drafter that a trainer has beside its model; leave a drafter that is a model of its own alone if it
        has none."""
        declared = declared_drafter(facts)
        if declared is not None and not self._has_separate_drafter:
            if self.draft is None and drafts_on_last_stage(self.vllm_config):
                return
            serves = (
                "drafts by no other model" if self.draft is None else "drafts by its model's own MTP layers"
            )
            raise no_drafter_error(self.engine, serves, declared)
        if declared is None and self.draft is not None and self._has_separate_drafter:
            check_drafter(self.draft, self.vllm_config, "the trainer has no drafter")
        if declared is not None:
            config = self.vllm_config.speculative_config.draft_model_config.hf_config
            declared.check_config(config.to_dict(), "vLLM")
        if declared != self._declared:
            self._declared = declared
            self._find_tensors(declared is not None, self._with_tower)
        if not self.optional:  # else there is more to take
            self._check_left_alone()

    def _left_alone(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a refit leaves alone, by name."""
        return left_alone(self.tensors | self._idle_drafter, self.accounts)

    def _scales_cache(self) -> bool:
        """Tell whether the cache holds keys and values divided by scales."""
        return str(self.vllm_config.cache_config.cache_dtype).startswith("fp8")

    def _check_left_alone(self) -> None:
        """Raise ReshardError if what a refit leaves alone is neither whole nor restored by it."""
        names = self._left_alone().keys() - (set() if self._scales_cache() else self._scales_of_cache)
        self._left.check(
            names,
            self.served.draft is None,
            "reload_weights",
            "a sleep of level 2, with reshard's worker_extension_cls",
        )

    def check_idle(self) -> None:
        """Raise ReshardError if what the refit that begins leaves alone is not whole."""
        super().check_idle()
        self._check_left_alone()

    def disconnect(self) -> None:
        """Nothing: the next connection says anew what it brings."""

    @property
    def taken(self) -> object:
        """The placement as it was loaded, wherever experts have moved since."""
        return self.placement if self.experts is None else self.experts.moved.as_loaded

    def drafter_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the own parameters of a drafter that is a model of its own, by name."""
        return own_parameters(Served(self.module, self.draft)) if self._has_separate_drafter else {}

    def take_optional(self, available: Set[str]) -> None:
        """Leave the drafter alone if the trainer has no MTP layers, and the parts beside the language model if it does
        not have these, and take experts in the form in which the trainer has them; see `Engine.take_optional`."""
        of_drafter = available & self._of_drafter
        of_tower = self._tower is not None and self._tower.is_among(available)
        if self._of_drafter and not of_drafter:
            check_drafter(self.draft, self.vllm_config, "the trainer's model has no MTP layers")
        if self._tower is not None and not of_tower:
            self._check_tower_loaded()
        with_drafter = bool(of_drafter) or self._declared is not None
        before = self.served.draft is not None, self._with_tower, self._as_saved
        self._as_saved = self._saved_form is not None and self._saved_form.is_among(available)
        if (with_drafter, of_tower, self._as_saved) != before:
            self._find_tensors(with_drafter, of_tower)
        self._check_left_alone()

    def _check_tower_loaded(self) -> None:
        """Raise ReshardError if the parts beside the language model are dummy weights, which no refit brings."""
        parameters = (name for name, _ in self.module.named_parameters())
        check_towers_loaded(
            [name for name in parameters if name.startswith(VLLM.tower_prefixes(self.model))],
            self.vllm_config.load_config.load_format,
            ", or serve text alone, where vLLM builds the model so (language_model_only=True)",
        )

    # Sleep

    def _has_memory(self) -> bool:
        """Tell whether the weights have memory, which sleep takes away."""
        first = next(iter(self.tensors.values()), None)
        if first is None or first.device.type != "cuda":  # a stage may have none
            return not self.guard.asleep
        return not self.guard.asleep and is_mapped(first.data_ptr())

    def check_awake(self) -> None:
        """Raise ReshardError if vLLM sleeps."""
        if not self._has_memory():
            raise ReshardError(
                "this vLLM sleeps, and its weights have no memory: call "
                "wake_up(tags=['weights']) before a refit"
            )

    def refresh_regions(self) -> None:
        """Find the tensors that vLLM has replaced or moved, and where experts are now; see `LiveEngine`."""
        super().refresh_regions()
        self._follow_experts()

    def _save_left(self, anew: bool = False) -> None:
        """Copy to the host what a refit leaves alone, if it has memory."""
        if self._has_memory():
            self._left.save(self._left_alone(), anew)

    def _loaded_again(self) -> None:
        """Save what a checkpoint has brought that vLLM has loaded since: the model alone, so that a drafter has to be
        whole."""
        tensors = self.tensors | self._idle_drafter
        drafter = {name: tensor for name, tensor in tensors.items() if name.startswith(DRAFT)}
        if self._left.missing(drafter):
            self.guard.invalidate("a drafter that is not whole, which vLLM does not load with its model")
        else:
            self._left.restore(drafter)
        self.reloads.keep_inputs()
        self._save_left(anew=True)
        self._follow_experts()
        if self.experts is not None and self.placement is not self.experts.moved.as_loaded:
            self.guard.lose(
                "experts where they were at start, since it has loaded weights after it moved them (EPLB)"
            )

    def tensors_moved(self) -> None:
        """Find what vLLM derives, and the accounts, anew."""
        self.derived.find(self.served, self.tensors)
        self.accounts = self._account()

    # A refit

    def begin(self) -> None:
        """Refuse to serve until `end`."""
        if self.experts is not None:
            leave_where_they_are(self.worker, self.timeout)
        self._save_left()
        super().begin()
        self._left.begin(self.tensors.keys() - self._left_alone().keys())

    def end(self, version: int) -> None:
        """Serve again, with weights of this version."""
        self._left.end(self.tensors.keys() - self._left_alone().keys())
        super().end(version)

    def process_round(self, index: int) -> None:
        """Let vLLM quantize the layers of a round, or write the transposes of its matrices."""
        if index >= len(self.reloads.rounds):
            super().process_round(index)
        else:
            self.reloads.process_round(index, self.timeout)

    def mismatches(self, index: int) -> list[Any]:
        """Return the ids of local tensors whose layers, in this round, serve from something
        else."""
        if index >= len(self.reloads.rounds):
            return super().mismatches(index)
        layers = {name.rpartition(".")[0] for name in self.reloads.mismatches(index, self.timeout)}
        return [identity for identity in self.staged_rounds if _layer_of(identity) in layers]

    def restore_left_alone(self) -> None:
        """Write what vLLM has lost and no trainer has."""
        self._left.restore(self._left_alone())

    def update_derived(self) -> None:
        """Write what vLLM has lost and no trainer has, and let vLLM derive matrices and sinks from the
        new weights."""
        self.restore_left_alone()
        self.derived.update(self.tp)

    def stale_derived(self) -> list[str]:
        """Return the names of tensors that are not what vLLM derives from the weights that it has
        now."""
        return self.derived.stale(self.tp)

    def not_kept(self) -> list[str]:
        """Return the names of decays that vLLM has made of other logarithms than a refit has brought."""
        return self.derived.stale_decays(self.tp)

    def not_as_published(self) -> list[str]:
        """Return the names of local tensors that do not hold what was published. What decays are made of is
        not kept up."""
        logs = {id(log) for log in self.derived.logarithms().values()}
        of_decays = [identity[0] for identity, region in self.regions.items() if id(region.tensor) in logs]
        return super().not_as_published() + of_decays

    def facts(self) -> bytes | None:
        """Return the drafter that a trainer has brought, for who gets the weights from this engine."""
        return None if self._declared is None else self._declared.encode()

    def held_still(self) -> ServedWeights:
        """Return this rank's weights as a source, as long as no experts move; see `ServedWeights.held_still`."""
        if self.experts is None or not call_before_moves(self.worker, self.guard.moving):
            return self
        return Unmoved(self, self._check_drafter)

    def check_as_published(self) -> None:
        """Raise ReshardError if what this rank serves was quantized, or cannot be handed on whole."""
        super().check_as_published()
        self._check_whole()

    def _check_drafter(self) -> None:
        """Raise ReshardError if the weights would come without the drafter that is served."""
        check_is_current(self.engine, self._declared, self._left, self.drafter_tensors())

    def _check_whole(self) -> None:
        """Raise ReshardError if weights move while others read them, or come without the drafter that is served."""
        self._check_drafter()
        if self.experts is not None:
            raise ReshardError(
                "this vLLM moves experts by their load (EPLB) while it serves, so that nothing else can read them "
                "whole: give a trainer, or an engine without enable_eplb"
            )

    # As it is served

    def arrangement(self) -> Arrangement:
        """Return how this rank serves its weights; see `reshard.refit.twins`."""
        self._check_whole()
        facts = {
            "the engine": f"{self.engine} {installed_version()}",
            "FlashInfer": version_of(FLASHINFER),  # which arranges weights for its kernels
            "dtype": str(self.vllm_config.model_config.dtype),
            "match_vllm_rounding": str(self.match_vllm_rounding),
        }
        written = written_tensors(self.tensors, self.accounts)
        layers = {layer: self._modules[layer] for layer in (name.rpartition(".")[0] for name in written)}
        facts |= set_for_kernels() | methods_of_layers(layers)
        facts |= facts_of_layers(self._arranged_layers(), self.blocks, self.reloads.input_scales())
        if self._scales_cache():
            facts |= scales_of_cache(self.tensors, self.accounts, self._modules)
        return Arrangement(part_of_model(self.rank), facts)

    def arranged_tensors(self) -> dict[str, torch.Tensor]:
        """Return all that a refit writes, or has vLLM derive, by name: also what kernels and attention keep beside
        parameters."""
        beside = beside_parameters(self._arranged_layers())
        return written_tensors(self.tensors, self.accounts) | beside | self.derived.tensors()

    def _arranged_layers(self) -> dict[str, torch.nn.Module]:
        """Return the layers that do not serve from plain weights, by name."""
        return {layer: self._modules[layer] for layer in (*self.blocks, *self.reloads.round_of)}

    # For logs

    def quantized_layers(self) -> list[dict[str, Any]]:
        """Return how many layers serve from fp8 blocks or from what vLLM's processing makes; see
        `Engine.quantized_layers`."""
        layers = served_in_blocks(self.scales, self.blocks)
        for layer in self.reloads.round_of:
            module = self._modules[layer]
            layers[layer] = f"{processing_of(module)} of vLLM, by a slab", kernel_of(module)
        return counted(layers)


def _layer_of(identity: tuple) -> str:
    """Return the name of the layer that a local tensor's parameter belongs to."""
    layer: str = identity[0].rpartition(".")[0]
    return layer
