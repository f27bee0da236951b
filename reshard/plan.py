"""Plan a refit without a GPU: the bytes that each rank would send and receive, and the time of the wires."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import lcm, prod
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.boxes import Box
from reshard.core.errors import OptionError, ReshardError, listed
from reshard.core.gc import gc_paused
from reshard.core.limits import MAX_RANKS, check_number
from reshard.core.placement import Placement, local_matrix
from reshard.core.planner import Transfer, make_plan
from reshard.core.printed import Printed, size
from reshard.delta.forms import delta_share
from reshard.engines.layout import EngineLayout, published_tensors
from reshard.engines.sglang.weights.layout import SglangLayout
from reshard.engines.vllm.layout import VllmLayout
from reshard.megatron.layout import MegatronLayout, checked_layout
from reshard.megatron.parameters import ModelParameters, expand, padded_vocab_size
from reshard.megatron.ranks import LiveShard, Ranks, live_shards
from reshard.models.model import Model
from reshard.refit.copying.tables import table_of, tile_count
from reshard.refit.routes import Seat, distance, nearest
from reshard.storage.sources.opening import read_model

# More than the memory of any GPU.
MAX_RANK_BYTES = 1 << 40
# Columns of a copy table, each an int64.
COPY_BYTES = 6 * 8
SHOWN = 16  # ranks
# A box of a tensor, and the trainer's ranks that hold it.
Piece = tuple[tuple[int, ...], str, Box]


@dataclass(frozen=True)
class RankForecast:
    """The plan of one inference rank.

    `local_bytes` lie on the rank's own GPU, `host_bytes` come from other GPUs of its host,
    `network_bytes` from other hosts. `partners` are the trainer's ranks that it reads from,
    `transfers` the copies before tiling, `table_bytes` the extra memory of the copy table.
    """

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
class Forecast(Printed):
    """The bytes that a refit would move, and the least time that the wires need.

    `ranks` are the inference ranks that were planned, `trainer_bytes` the weights of each trainer's rank,
    `out_bytes` what each trainer's rank sends to other GPUs, as far as those ranks were planned. Rates are in
    bytes per second and direction. `link_seconds` and `network_seconds` are the least times that the busiest
    GPU's links within its host, and its network, need, `memory_seconds` that of the local copies, each read
    and written once. With `changed`, a share of the elements, `delta_network_seconds` is that between hosts for what
    changed, as refits with ``delta=True`` send it: those within a host send all.

    There may be several `engines` of this layout; `ranks` are those of the first. `relayed_link_seconds` and
    `relayed_network_seconds` are the times where ranks of other hosts pass on what they want alike
    (`reshard.refit.relays`), and `most_relays` how many of them some of it passes.
    """

    model: str
    trainer: str
    engine_name: str
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
    link_seconds: float
    network_seconds: float
    memory_seconds: float
    changed: float | None = None
    delta_network_seconds: float | None = None
    engines: int = 1
    relayed_link_seconds: float = 0.0
    relayed_network_seconds: float = 0.0
    most_relays: int = 0

    @property
    def wire_seconds(self) -> float:
        """The least time that the wires need: links and network carry their bytes side by side."""
        return max(self.link_seconds, self.network_seconds)

    @property
    def plan_seconds(self) -> float:
        """Planning time of the slowest rank; in a refit the ranks plan side by side."""
        return max(rank.plan_seconds for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for ``--json``."""
        return asdict(self) | {"wire_seconds": self.wire_seconds, "plan_seconds": self.plan_seconds}

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.model}: Megatron {self.trainer} ({self.trainer_ranks} ranks) to {self.engine_name} "
            f"{f'{self.engines} of ' * (self.engines > 1)}{self.engine} ({self.engine_ranks} ranks) on "
            f"{'the same' if self.colocated else 'other'} GPUs"
        )
        widths = (6, 6, 11, 11, 11, 11, 7, 9, 10)
        heads = ("rank", "GPU", "weights", "local", "host", "network", "peers", "copies", "tables")
        yield "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
        shown = self.ranks
        if len(shown) > SHOWN:
            shown = sorted(shown, key=lambda rank: -(rank.host_bytes + rank.network_bytes))[:SHOWN]
        for rank in shown:
            amounts = (rank.weight_bytes, rank.local_bytes, rank.host_bytes, rank.network_bytes)
            copies, tables = f"{rank.transfers:,}", size(rank.table_bytes)
            row = (rank.rank, rank.gpu, *map(size, amounts), rank.partners, copies, tables)
            yield "".join(f"{value:>{width}}" for value, width in zip(row, widths, strict=True))
        if len(shown) < len(self.ranks):
            yield f"   ... and {len(self.ranks) - len(shown)} that receive no more (--json has all)"
        partly = "" if len(self.ranks) == self.engine_ranks else " to these ranks"
        yield (
            f"trainer's GPUs: weights {size(max(self.trainer_bytes))} at most; "
            f"out{partly} {size(min(self.out_bytes))} to {size(max(self.out_bytes))}"
        )
        yield (
            f"wire floor {self.wire_seconds * 1e3:.1f} ms: within hosts {self.link_seconds * 1e3:.1f} ms at "
            f"{self.link_rate / 1e9:g} GB/s, between hosts {self.network_seconds * 1e3:.1f} ms at "
            f"{self.network_rate / 1e9:g} GB/s"
        )
        if self.most_relays:
            relayed = max(self.relayed_link_seconds, self.relayed_network_seconds)
            yield (
                f"with relays {relayed * 1e3:.1f} ms: within hosts {self.relayed_link_seconds * 1e3:.1f} ms, between "
                f"hosts {self.relayed_network_seconds * 1e3:.1f} ms; what several ranks of other hosts want leaves the "
                f"trainer once, and passes up to {self.most_relays} of them"
            )
        if self.changed is not None and self.delta_network_seconds is not None:
            yield (
                f"of {100 * self.changed:g} % changed, with delta=True: between hosts "
                f"{self.delta_network_seconds * 1e3:.1f} ms, beside a comparison of all weights with the "
                "copy of them that the trainer keeps"
            )
        yield f"memory floor {self.memory_seconds * 1e3:.1f} ms at {self.memory_rate / 1e9:g} GB/s"
        yield (
            "extra memory of a GPU: the tables; where ranks cannot read each other's memory, the buckets (512 "
            "MiB unless told otherwise)"
        )
        total = sum(rank.plan_seconds for rank in self.ranks)
        yield (
            f"planned in {self.plan_seconds:.2f} s for a rank at most, {total:.1f} s in all; every copy is "
            f"proven. Whether your {self.engine_name} has this model is seen when it starts"
        )


