"""An adapter of a live vLLM as the destination of a refit."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.engines.base import Engine
from reshard.engines.guard import Guard
from reshard.engines.vllm.adapters.compat import Buffers, check_config, manager_of
from reshard.engines.vllm.adapters.slots import slots_of
from reshard.engines.vllm.adapters.targets import Target, find_targets
from reshard.engines.vllm.guard import VllmGuard
from reshard.engines.vllm.weights.mla import absorbing_attentions
from reshard.engines.vllm.weights.served import Served
from reshard.lora.names import A, B, peft_name
from reshard.lora.scale import Scale

ABSORBED = "kv_b_proj"
ROUND = 0  # in which everything passes through memory of its own


class Stage(NamedTuple):
    """Memory for one slice of a layer as it arrives, before it is written into a slot: A ``[experts, rank, in]``
    and B ``[experts, out, rank]``, and the factor of B."""

    layer: str
    buffers: Buffers
    a: torch.Tensor
    b: torch.Tensor
    factor: float

    def slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where A and B are in a slot, without the rows and columns of higher ranks."""
        rank = self.a.shape[1]
        return self.buffers.a[slot, :, :rank], self.buffers.b[slot, :, :, :rank]

    def scaled(self) -> torch.Tensor:
        """Return B times the scale, rounded as vLLM rounds it."""
        return self.b if self.factor == 1 else self.b * self.factor


class AdaptedModel(Protocol):
    """A `reshard.engines.vllm.live.VllmModel`, as far as its adapters need it."""

    hf_config: dict[str, Any]
    tp: int
    placement: Placement
    regions: Mapping[Any, Region]
    module: torch.nn.Module
    worker: Any
    front: Any
    served: Served
    guard: VllmGuard

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""


