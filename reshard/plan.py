"""A refit's plan without a GPU: who would send what to whom, and how long the wires need for it."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import lcm, prod
from typing import Any

import numpy as np

from reshard.core.assignment import best_assignment
from reshard.core.errors import ReshardError
from reshard.core.gc import gc_paused
from reshard.core.limits import MAX_RANKS, check_number
from reshard.core.placement import Placement
from reshard.core.planner import make_plan
from reshard.engines.vllm.layout import VllmLayout, vllm_placement
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import Mapping, expand, padded_vocab_size
from reshard.megatron.ranks import LiveShard, Ranks, live_shards
from reshard.models.model import Model
from reshard.refit.routes import Seat, distance, nearest
from reshard.refit.tables import table_of, tile_count

# More than the memory of any GPU.
MAX_RANK_BYTES = 1 << 40
# Columns of a copy table, each an int64.
COPY_BYTES = 6 * 8


@dataclass(frozen=True)
class RankForecast:
    """An inference rank: bytes that it finds on its own GPU, that come from its host's others and from other
    hosts; the trainer's ranks that it reads from; copies before tiling, extra memory of the copy table, and
    seconds of planning."""

    rank: int
    gpu: int
    weight_bytes: int
    local_bytes: int
    host_bytes: int
    network_bytes: int
    partners: int
    transfers: int
    table_bytes: int
    plan_seconds: float


@dataclass
class Forecast:
    """What a refit would move.

    `ranks` are the inference ranks that were planned, `trainer_bytes` the weights of each trainer's rank,
    `out_bytes` what each trainer's rank sends to other GPUs (as far as those ranks were planned). `gpu_order`
    is, for each inference rank, the GPU on which it would find the most of its bytes, chosen within each
    host; `order_bytes` are the bytes that all ranks together would find there. Rates are in bytes a second
    and direction; `wire_seconds` is the least time that the busiest GPU's links need, `memory_seconds` that
    of the local copies, each read and written once.
    """

    model: str
    trainer: str
    engine: str
    trainer_ranks: int
    engine_ranks: int
    gpus: int
    colocated: bool
    ranks: list[RankForecast]
    trainer_bytes: list[int]
    out_bytes: list[int]
    link_rate: float
    network_rate: float
    memory_rate: float
    wire_seconds: float
    memory_seconds: float
    gpu_order: list[int] = field(default_factory=list)
    order_bytes: int = 0

    @property
    def plan_seconds(self) -> float:
        """The slowest rank's planning, which in a refit the ranks do side by side."""
        return max(rank.plan_seconds for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"plan_seconds": self.plan_seconds}


