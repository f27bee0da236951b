"""An adapter of a live vLLM as the destination of a refit."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.engines.placing.turned import TurnedMatrices
from reshard.engines.vllm.adapters.compat import check_config, manager_of, worker_manager_of
from reshard.engines.vllm.adapters.stages import Slice, StagedSlice, Stages
from reshard.engines.vllm.adapters.targets import Target, find_targets
from reshard.engines.vllm.adapters.versions import Version, identity_of, versions_of
from reshard.engines.vllm.guard import VllmGuard
from reshard.engines.vllm.weights.mla import absorbing_attentions
from reshard.engines.vllm.weights.served import Served
from reshard.lora.names import A, B, peft_name
from reshard.lora.scale import Scale
from reshard.refit.guard import Guard
from reshard.refit.lora.lent import LentAdapter
from reshard.refit.lora.scales import collect_scales
from reshard.refit.lora.sides import AdapterEngine

ABSORBED = "kv_b_proj"
ROUND = 0  # in which everything passes through memory of its own


class AdaptedModel(Protocol):
    """A `reshard.engines.vllm.live.VllmModel`, as far as its adapters need it."""

    hf_config: dict[str, Any]
    tp: int
    placement: Placement
    regions: Mapping[Any, Region]
    turned: TurnedMatrices
    module: torch.nn.Module
    worker: Any
    front: Any
    served: Served
    guard: VllmGuard

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""


class VllmAdapter(AdapterEngine):
    """The adapter `name` of one rank of a vLLM whose weights are `base`.

    A refit brings the matrices into memory of their own. From there they are written into a slot of vLLM's,
    in place, under an id of their own, which new requests get at the end; until then, and if the refit fails,
    they get that of what the last one brought.

    Raises ReshardError if this vLLM serves no adapters, or in a way that is not refitted.
    """

    regions: dict[Any, Region]

    def __init__(self, base: AdaptedModel, name: str) -> None:
        self.base, self.name = base, name
        self.hf_config, self.tp = base.hf_config, base.tp
        manager = manager_of(base.module)
        check_config(manager)
        self.most_rank: int = manager.lora_config.max_lora_rank
        self.dtype: torch.dtype = manager.lora_config.lora_dtype
        self.versions = versions_of(manager, base.guard, base.served.adapters)
        self.versions.serve(worker_manager_of(base.worker))
        self.targets, self._reasons = find_targets(
            base.placement, base.regions, base.served.adapters, base.turned.matrices
        )
        self.guard = Guard("vLLM", False, f"no version of adapter {name!r}")
        self.placement, self.regions = Placement({}), {}
        self._stages = Stages([], self.dtype, self.device)
        self._writing: int | None = None  # the slot
        self._links = 0

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def version(self) -> int | None:
        """The version that new requests get; None if none may be served."""
        return self.versions.number(self.name)

    def request(self) -> Any:
        """Return vLLM's ``LoRARequest`` for the newest version of the adapter; requests by the adapter's name go
        there too.

        Raises ReshardError if the engine may not serve it.
        """
        return self.versions.request(self.name)

    # Connecting

    def take_facts(self, facts: Mapping[str, bytes]) -> None:
        """Take the scales of the trainer's adapter."""
        self.take_scales(collect_scales(facts))

    def take_scales(self, scales: Mapping[str, Scale]) -> None:
        """Make the placement for these published weights: each has a rank, and a scale by which vLLM multiplies.

        Raises ReshardError for adapters of weights for which vLLM holds none, and of too high a rank.
        """
        self._links += 1
        self.versions.connect(self.name)
        for reason in (self._reasons[weight] for weight in scales if weight in self._reasons):
            raise ReshardError(reason)
        own_weights = {part.name for tensor in self.base.placement.tensors.values() for part in tensor.parts}
        unserved = sorted(weight for weight in scales if weight in own_weights and weight not in self.targets)
        if unserved:
            raise ReshardError(
                f"the trainer has adapters of {len(unserved)} layers that this vLLM serves none for: "
                f"{listed(unserved, 3)}"
            )
        attentions = absorbing_attentions(self.base.served)
        absorbed = sorted(
            weight
            for weight, target in self.targets.items()
            if weight in scales and _is_absorbed(target.layer, attentions)
        )
        if absorbed:
            raise ReshardError(
                f"vLLM multiplies by matrices that it makes of {listed(absorbed, 1)} without its adapter, "
                "so that this would have no effect: train without adapters of that layer"
            )
        highest = max((scale.rank for scale in scales.values()), default=0)
        if highest > self.most_rank:
            raise ReshardError(
                f"the trainer's adapter has rank {highest}, and this vLLM holds ranks up to "
                f"{self.most_rank}: start it with max_lora_rank={highest} or more"
            )
        slices = list(self._slices(scales))
        if sorted(one.kind for one in slices) != self._stages.kinds:
            self._take_slices(slices)  # else the memory stays where it is, since another link may write there

    def _slices(self, scales: Mapping[str, Scale]) -> Iterator[Slice]:
        """Yield the slices of layers in which these weights are.

        Raises ReshardError if experts differ in rank or scale.
        """
        targets: dict[tuple[int, int], dict[str, Target]] = defaultdict(dict)
        for weight, target in self.targets.items():
            if weight in scales:
                targets[id(target.buffers.a), id(target.buffers.b)][weight] = target
        for of_slice in targets.values():
            kinds = {(scales[weight].rank, scales[weight].factor) for weight in of_slice}
            layer, buffers = next((target.layer, target.buffers) for target in of_slice.values())
            if len(kinds) > 1:
                raise ReshardError(
                    f"the trainer's adapters of the experts in {layer} differ in rank or scale, which vLLM cannot hold"
                )
            [(rank, factor)] = kinds
            yield Slice(layer, buffers, of_slice, rank, factor)

    def _take_slices(self, slices: Sequence[Slice]) -> None:
        """Make the memory of these slices, the placement, and the regions."""
        self._stages = Stages(slices, self.dtype, self.device)
        self.regions = {}
        shapes: dict[str, tuple[int, ...]] = {}
        tensors: list[LocalTensor] = []
        for stage in self._stages.all:
            for shape, tensor, region in _local_tensors(stage):
                shapes[tensor.parts[0].name] = shape
                if all(tensor.shape):
                    tensors.append(tensor)
                    self.regions[tensor.id] = region
        self.placement = Placement.of(shapes, tensors)
        self.staged_rounds = dict.fromkeys(self.regions, ROUND)

    def disconnect(self) -> None:
        """Let vLLM remove the adapter, unless another link refits it."""
        self._links = max(0, self._links - 1)
        if not self._links:
            self.versions.disconnect(self.name)
            self._take_slices([])  # the newest version keeps its own

    # A refit

    def refresh_regions(self) -> None:
        """Raise ReshardError if vLLM sleeps. The memory in which adapters arrive does not move."""
        if self.base.guard.asleep:
            raise ReshardError(
                "this vLLM sleeps, and its adapters have no memory: call wake_up(tags=['weights']) before a refit"
            )

    def begin(self) -> None:
        """Make room for what will arrive; requests are served on with what they began with."""
        self._writing = None
        self.versions.begin(identity_of(self.attempt), self._stages)

    def process_round(self, index: int) -> None:
        """Write what has arrived into a slot."""
        self._stages.finish()
        self._writing = self.versions.fill(identity_of(self.attempt), self._stages)

    def mismatches(self, index: int) -> list[Any]:
        assert self._writing is not None
        self._stages.scale()
        wrong = set(map(id, self._stages.differing(self._writing)))
        return [identity for identity, region in self.regions.items() if id(region.tensor) in wrong]

    def end(self, version: int) -> None:
        """Serve new requests with what has arrived."""
        lora_name = f"{self.name}@{version}-{self.attempt.hex()}"
        writes = self.base.guard.writes
        self.versions.add(
            Version(
                self.name,
                version,
                lora_name,
                identity_of(self.attempt),
                self._stages,
                writes,
                origin=self.guard.origin,
            )
        )
        self._writing = None
        self.guard.refitted(version)

    def lent(self, version: int) -> LentAdapter:
        newest, refusal = self.versions.newest.get(self.name), self.versions.refusal(self.name)
        if newest is None or refusal:
            raise ReshardError(refusal)
        if newest.number != version:
            raise ReshardError(
                f"this vLLM serves version {newest.number} of adapter {self.name!r}, and cannot hand on version "
                f"{version}"
            )
        memory = (newest.stages.memory if newest.memory is None else newest.memory).clone()
        held: list[tuple[LocalTensor, Region]] = []
        ranks: dict[str, int] = {}
        for stage in newest.stages.all:
            a, b = (
                memory[one.storage_offset() : one.storage_offset() + one.numel()].view(one.shape)
                for one in (stage.a, stage.b)
            )
            copied = stage._replace(a=a, b=b, others=[a] * len(stage.others))  # which are equal
            held += [(tensor, region) for _, tensor, region in _local_tensors(copied) if all(tensor.shape)]
            ranks |= dict.fromkeys(stage.slice.targets, stage.slice.rank)
        return LentAdapter(version, newest.origin, held, ranks, self.device)

    def tensor_accounts(self) -> list[dict[str, Any]]:
        how = f"into slots of adapter {self.name!r}"
        first = next((peft_name(weight, matrix) for weight, matrix in self.regions), "")
        return [{"what": "brought", "how": how, "tensors": len(self.regions), "first": first}]