@gc_paused()
def plan_refit(
    model: Model | str | Path,
    trainer: MegatronLayout,
    engine: EngineLayout,
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
    make_vocab_size_divisible_by: int = 128,
    ranks: Iterable[int] | None = None,
    changed: float | None = None,
    engines: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Plan the refit of an engine from a Megatron trainer at these layouts, rank by rank, on simulated GPUs.

    `model` is a `reshard.models.model.Model`, or what `reshard.read_model` takes: a directory of either format,
    a config.json, a hub id. `engine` is a `reshard.VllmLayout` or `reshard.SglangLayout`.
    `dp` is Megatron's data parallel size (default: the least that EP needs), `cp` its context parallel size.
    With `colocated` (default: where both sides have as many ranks) inference rank i runs on the GPU of the
    trainer's rank i; otherwise the engine's GPUs follow the trainer's. `itemsize` is that of the weights, in
    bytes. `ranks` limits the planning to some inference ranks. `changed` is the share of the elements that a step
    changes, for refits that send those alone. With several `engines` of this layout each has GPUs of its own.

    Raises ReshardError if a size does not divide or the engine would lack a tensor, and
    PlanError where the plan cannot be proven.
    """
    if changed is not None and not 0 <= changed <= 1:
        raise OptionError(f"changed is {changed!r:.40}, which is not a share of the elements: 0.01 is 1 %")
    model = model if isinstance(model, Model) else read_model(model)
    ranks_per_stage = _checked_ranks_per_stage(model, trainer, engine, dp, cp)
    trainer_ranks, engine_ranks = trainer.pp * ranks_per_stage, engine.world_size
    check_number(engines, "the number of engines", MAX_RANKS)
    colocated = _check_colocated(colocated if engines == 1 else False, trainer_ranks, engine_ranks)
    planned = _check_planned(ranks, engine_ranks)
    vocab = padded_vocab_size(model.symbols["V"], make_vocab_size_divisible_by, trainer.tp)
    parameters = expand(model, transformer_impl, vocab)
    shards = _TrainerShards(parameters, Ranks(model, trainer, ranks_per_stage), itemsize)
    gpus = trainer_ranks if colocated else trainer_ranks + engines * engine_ranks
    check_number(gpus, "the number of GPUs", MAX_RANKS)
    traffic, relays = _Traffic(gpus, gpus_per_host), _Relays(engine.tp)
    forecasts: list[RankForecast] = []
    for rank, placement in _placements(model, engine, planned, itemsize):
        gpu = rank if colocated else trainer_ranks + rank
        of_engines = range(gpu, gpu + engines * engine_ranks, engine_ranks)
        forecasts.append(_plan_rank(rank, of_engines, placement, shards, traffic, relays))
        if progress is not None:
            progress(len(forecasts), len(planned))
    network_seconds = traffic.busiest_network() / network_rate
    relayed, most_relays = relays.traffic(traffic)
    return Forecast(
        model=f"{model.family.name} ({model.num_layers} layers)",
        trainer=f"{trainer} DP{ranks_per_stage // (trainer.tp * trainer.gtp * cp)}" + f" CP{cp}" * (cp > 1),
        engine_name=engine.engine, engine=str(engine), trainer_ranks=trainer_ranks, engine_ranks=engine_ranks,
        gpus=len(traffic.seats), colocated=colocated, ranks=forecasts,
        trainer_bytes=shards.bytes_of_ranks(trainer_ranks), out_bytes=traffic.sent()[:trainer_ranks].tolist(),
        link_rate=link_rate, network_rate=network_rate, memory_rate=memory_rate,
        link_seconds=traffic.busiest_link() / link_rate, network_seconds=network_seconds,
        memory_seconds=2 * max(rank.local_bytes for rank in forecasts) / memory_rate, changed=changed,
        delta_network_seconds=None if changed is None else network_seconds * delta_share(changed, itemsize),
        engines=engines, relayed_link_seconds=relayed.busiest_link() / link_rate,
        relayed_network_seconds=relayed.busiest_network() / network_rate, most_relays=most_relays,
    )  # fmt: skip


def _placements(
    model: Model, engine: EngineLayout, planned: list[int], itemsize: int
) -> Iterator[tuple[int, Placement]]:
    """Yield inference ranks with what each holds. Raises ReshardError, after the last of all, for
    tensors that no rank holds."""
    unserved = {name for _, name in published_tensors(model)}
    for rank in planned:
        placement = engine.placement(model, rank)
        unserved.difference_update(placement.shapes)
        _check_bytes(placement, itemsize, rank)
        yield rank, placement
    if unserved and len(planned) == engine.world_size:
        raise ReshardError(
            f"no rank of the engine holds {len(unserved)} of the model's tensors: {listed(unserved)}"
        )


def _check_colocated(colocated: bool | None, trainer_ranks: int, engine_ranks: int) -> bool:
    """Return whether both sides share GPUs; by default where they have as many ranks. Raises
    ReshardError where there are too few GPUs."""
    colocated = trainer_ranks == engine_ranks if colocated is None else colocated
    if colocated and engine_ranks > trainer_ranks:
        raise OptionError(
            f"the engine's {engine_ranks} ranks do not fit on the trainer's {trainer_ranks} GPUs: plan them on GPUs "
            f"of their own"
        )
    return colocated


def _check_planned(ranks: Iterable[int] | None, engine_ranks: int) -> list[int]:
    """Return the inference ranks to plan, all by default. Raises ReshardError for a rank that there is
    not."""
    planned = list(range(engine_ranks)) if ranks is None else sorted(set(ranks))
    if not planned or planned[0] < 0 or planned[-1] >= engine_ranks:
        raise OptionError(
            f"the engine's {engine_ranks} ranks are 0 to {engine_ranks - 1}; asked for {planned}"
        )
    return planned


def _plan_rank(
    rank: int,
    gpus: Sequence[int],
    placement: Placement,
    trainer: "_TrainerShards",
    traffic: "_Traffic",
    relays: "_Relays",
) -> RankForecast:
    """Plan the copies of one inference rank, which is on one of these GPUs in each engine, and count their bytes in
    `traffic` and `relays`."""
    began = time.perf_counter()
    shards = trainer.needed_by(placement)
    plan = make_plan(Placement.of(placement.shapes, (shard.tensor for shard in shards.values())), placement)
    rows, bytes_by_holders = [], Counter[tuple[int, ...]]()
    for t in plan.transfers:
        width = trainer.widths[t.name]
        rows.append(_table_row(t, shards[t.src].tensor.shape, placement.tensors[t.dst].shape, width))
        bytes_by_holders[shards[t.src].ranks] += t.box.volume * width
        relays.add((shards[t.src].ranks, t.name, t.box), t.box.volume * width, rank, gpus)
    bytes_by_distance, partners, gpu = [0, 0, 0, 0], set(), gpus[0]
    for holders, amount in bytes_by_holders.items():
        for of_engine in gpus:
            partner = traffic.partner(holders, of_engine, rank + of_engine - gpu, relays.tp)
            traffic.add(partner, of_engine, amount)
            if of_engine == gpu:
                bytes_by_distance[traffic.distance(gpu, partner)] += amount
                partners.add(partner)
    return RankForecast(
        rank=rank,
        gpu=gpu,
        weight_bytes=sum(bytes_by_distance),
        local_bytes=bytes_by_distance[0] + bytes_by_distance[1],
        host_bytes=bytes_by_distance[2],
        network_bytes=bytes_by_distance[3],
        partners=len(partners),
        transfers=len(rows),
        table_bytes=tile_count(table_of(rows)) * COPY_BYTES,
        plan_seconds=time.perf_counter() - began,
    )


class _Traffic:
    """Bytes in and out of each simulated GPU, over the links of its host and over the network."""

    def __init__(self, gpus: int, gpus_per_host: int) -> None:
        self.gpus_per_host = gpus_per_host
        self.seats = [Seat(gpu, gpu, gpu // gpus_per_host) for gpu in range(gpus)]
        self.links_in, self.links_out, self.network_in, self.network_out = np.zeros((4, gpus), np.int64)

    def nothing(self) -> "_Traffic":
        """Return that of the same GPUs, of no bytes."""
        return _Traffic(len(self.seats), self.gpus_per_host)

    def distance(self, gpu: int, other: int) -> int:
        """Return the distance of two GPUs, see `reshard.refit.routes.distance`."""
        return distance(self.seats[gpu], self.seats[other])

    def add(self, source: int, destination: int, amount: int) -> None:
        """Count bytes that GPU `source` sends to GPU `destination`."""
        hops = self.distance(destination, source)
        if hops == 2:
            self.links_in[destination] += amount
            self.links_out[source] += amount
        elif hops == 3:
            self.network_in[destination] += amount
            self.network_out[source] += amount

    def partner(self, holders: Sequence[int], gpu: int, position: int, tp: int) -> int:
        """Return which of these trainer's ranks an inference rank on a GPU reads from."""
        return holders[nearest(holders, lambda holder: self.distance(gpu, holder), position, tp)]

    def sent(self) -> np.ndarray:
        """Return the bytes that each GPU sends to others."""
        return self.links_out + self.network_out

    def busiest_link(self) -> float:
        """Return the most bytes that a GPU sends or receives within its host."""
        return float(max(self.links_in.max(), self.links_out.max()))

    def busiest_network(self) -> float:
        """Return the most bytes that a GPU sends to other hosts, or receives from there."""
        return float(max(self.network_in.max(), self.network_out.max()))


class _Relays:
    """The pieces that inference ranks, of engines of this tensor parallel size, want alike of the trainer's ranks of
    other hosts, and so pass on."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        # By piece and trainer's rank: its bytes, and the GPUs of each rank that wants it.
        self.wanted: dict[tuple[Piece, int], tuple[int, dict[int, Sequence[int]]]] = {}

    def add(self, piece: Piece, amount: int, rank: int, gpus: Sequence[int]) -> None:
        """Count a piece of so many bytes that a rank wants on these GPUs."""
        far = nearest(piece[0], lambda _: 3, rank % self.tp, self.tp)
        self.wanted.setdefault((piece, far), (amount, {}))[1][rank] = gpus

    def traffic(self, without: _Traffic) -> tuple[_Traffic, int]:
        """Return the bytes of all GPUs, and how many ranks some pass at most; `without` relays they are these."""
        together: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        gpus_of: dict[int, Sequence[int]] = {}
        for ((holders, *_), _), (amount, by_rank) in self.wanted.items():
            together[holders, tuple(by_rank)] += amount
            gpus_of |= by_rank
        relayed, most = without.nothing(), 0
        for (holders, ranks), amount in together.items():
            lines: dict[int, list[int]] = defaultdict(list)
            for rank, gpu in [(one, gpu) for one in ranks for gpu in gpus_of[one]]:
                source = without.partner(holders, gpu, rank % self.tp, self.tp)
                if without.distance(gpu, source) < 3:  # it reads the trainer's memory
                    relayed.add(source, gpu, amount)
                else:
                    lines[source].append(gpu)
            for source, line in lines.items():
                line.sort()
                most = max(most, len(line) - 1)
                for before, gpu in pairwise([source, *line]):
                    relayed.add(before, gpu, amount)
        return relayed, most


class _TrainerShards:
    """The shards of a trainer's ranks, made when a placement needs them. `widths` are the bytes of an element by
    name, `itemsize` of those that are not always fp32."""

    def __init__(self, mapping: ModelParameters, ranks: Ranks, itemsize: int) -> None:
        self.parameters = mapping.parameters
        self.widths = {name: 4 if name in mapping.fp32 else itemsize for name in mapping.shapes}
        self.index_of = {part.name: index for index, p in enumerate(mapping.parameters) for part in p.parts}
        self.ranks = ranks
        self.made: dict[int, list[LiveShard]] = {}

    def needed_by(self, placement: Placement) -> dict[Any, LiveShard]:
        """Return the shards of every parameter that a placement needs a part of, by local tensor."""
        needed = dict.fromkeys(
            self.index_of[part.name] for tensor in placement.tensors.values() for part in tensor.parts
        )
        return {shard.tensor.id: shard for index in needed for shard in self._shards(index)}

    def _shards(self, index: int) -> list[LiveShard]:
        if index not in self.made:
            shards = live_shards(self.ranks, self.parameters[index])
            self.made[index] = [shard._replace(tensor=local_matrix(shard.tensor)) for shard in shards]
        return self.made[index]

    def bytes_of_ranks(self, ranks: int) -> list[int]:
        """Return the bytes of each rank's weights, vocabulary padding left out."""
        total = np.zeros(ranks, np.int64)
        for index in range(len(self.parameters)):
            for shard in self._shards(index):
                size = sum(part.box.volume * self.widths[part.name] for part in shard.tensor.parts)
                total[list(shard.ranks)] += size
        return total.tolist()


def _check_bytes(placement: Placement, itemsize: int, rank: int) -> None:
    """Raise ReshardError if an inference rank would hold more than any GPU."""
    held = {id: prod(tensor.shape) * itemsize for id, tensor in placement.tensors.items()}
    if sum(held.values()) > MAX_RANK_BYTES:
        largest = max(held, key=held.__getitem__)
        raise ReshardError(
            f"the engine's rank {rank} would hold {sum(held.values()):,} bytes of weights, "
            f"{held[largest]:,} of them in {largest[0]}, and no GPU holds more than {MAX_RANK_BYTES:,}: "
            "plan more ranks, or correct the config"
        )


def _checked_ranks_per_stage(
    model: Model, trainer: MegatronLayout, engine: EngineLayout, dp: int | None, cp: int
) -> int:
    """Return the ranks of a pipeline stage of the trainer. Raises ReshardError if a model does not fit a layout,
    or there would be too many ranks."""
    checked_layout(trainer).check(model)
    if not isinstance(engine, VllmLayout | SglangLayout):
        raise OptionError(f"engine is {engine!r:.80}, not a layout such as reshard.VllmLayout(tp=2)")
    engine.check(model)
    ranks = _ranks_per_stage(model, trainer, dp, cp)
    check_number(trainer.pp * ranks, "the number of the trainer's ranks", MAX_RANKS)
    check_number(engine.world_size, "the number of the engine's ranks", MAX_RANKS)
    return ranks


def _ranks_per_stage(model: Model, trainer: MegatronLayout, dp: int | None, cp: int) -> int:
    """Return the ranks of a pipeline stage: TP times GTP times CP times DP, which ETP times EP times their GTP
    divides."""
    if dp is None:
        return lcm(trainer.tp * trainer.gtp * cp, trainer.ranks_per_stage(model))
    ranks = trainer.tp * trainer.gtp * cp * dp
    experts = trainer.ep * trainer.expert_tp * trainer.egtp
    if model.num_experts and ranks % experts:
        gtp, egtp = (f" x {n} {size}" * (size > 1) for n, size in trainer.gtp_sizes.named())
        raise OptionError(
            f"the trainer's tp {trainer.tp}{gtp} x cp {cp} x dp {dp} are {ranks} ranks a pipeline "
            f"stage, which ep {trainer.ep} x etp {trainer.expert_tp}{egtp} do not divide"
        )
    return ranks


def _table_row(t: Transfer, src: tuple[int, ...], dst: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return a row of a copy table, without addresses."""
    rows, width = (t.box.lengths[0], t.box.lengths[1]) if len(t.box.lengths) == 2 else (1, t.box.lengths[0])
    return 0, 0, rows, width * itemsize, src[-1] * itemsize, dst[-1] * itemsize
