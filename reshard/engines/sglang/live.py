"""A live SGLang model as the destination of a refit."""

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod

from reshard.core.extras import importing

with importing("sglang"):
    import torch

from reshard.core.errors import ReshardError
from reshard.core.gc import gc_paused
from reshard.device.cuda import is_mapped
from reshard.engines.layout import EngineRank
from reshard.engines.live import LiveEngine, check_towers_loaded, owners_of
from reshard.engines.placing.accounts import (
    DERIVED,
    LEFT_ALONE,
    OF_DRAFTER,
    OF_TOWER,
    SCALE_OF_CACHE,
    Account,
    account_for,
)
from reshard.engines.placing.blocks import counted, find_scales, served_in_blocks
from reshard.engines.placing.drafter import check_is_current
from reshard.engines.placing.left_alone import DRAFT, LeftAlone, left_alone
from reshard.engines.placing.places import Placer
from reshard.engines.placing.saved import saved_form
from reshard.engines.placing.taken import check_all_taken
from reshard.engines.placing.tower import Tower, announced, find_tower
from reshard.engines.placing.turned import TurnedMatrices, no_moved_turned
from reshard.engines.placing.twins import part_of_model, scales_of_cache, written_tensors
from reshard.engines.sglang import compat, pipeline
from reshard.engines.sglang.guard import guard_of
from reshard.engines.sglang.weights.blocks import layers_in_blocks
from reshard.engines.sglang.weights.derived import DerivedTensors
from reshard.engines.sglang.weights.drafter import AS_LOADED, Drafter
from reshard.engines.sglang.weights.layout import check_family
from reshard.engines.sglang.weights.moved_experts import SglangExperts
from reshard.engines.sglang.weights.names import SGLANG
from reshard.engines.sglang.weights.rank import rank_of
from reshard.engines.sglang.weights.supported import check_supported
from reshard.engines.sglang.weights.traced import trace_model
from reshard.engines.tracing.canonical import expert_layers, stored_tensors
from reshard.engines.tracing.deduplicated import ExpertLayer, trace_deduplicated
from reshard.engines.tracing.stand_ins import layer_fingerprint
from reshard.engines.tracing.trace import Canonical, Trace
from reshard.models.published import published
from reshard.models.without_table import ClassFamily, any_model
from reshard.refit.drafter import DeclaredDrafter, declared_drafter, no_drafter_error
from reshard.refit.twins import Arrangement

NOT_SAVED = Account(LEFT_ALONE, "SGLang computes it from the config, and saves it nowhere")
OF_THE_ROUTER = Account(DERIVED, "a copy of the router's weights in fp32")
WITH_ONE = Account(DERIVED, "a norm's weights, with 1 added")
IDLE = Account(LEFT_ALONE, "of an indexer whose layer takes what another layer's has chosen")