def _local_tensors(stage: StagedSlice) -> Iterator[tuple[tuple[int, ...], LocalTensor, Region]]:
    """Yield A and B of each weight of a slice: the shape of the whole, the local tensor, and where it lies."""
    for weight, target in stage.slice.targets.items():
        for matrix, shape, box, region in _matrices(stage, target):
            # By the weight: several that are rows of one tensor have one A.
            part = Part(peft_name(weight, matrix), box, (0, 0))
            yield shape, LocalTensor((weight, matrix), box.lengths, (part,)), region


def _matrices(stage: StagedSlice, target: Target) -> Iterator[tuple[str, tuple[int, int], Box, Region]]:
    """Yield A and B of a weight: the shape of the whole, the box of it that is here, and where that arrives."""
    (out_size, in_size), rank = target.shape, stage.slice.rank
    column, columns = target.box.offsets[1], target.box.lengths[1]
    first, count = target.rows_of_a(rank)
    memory = (stage.a, *stage.others)[target.part]
    of_expert = target.expert * count * columns
    yield A, (rank, in_size), Box((first, column), (count, columns)), Region(memory, of_expert, columns)
    row, rows = target.rows
    of_expert = (target.expert * stage.b.shape[1] + target.at) * rank
    yield B, (out_size, rank), Box((row, 0), (rows, rank)), Region(stage.b, of_expert, rank)


def _is_absorbed(layer: str, attentions: Iterable[str]) -> bool:
    """Return True if a layer is the one from which one of these latent `attentions` computes matrices."""
    parent, _, name = layer.rpartition(".")
    return name == ABSORBED and any(f"{attention}.".startswith(f"{parent}.") for attention in attentions)