class VllmAdapter(Engine):
    """The adapter `name` of one rank of a vLLM whose weights are `base`.

    A refit brings the matrices into memory of their own. From there they are written into a slot of vLLM's,
    in place, which serves the adapter's new requests at the end; until then, and if the refit fails, they are
    served with what the last one brought.

    Raises ReshardError where this vLLM serves no adapters, or in a way that is not refitted.
    """

    regions: dict[Any, Region]
    takes_scales = True

    def __init__(self, base: AdaptedModel, name: str) -> None:
        self.base, self.name = base, name
        self.hf_config, self.tp = base.hf_config, base.tp
        manager = manager_of(base.module)
        check_config(manager)
        self.most_rank: int = manager.lora_config.max_lora_rank
        self.dtype: torch.dtype = manager.lora_config.lora_dtype
        self.slots = slots_of(name, manager, self._unfit)
        self.slots.watch(base.worker, base.front)
        self.targets = find_targets(base.placement, base.regions, base.served.adapters)
        self.guard = Guard("vLLM", False, f"no version of adapter {name!r}")
        self.placement, self.regions = Placement({}), {}
        self._stages: list[Stage] = []
        self._writing: int | None = None
        self._clean: set[int] = set()  # slots with zeros wherever no stage is written
        self._losses = base.guard.losses

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        return self.base.device

    def request(self) -> Any:
        """Return vLLM's ``LoRARequest`` for the newest version of the adapter, for engines in other
        processes; in this one, requests by the adapter's name go there too.

        Raises ReshardError where the engine may not serve it.
        """
        return self.slots.request()

    def _unfit(self) -> str:
        """Return what keeps the engine from serving the adapter; empty where nothing does."""
        guard = self.base.guard
        if not guard.ready:
            return guard.reason
        if guard.version is None:
            return "weights below it that no refit has brought"
        if not self.guard.ready or guard.losses != self._losses:
            return "no version of it, or one that was lost since"
        return ""

    # Connecting

    def take_scales(self, scales: Mapping[str, Scale]) -> None:
        """See `Engine.take_scales`.

        Raises ReshardError for adapters of weights for which vLLM holds none, and of too high a rank.
        """
        own_weights = {part.name for tensor in self.base.placement.tensors.values() for part in tensor.parts}
        unserved = sorted(weight for weight in scales if weight in own_weights and weight not in self.targets)
        if unserved:
            raise ReshardError(
                f"the trainer has adapters of {len(unserved)} layers that this vLLM serves none for: {listed(unserved, 3)}"
            )
        attentions = absorbing_attentions(self.base.served)
        absorbed = sorted(
            weight
            for weight, target in self.targets.items()
            if weight in scales and _is_absorbed(target.layer, attentions)
        )
        if absorbed:
            raise ReshardError(
                f"vLLM multiplies by matrices that it makes of {listed(absorbed, 1)} without its adapter, so that this would "
                f"have no effect: train without adapters of that layer"
            )
        highest = max((scale.rank for scale in scales.values()), default=0)
        if highest > self.most_rank:
            raise ReshardError(
                f"the trainer's adapter has rank {highest}, and this vLLM holds ranks up to {self.most_rank}: start it with "
                f"max_lora_rank={highest} or more"
            )
        stages: dict[tuple[int, int], dict[str, Target]] = defaultdict(dict)
        for weight, target in self.targets.items():
            if weight in scales:
                stages[id(target.buffers.a), id(target.buffers.b)][weight] = target
        shapes: dict[str, tuple[int, ...]] = {}
        tensors: list[LocalTensor] = []
        self.regions, self._stages, self._clean = {}, [], set()
        for of_stage in stages.values():
            self._stages.append(self._stage(of_stage, scales, shapes, tensors))
        self.placement = Placement.of(shapes, tensors)
        self.staged_rounds = dict.fromkeys(self.regions, ROUND)

    def _stage(
        self,
        targets: Mapping[str, Target],
        scales: Mapping[str, Scale],
        shapes: dict[str, tuple[int, ...]],
        tensors: list[LocalTensor],
    ) -> Stage:
        """Return the memory for one slice of a layer, and add its matrices to the placement and regions."""
        kinds = {(scales[weight].rank, scales[weight].factor) for weight in targets}
        layer, buffers = next((target.layer, target.buffers) for target in targets.values())
        if len(kinds) > 1:
            raise ReshardError(
                f"the trainer's adapters of the experts in {layer} differ in rank or scale, which vLLM cannot hold"
            )
        [(rank, factor)] = kinds
        experts, rows, columns = buffers.a.shape[1], buffers.b.shape[2], buffers.a.shape[3]
        a = torch.zeros(experts, rank, columns, dtype=self.dtype, device=buffers.a.device)
        b = torch.zeros(experts, rows, rank, dtype=self.dtype, device=buffers.b.device)
        for weight, target in targets.items():
            (row, column), (out_size, in_size) = target.box.offsets, target.shape
            for matrix, memory, shape, box in (
                (A, a, (rank, in_size), Box((0, column), (rank, columns))),
                (B, b, (out_size, rank), Box((row, 0), (rows, rank))),
            ):
                name = peft_name(weight, matrix)
                shapes[name] = shape
                tensors.append(LocalTensor(name, box.lengths, (Part(name, box, (0, 0)),)))
                pitch = box.lengths[1]
                self.regions[name] = Region(memory, target.expert * box.lengths[0] * pitch, pitch)
        return Stage(layer, buffers, a, b, factor)

    # A refit

    def refresh_regions(self) -> bool:
        """See `Engine.refresh_regions`; the memory in which adapters arrive does not move."""
        if self.base.guard.asleep:
            raise ReshardError(
                "this vLLM sleeps, and its adapters have no memory: call wake_up(tags=['weights']) before a refit"
            )
        return False

    def begin(self) -> None:
        """Choose the slot to write into; requests are served on from the other."""
        if self.base.guard.losses != self._losses:
            self.slots.forget()
            self._clean.clear()
        self._writing = self.slots.begin(self.base.front)
        if self.slots.current is None:
            self.guard.invalidate(f"no version of adapter {self.name!r}")

    def process_round(self, index: int) -> None:
        """Write what has arrived into the slot."""
        assert self._writing is not None
        if self._writing not in self._clean:
            self._clear(self._writing)
        for stage in self._stages:
            a, b = stage.slot(self._writing)
            a.copy_(stage.a)
            b.copy_(stage.scaled())
            if stage.buffers.enabled is not None:
                stage.buffers.enabled[self._writing] = 1

    def _clear(self, slot: int) -> None:
        """Fill a slot of all layers with zeros."""
        for wrapper in self.base.served.adapters.values():
            wrapper.reset_lora(slot)  # type: ignore[operator]
        self._clean.add(slot)

    def mismatches(self, index: int) -> list[Any]:
        """See `Engine.mismatches`."""
        assert self._writing is not None
        wrong = set()
        for stage in self._stages:
            for memory, held, arrived in zip(
                (stage.a, stage.b), stage.slot(self._writing), (stage.a, stage.scaled()), strict=True
            ):
                if not torch.equal(held, arrived):
                    wrong.add(id(memory))
        return [identity for identity, region in self.regions.items() if id(region.tensor) in wrong]

    def end(self, version: int) -> None:
        """Serve new requests with what has arrived."""
        assert self._writing is not None
        self.slots.end(self._writing, version)
        self._writing, self._losses = None, self.base.guard.losses
        self.guard.refitted(version)

    def tensor_accounts(self) -> list[dict[str, Any]]:
        """See `Engine.tensor_accounts`."""
        how = f"into slots of adapter {self.name!r}"
        first = next(iter(self.regions), "")
        return [{"what": "brought", "how": how, "tensors": len(self.regions), "first": first}]


def _is_absorbed(layer: str, attentions: Iterable[str]) -> bool:
    """Tell whether a layer is the one of latent attention of which these `attentions` make matrices."""
    parent, _, name = layer.rpartition(".")
    return name == ABSORBED and any(f"{attention}.".startswith(f"{parent}.") for attention in attentions)