class SglangModel(LiveEngine):
    """One rank of a running SGLang: a model and its ``ServerArgs``; if there are, the `scheduler` that
    runs it, and the `draft_worker` that has a drafter.

    Raises ReshardError, before anything is changed, if the model serves from another arrangement of
    its weights than the loaded one, or if SGLang's loader disagrees with our rules.
    """

    engine = SGLANG.engine

    def __init__(
        self, model: torch.nn.Module, arguments: Any, scheduler: Any = None, draft_worker: Any = None
    ) -> None:
        arguments = compat.resolved(arguments)
        self.module, self.arguments, self.scheduler = model, arguments, scheduler
        # Before anything can fail: an engine that cannot be connected must not serve dummy weights
        # either.
        self.guard = guard_of(model, str(arguments.load_format))
        self.hf_config = published(compat.published_config(arguments), "SGLang's config")
        self.model = any_model(self.hf_config, f"SGLang's config of {arguments.model_path}")
        check_family(self.model)
        check_supported(model, arguments)
        self.tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self.owners = owners_of(dict(model.named_modules()), self.tensors)
        self._left = LeftAlone(model, self.guard)
        self._drafter = None if draft_worker is None else Drafter(draft_worker, self.tensors)
        self._declared: DeclaredDrafter | None = None  # the drafter that a trainer brings
        located = compat.located_experts(arguments)
        places = self.model.num_experts if located is None else located.shape[1]
        self.rank: EngineRank = rank_of(model, self.model, self.tensors, places)
        self.tp, (self.pp, self.pp_rank) = self.rank.tp, compat.parallel().pp
        self._towers = SGLANG.tower_prefixes(self.model)
        self._tower = self._find_tower()
        if self._towers:
            self.hf_config = announced(self._tower, self.hf_config, self.pp)
        if self._tower is not None:
            self.optional = self._tower.names
        else:
            self._check_tower_loaded()
        self._saved_form, self._as_saved = saved_form(self.model, self.dtype), False  # as a trainer has it
        if self._saved_form is not None:
            self.optional |= self._saved_form.names | self._saved_form.others
        with gc_paused(), compat.experts_in_turn(arguments):
            self._main_trace = self._trace()
        added_once = SGLANG.family(self.model).added_once if self.rank.moe_tp_rank else ()
        check_all_taken(self.engine, model, self.model, self.rank, self._main_trace, self.pp, added_once)
        self.blocks = layers_in_blocks(model)
        self.derived = DerivedTensors(model)
        self._take_places(with_tower=False)
        # Requests are between two stages at any time, and these are called one after the other; so are ranks of data
        # parallel attention.
        if scheduler is not None and compat.has_stages(scheduler):
            self.cannot_switch = "it has pipeline stages"
        elif compat.has_dp_attention(arguments):
            self.cannot_switch = "it has data parallel attention"
        elif compat.moves_experts(arguments):
            self.cannot_switch = "its experts move (EPLB)"
        self._addresses = self.tensor_addresses()
        self.guard.when_loaded.append(WeakMethod(self._loaded_again))

    @staticmethod
    def from_scheduler(scheduler: Any) -> "SglangModel":
        """Return the model of a ``sglang.srt.managers.scheduler.Scheduler`` of this process."""
        model, arguments = compat.served_model(scheduler)
        return SglangModel(model, arguments, scheduler, compat.draft_worker(scheduler))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model serves in."""
        for end in ("layernorm.weight", "norm.weight", ""):  # a norm inside of linear attention may be wider
            for name, tensor in self.tensors.items():
                if name.endswith(end):
                    return tensor.dtype
        raise ReshardError("this SGLang's model has no tensors")

    # Finding tensors

    def _find_tower(self) -> Tower | None:
        """Return the parts beside the language model that a refit may bring; None if there are none, or SGLang serves
        them otherwise than its loader copies them."""
        has_tower = any(name.startswith(self._towers) for name in self.tensors)
        if not self._towers or not (has_tower or self.pp > 1):
            return None
        trace = partial(trace_model, self.module, dtype=self.dtype)
        return find_tower(
            self.engine, self.module, self.model, self.hf_config, self.dtype, self.rank, self.pp, trace
        )

    def _check_tower_loaded(self) -> None:
        """Raise ReshardError if the parts beside the language model are dummy weights, which no refit brings."""
        parameters = (name for name, _ in self.module.named_parameters())
        towers = [name for name in parameters if name.startswith(self._towers)]
        check_towers_loaded(towers, self.arguments.load_format)

    def take_facts(self, facts: Mapping[str, bytes]) -> None:
        """Take the drafter that a trainer has beside its model; leave SGLang's alone if it has none."""
        declared, drafter = declared_drafter(facts), self._drafter
        if drafter is None:
            if declared is not None:
                raise no_drafter_error(self.engine, "drafts by no other model", declared)
        elif declared is None:
            drafter.check_left_alone(self.arguments)
        else:
            declared.check_config(compat.config_of_drafter(drafter.worker), self.engine)
        if drafter is not None and declared != self._declared:
            main = {name: one for name, one in self.tensors.items() if not name.startswith(DRAFT)}
            self._declared = declared
            self._drafter = Drafter(drafter.worker, main)  # SGLang may have replaced some
            self._take_places(self._with_tower)
        if not self.optional:  # else there is more to take
            self._check_left_alone()

    @property
    def taken(self) -> object:
        """The placement as it was loaded, wherever experts have moved since."""
        return self.placement if self.experts is None else self.experts.moved.as_loaded

    def drafter_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what SGLang drafts by, by name, without what the drafter shares with the model."""
        return {} if self._drafter is None else self._drafter.served()

    def take_optional(self, available: Set[str]) -> None:
        """Leave the parts beside the language model alone if the trainer does not have them, and take experts in the
        form in which it has them; see `Engine.take_optional`."""
        with_tower = self._tower is not None and self._tower.is_among(available)
        if not with_tower:
            self._check_tower_loaded()
        before = self._with_tower, self._as_saved
        self._as_saved = self._saved_form is not None and self._saved_form.is_among(available)
        if (with_tower, self._as_saved) != before:
            self._take_places(with_tower)
        self._check_left_alone()

    def _take_places(self, with_tower: bool) -> None:
        """Let a refit write where the language model lies, and if it is to bring them too, the parts beside it."""
        self._with_tower = with_tower
        drafter = self._drafter if self._declared is not None else None
        self._take_tensors(drafter)
        placer = Placer(SGLANG, self.model, self.rank, self.tensors, (), self.dtype)
        with gc_paused():
            as_saved = self._saved_form if self._as_saved else None
            main = placer if as_saved is None else replace(placer, model=as_saved.model)
            placed = main.main(self._main_trace)
            if with_tower and self._tower is not None:
                placed = placed.joined(replace(placer, model=self._tower.model).main(self._tower.trace))
            if drafter is not None and self._declared is not None:
                placed = placed.joined(drafter.place(self._declared, self.dtype))
        self.turned = TurnedMatrices.of(placed)
        if self.blocks:
            in_blocks = f"{min(self.blocks)} is in fp8 blocks"
            self.turned.check_as_loaded(self.blocks, in_blocks, "serve it in bf16")
        self.placement, self.regions = placed.placement, placed.regions | self.turned.staged
        self.staged_rounds = self.turned.rounds
        self.scales = find_scales(placed, self.blocks, self.tensors)
        self.accounts = self._account()
        # Of memory that it releases SGLang keeps buffers; and it backs up its drafter, or is not refitted.
        buffers = {name for name, (module, key) in self.owners.items() if key in module._buffers}
        self._left.kept = buffers | {name for name in self.accounts if name.startswith(DRAFT)}
        self._save_left(anew=True)
        self.experts: SglangExperts | None = None
        if compat.located_experts(self.arguments) is not None:
            if self.blocks:
                raise ReshardError(
                    f"{min(self.blocks)} is in fp8 blocks, which a refit of experts that SGLang copies or moves (EPLB) "
                    f"does not support: serve it in bf16, or without --enable-eplb, --init-expert-location and "
                    f"--ep-num-redundant-experts"
                )
            if placed.turned:
                raise no_moved_turned(self.engine, placed)
            self.experts = SglangExperts(self.module, self.arguments, placed, self.model)
            self._follow_experts()

    def _take_tensors(self, drafter: Drafter | None) -> None:
        """Follow the tensors of the model, and of a `drafter` that is brought too."""
        for name in [name for name in self.tensors if name.startswith(DRAFT)]:
            del self.tensors[name], self.owners[name]
        if drafter is not None:
            self.tensors |= drafter.tensors
            self.owners |= drafter.owners

    def _trace(self) -> Trace:
        def trace(canonical: Canonical) -> Trace:
            return trace_model(self.module, canonical, self.dtype)

        def fingerprint(layer: ExpertLayer) -> tuple:
            return layer_fingerprint(self.module, layer, compat.experts_of)

        stored, layers = stored_tensors(self.model, self.dtype), expert_layers(SGLANG, self.model)
        return trace_deduplicated(trace, stored, layers, fingerprint, self.rank.experts)

    def _account(self) -> dict[str, Account]:
        """Return what a refit does to each tensor. Raises ReshardError for tensors that have no
        account."""
        written = self.written()
        brought = {name: tensor for name, tensor in self.tensors.items() if id(tensor) in written}
        others: dict[str, Account] = {}
        idle = compat.idle_indexers(self.module)
        for name in self.tensors:
            module, key = self.owners[name]
            if key == compat.OF_ROUTER:
                others[name] = OF_THE_ROUTER
            elif key == compat.OF_NORM:
                others[name] = WITH_ONE
            elif name.startswith(idle):
                others[name] = IDLE
            elif not self._with_tower and name.startswith(self._towers):
                others[name] = OF_TOWER
            elif key in ("k_scale", "v_scale"):
                others[name] = SCALE_OF_CACHE
            elif key in module._non_persistent_buffers_set:
                others[name] = NOT_SAVED
        accounts = account_for(self.engine, self.tensors, brought, others)
        if self._drafter is not None and self._declared is None:
            return accounts | dict.fromkeys(self._drafter.tensors, AS_LOADED)
        return accounts | dict.fromkeys((name for name in brought if name.startswith(DRAFT)), OF_DRAFTER)

    # What is left alone

    def _left_alone(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a refit leaves alone, by name."""
        drafter = {} if self._drafter is None else self._drafter.tensors
        return left_alone(self.tensors | drafter, self.accounts)

    def _save_left(self, anew: bool = False) -> None:
        """Copy to the host what a refit leaves alone, if SGLang would lose it as it releases memory."""
        if self.arguments.enable_memory_saver and not compat.backs_up_weights(self.arguments):
            tensors = self._left_alone()
            self._left.save({name: tensors[name] for name in tensors.keys() - self._left.kept}, anew)

    def _loaded_again(self) -> None:
        """Save what a checkpoint has brought that SGLang has loaded since."""
        self._save_left(anew=True)

    def _scales_cache(self) -> bool:
        """Tell whether the cache holds keys and values divided by scales."""
        return str(self.arguments.kv_cache_dtype).startswith("fp8")

    def _check_left_alone(self) -> None:
        """Raise ReshardError if what a refit leaves alone is neither whole nor restored by it."""
        unused = [IDLE] if self._scales_cache() else [IDLE, SCALE_OF_CACHE]
        self._left.check(
            (name for name in self._left_alone() if self.accounts[name] not in unused),
            self._declared is None,
            "update_weights_from_disk",
            "it releases memory",
        )

    # Following what SGLang moves

    def refresh_regions(self) -> None:
        """Find the tensors that SGLang has replaced or moved, and where experts are now; see `LiveEngine`."""
        super().refresh_regions()
        self._follow_experts()

    def _follow_experts(self) -> None:
        """Take the experts for those that SGLang has in this rank's places now."""
        if self.experts is not None:
            self.placement = self.experts.moved.follow(self.experts.held())

    def facts(self) -> bytes | None:
        """Return the drafter that a trainer has brought, for who gets the weights from this engine."""
        return None if self._declared is None else self._declared.encode()

    def check_as_published(self) -> None:
        """Raise ReshardError if what this rank serves was quantized, or cannot be handed on whole."""
        super().check_as_published()
        self._check_whole()

    def _check_whole(self) -> None:
        """Raise ReshardError if weights move while others read them, or come without the drafter that is served."""
        check_is_current(self.engine, self._declared, self._left, self.drafter_tensors())
        if compat.moves_experts(self.arguments):
            raise ReshardError(
                "this SGLang moves experts by their load (EPLB) while it serves, so that nothing else can read them "
                "whole: give a trainer, or an engine without --enable-eplb"
            )

    # As it is served

    def arrangement(self) -> Arrangement:
        """Return how this rank serves its weights; see `reshard.refit.twins`."""
        self._check_whole()
        facts = {"the engine": f"{self.engine} {compat.installed_version()}", "dtype": str(self.dtype)}
        facts |= {layer: f"fp8 blocks by {blocks.kernel}" for layer, blocks in self.blocks.items()}
        if self._scales_cache():
            facts |= scales_of_cache(self.tensors, self.accounts, dict(self.module.named_modules()))
        return Arrangement(part_of_model(self.rank), facts | self.derived.numbers())

    def arranged_tensors(self) -> dict[str, torch.Tensor]:
        """Return all that a refit writes, or has SGLang derive, by name."""
        of_drafter = (
            self._drafter.tokens() if self._drafter is not None and self._declared is not None else {}
        )
        return written_tensors(self.tensors, self.accounts) | self.derived.tensors() | of_drafter

    def check_awake(self) -> None:
        """Raise ReshardError if SGLang has released the memory of its weights."""
        any_one = [*self.tensors.values()][:1]  # of a rank with none, none is lost
        is_lost = any(one.device.type == "cuda" and not is_mapped(one.data_ptr()) for one in any_one)
        if is_lost or compat.is_asleep(self.scheduler):
            raise ReshardError(
                "this SGLang sleeps, and its weights have no memory: call "
                "resume_memory_occupation(tags=['weights']) before a refit"
            )

    # A refit

    def check_idle(self) -> None:
        """Raise ReshardError while requests run, whose keys and values are of earlier weights, and if what the refit
        that begins leaves alone is not whole."""
        self._check_left_alone()
        call = pipeline.call_of(self.scheduler)
        if call is None:
            compat.check_idle(self.scheduler)
        else:
            call.check_idle()

    def begin(self) -> None:
        """Refuse to serve until `end`."""
        self._save_left()
        super().begin()
        self._left.begin(self.tensors.keys() - self._left_alone().keys())

    def end(self, version: int) -> None:
        """Serve again, with weights of this version."""
        self._left.end(self.tensors.keys() - self._left_alone().keys())
        self._on_scheduler(partial(self.guard.refitted, version))

    def restore_left_alone(self) -> None:
        """Write what SGLang has lost and no trainer has."""
        self._left.restore(self._left_alone())

    def update_derived(self) -> None:
        """Write what SGLang has lost and no trainer has, and let it derive matrices from the new weights: while the GPU
        still copies, so that it does not add to a refit's time."""
        self.restore_left_alone()
        self.derived.update()
        if self._drafter is not None and self._declared is not None:
            self._drafter.update()

    def drop_caches(self) -> None:
        """Have SGLang forget keys and values of other weights, and images as another tower saw them, while the GPU
        still copies."""
        self._on_scheduler(partial(compat.flush_cache, self.scheduler))
        if self._with_tower or isinstance(self.model.family, ClassFamily):
            self._on_scheduler(compat.forget_images)

    def _on_scheduler(self, action: Callable[[], None]) -> None:
        """Change what a scheduler serves: at once, or with pipeline stages, whose calls run on other threads,
        when the call is joined."""
        call = pipeline.call_of(self.scheduler)
        if call is None:
            action()
        else:
            call.at_end(action)

    def stale_derived(self) -> list[str]:
        """Return the names of matrices that are not what SGLang derives from the weights that it has
        now."""
        of_drafter = self._drafter.stale() if self._drafter is not None and self._declared is not None else []
        return self.derived.stale() + of_drafter

    def quantized_layers(self) -> list[dict[str, Any]]:
        """Return how many layers serve from fp8 blocks; see `Engine.quantized_layers`."""
        return counted(served_in_blocks(self.scales, self.blocks))