@gc_paused()
def plan_refit(
    model: Model,
    trainer: MegatronLayout,
    engine: VllmLayout,
    *,
    dp: int | None = None,
    cp: int = 1,
    colocated: bool | None = None,
    gpus_per_host: int = 8,
    link_rate: float = 370e9,
    network_rate: float = 50e9,
    memory_rate: float = 4.2e12,
    itemsize: int = 2,
    transformer_impl: str = "transformer_engine",
    vocab_divisible_by: int = 128,
    order: Sequence[int] | None = None,
    ranks: Iterable[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Plan the refit of a vLLM at layout `engine` from a Megatron trainer at layout `trainer`, rank by rank,
    on simulated GPUs.

    `dp` is Megatron's data parallel size (default: the least that EP needs), `cp` its context parallel size.
    With `colocated` (default: where both sides have as many ranks) inference rank i runs on GPU ``order[i]``
    (default i) and the trainer's rank i on GPU i; else the engine's GPUs follow the trainer's. `itemsize` is
    that of the weights, in bytes. `ranks` limits the planning to some inference ranks.

    Raises ReshardError where a size does not divide, and PlanError where the plan cannot be proven.
    """
    trainer.check(model)
    engine.check(model)
    stage_ranks = _ranks_per_stage(model, trainer, dp, cp)
    trainers, engines = trainer.pp * stage_ranks, engine.world_size
    check_number(trainers, "the number of the trainer's ranks", MAX_RANKS)
    check_number(engines, "the number of the engine's ranks", MAX_RANKS)
    colocated = trainers == engines if colocated is None else colocated
    gpu_of = _gpus(trainers, engines, colocated, order)
    chosen = list(range(engines)) if ranks is None else sorted(set(ranks))
    if not chosen or chosen[0] < 0 or chosen[-1] >= engines:
        raise ReshardError(f"the engine's {engines} ranks are 0 to {engines - 1}; asked for {chosen}")
    mapping = expand(
        model, transformer_impl, padded_vocab_size(model.symbols["V"], vocab_divisible_by, trainer.tp)
    )
    widths = {name: 4 if name in mapping.fp32 else itemsize for name in mapping.shapes}
    source = _Trainer(mapping, Ranks(model, trainer, stage_ranks))
    seats = [
        Seat(gpu, gpu, gpu // gpus_per_host) for gpu in range(trainers if colocated else trainers + engines)
    ]
    # Of each GPU: bytes in and out over its host's links, and over the network.
    links_in, links_out, network_in, network_out = (np.zeros(len(seats), np.int64) for _ in range(4))
    # For each planned rank: what it would find on each GPU of its host.
    found_on = np.zeros((len(chosen), gpus_per_host), np.int64)
    planned: list[RankForecast] = []
    for done, rank in enumerate(chosen):
        begin, gpu = time.perf_counter(), gpu_of[rank]
        wanted = vllm_placement(model, engine.rank(model, rank))
        _check_bytes(wanted, itemsize, rank)
        shards = source.of(wanted)
        plan = make_plan(Placement.of(mapping.shapes, (shard.tensor for shard in shards.values())), wanted)
        rows, by_holders = [], Counter[tuple[int, ...]]()
        for t in plan.transfers:
            rows.append(_copy(t, shards[t.src].tensor.shape, wanted.tensors[t.dst].shape, widths[t.name]))
            by_holders[shards[t.src].ranks] += t.box.volume * widths[t.name]
        amounts, read_from = [0, 0, 0, 0], set()
        for holders, n in by_holders.items():
            distances = {other: distance(seats[gpu], seats[other]) for other in holders}
            other = holders[nearest(holders, distances.__getitem__, rank, engine.tp)]
            amounts[distances[other]] += n
            read_from.add(other)
            if distances[other] == 2:
                links_in[gpu] += n
                links_out[other] += n
            elif distances[other] == 3:
                network_in[gpu] += n
                network_out[other] += n
            found_on[
                done, [other % gpus_per_host for other in holders if colocated and distances[other] < 3]
            ] += n
        tables = tile_count(table_of(rows)) * COPY_BYTES
        seconds = time.perf_counter() - begin
        at_home, host, network = amounts[0] + amounts[1], amounts[2], amounts[3]
        planned.append(
            RankForecast(
                rank, gpu, sum(amounts), at_home, host, network, len(read_from), len(rows), tables, seconds
            )
        )
        if progress is not None:
            progress(done + 1, len(chosen))
    busiest_link, busiest_network = (
        max(links_in.max(), links_out.max()),
        max(network_in.max(), network_out.max()),
    )
    wire = max(float(busiest_link) / link_rate, float(busiest_network) / network_rate)
    data_parallel = f"DP{stage_ranks // (trainer.tp * cp)}" + f" CP{cp}" * (cp > 1)
    result = Forecast(
        f"{model.family.name} ({model.num_layers} layers)",
        f"{trainer} {data_parallel}",
        str(engine),
        trainers,
        engines,
        len(seats),
        colocated,
        planned,
        source.bytes_of_ranks(trainers, widths),
        (links_out + network_out)[:trainers].tolist(),
        link_rate,
        network_rate,
        memory_rate,
        wire,
        2 * max(rank.local_bytes for rank in planned) / memory_rate,
    )
    if colocated and len(chosen) == trainers:
        result.gpu_order, result.order_bytes = _best_order(found_on, gpus_per_host)
    return result


class _Trainer:
    """A trainer's shards, made when a placement asks for them."""

    def __init__(self, mapping: Mapping, ranks: Ranks) -> None:
        self.parameters = mapping.parameters
        self.by_name = {part.name: index for index, p in enumerate(mapping.parameters) for part in p.parts}
        self.ranks = ranks
        self.made: dict[int, list[LiveShard]] = {}

    def of(self, wanted: Placement) -> dict[Any, LiveShard]:
        """The shards of every parameter that `wanted` needs something of, by local tensor."""
        needed = dict.fromkeys(
            self.by_name[part.name] for tensor in wanted.tensors.values() for part in tensor.parts
        )
        return {shard.tensor.id: shard for index in needed for shard in self._made(index)}

    def _made(self, index: int) -> list[LiveShard]:
        if index not in self.made:
            self.made[index] = live_shards(self.ranks, self.parameters[index])
        return self.made[index]

    def bytes_of_ranks(self, ranks: int, widths: dict[str, int]) -> list[int]:
        """The weights of each rank, vocabulary padding left out."""
        total = np.zeros(ranks, np.int64)
        for index in range(len(self.parameters)):
            for shard in self._made(index):
                n = sum(part.box.volume * widths[part.name] for part in shard.tensor.parts)
                total[list(shard.ranks)] += n
        return total.tolist()


def _check_bytes(wanted: Placement, itemsize: int, rank: int) -> None:
    """Raise ReshardError where an inference rank would hold more than any GPU: copies are planned in pieces."""
    held = {id: prod(tensor.shape) * itemsize for id, tensor in wanted.tensors.items()}
    if sum(held.values()) > MAX_RANK_BYTES:
        largest = max(held, key=held.__getitem__)
        raise ReshardError(
            f"the engine's rank {rank} would hold {sum(held.values()):,} bytes of weights, {held[largest]:,} of them in "
            f"{largest[0]}, and no GPU holds more than {MAX_RANK_BYTES:,}: plan more ranks, or correct the config"
        )


def _ranks_per_stage(model: Model, trainer: MegatronLayout, dp: int | None, cp: int) -> int:
    """Ranks of a pipeline stage: TP times CP times DP, which ETP times EP divides."""
    if dp is None:
        return lcm(trainer.tp * cp, trainer.ranks_per_stage(model))
    ranks, experts = trainer.tp * cp * dp, trainer.ep * trainer.expert_tp
    if model.num_experts and ranks % experts:
        raise ReshardError(
            f"the trainer's tp {trainer.tp} x cp {cp} x dp {dp} are {ranks} ranks a pipeline "
            f"stage, which ep {trainer.ep} x etp {trainer.expert_tp} do not divide"
        )
    return ranks


def _gpus(trainers: int, engines: int, colocated: bool, order: Sequence[int] | None) -> list[int]:
    """The GPU of each inference rank."""
    if not colocated:
        if order is not None:
            raise ReshardError("an order of GPUs is for a colocated engine")
        return list(range(trainers, trainers + engines))
    if engines > trainers:
        raise ReshardError(
            f"the engine's {engines} ranks do not fit on the trainer's {trainers} GPUs: plan "
            f"them on GPUs of their own"
        )
    gpus = list(range(engines)) if order is None else list(order)
    if len(gpus) != engines or len(set(gpus)) != engines or not set(gpus) <= set(range(trainers)):
        raise ReshardError(
            f"the order of GPUs {gpus} does not name {engines} different ones of 0 to {trainers - 1}"
        )
    return gpus


def _copy(t: Any, src: tuple[int, ...], dst: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A row of a copy table, without addresses."""
    rows, width = (t.box.lengths[0], t.box.lengths[1]) if len(t.box.lengths) == 2 else (1, t.box.lengths[0])
    return 0, 0, rows, width * itemsize, src[-1] * itemsize, dst[-1] * itemsize


def _best_order(found_on: np.ndarray, gpus_per_host: int) -> tuple[list[int], int]:
    """For each inference rank the GPU that keeps the most bytes on their GPU, among those of the host that it
    has now."""
    order: list[int] = []
    kept = 0
    for start in range(0, len(found_on), gpus_per_host):
        block = found_on[start : start + gpus_per_host, : len(found_on) - start]
        # among equally good ones, the order with the fewest changes
        stay = np.eye(len(block), dtype=np.int64)
        columns = best_assignment(block * (len(block) + 1) + stay)
        order += [start + column for column in columns]
        kept += int(block[range(len(block)), columns].sum())
    return order, kept
