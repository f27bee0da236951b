"""vLLM's side of the tables: what each of its ranks holds, as a placement. Pure arithmetic; a live vLLM is asked in `reshard.live`.

vLLM 0.26 fuses rows of a table that share a vLLM parameter, in table order: the rank's queries, its keys, its values; its gate
rows, its up rows. Linear layers are split over TP as Megatron's are; key and value heads are repeated where TP exceeds them;
the vocabulary is padded to a multiple of 64 and then split. Experts are one ``[experts, rows, columns]`` tensor, split over
TP times DP, or, with expert parallelism, handed out whole.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.boxes import Box, whole
from reshard.errors import ReshardError
from reshard.model import Model
from reshard.placement import LocalTensor, Part, Placement
from reshard.tables import Row

VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class VllmLayout:
    """vLLM's parallel sizes: its ``tensor_parallel_size``, ``pipeline_parallel_size``, ``data_parallel_size``,
    ``enable_expert_parallel`` and, with `round_robin`, ``expert_placement_strategy="round_robin"`` (with DP vLLM 0.26 heeds that only
    on the DeepEP low-latency and NIXL backends)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    round_robin: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            if getattr(self, name) < 1:
                raise ReshardError(f"vLLM's {name} is {getattr(self, name)}; sizes start at 1")

    @property
    def world_size(self) -> int:
        """Ranks in all: DP times PP times TP."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        experts = " EP" + " round-robin" * self.round_robin if self.expert_parallel else ""
        sizes = " ".join(f"{name}{n}" for name, n in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp)) if n > 1)
        return (sizes or "TP1") + experts

    def check(self, model: Model) -> None:
        """Raise ReshardError where vLLM would not start at these sizes."""
        heads = model.symbols["NQ"]
        if heads % self.tp:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ReshardError(f"vLLM's tp {self.tp} does not divide {heads} attention heads; sizes that do: {fits}")
        if self.pp > model.num_layers:
            raise ReshardError(f"vLLM's pp {self.pp} is more than the model's {model.num_layers} layers")
        if self.expert_parallel and not model.num_experts:
            raise ReshardError(f"expert parallelism needs experts, which a {model.family.name} model without them does not have")
        if self.expert_parallel and self.tp * self.dp > model.num_experts:
            raise ReshardError(f"vLLM's tp {self.tp} x dp {self.dp} are more ranks than the model's {model.num_experts} experts")
        if self.round_robin and (model.config.get("n_group") or 1) < 2:
            raise ReshardError("vLLM places experts round-robin only where the model has expert groups; it would place them linearly")

    def rank(self, model: Model, rank: int) -> "VllmRank":
        """What one rank holds; TP is the innermost axis, then PP, then DP. Raises ReshardError where a size does not divide."""
        tp_rank, pp_rank, dp_rank = rank % self.tp, rank // self.tp % self.pp, rank // (self.tp * self.pp)
        base, more = divmod(model.num_layers, self.pp)
        # What is left over goes to the stages before the last one.
        counts = [base + (self.pp - 1 - more <= stage < self.pp - 1) for stage in range(self.pp)]
        start = sum(counts[:pp_rank])
        ranks, index, experts = self.tp * self.dp, dp_rank * self.tp + tp_rank, tuple(range(model.num_experts))
        if self.expert_parallel:
            if self.round_robin:
                experts = experts[index::ranks]
            else:
                few, extra = divmod(len(experts), ranks)
                first = index * few + min(index, extra)
                experts = experts[first : first + few + (index < extra)]
            ranks, index = 1, 0
        layers = tuple(range(start, start + counts[pp_rank]))
        everywhere = getattr(model.family.table, "VLLM_ENDS", "") == "every stage"
        first, last = everywhere or pp_rank == 0, everywhere or pp_rank == self.pp - 1
        names = [row.hf for row in model.rows("model") if row.vllm]
        embedding = [n for n in names if n.endswith("embed_tokens.weight") and (first or (last and "tied" in model.flags))]
        outer = frozenset(embedding + [n for n in names if last and not n.endswith("embed_tokens.weight")])
        sequence_parallel = self.expert_parallel and self.tp > 1 and self.dp > 1
        return VllmRank(self.tp, tp_rank, ranks, index, experts, layers, outer, sequence_parallel)


@dataclass(frozen=True)
class VllmRank:
    """One rank: TP, the split of experts (`moe_tp`), the global ids of its experts in their order, its layers, the parameters outside
    the layers that it has, and whether its MoE layers split tokens over TP, so that every rank has all of the shared experts."""

    tp: int
    tp_rank: int
    moe_tp: int
    moe_tp_rank: int
    experts: tuple[int, ...]
    layers: tuple[int, ...]
    outer: frozenset[str]
    sequence_parallel: bool = False


def vllm_placement(model: Model, rank: VllmRank) -> Placement:
    """The parameters of a vLLM rank. A local tensor's id is (parameter, local expert or None); an expert's is one matrix of it.

    Raises ReshardError where a size does not divide.
    """
    found = _Expansion(model, rank)
    for row in model.rows("model"):
        if row.vllm and row.hf in rank.outer:
            found.group("", [row])
    for layer in rank.layers:
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in model.rows("layer", model.kinds[layer]):
            if row.vllm:
                groups[row.hf if row.vllm == "=" else row.vllm].append(row)
        for group in groups.values():
            found.group(f"model.layers.{layer}.", group)
    return Placement.of(found.shapes, found.tensors)


class _Expansion:
    def __init__(self, model: Model, rank: VllmRank) -> None:
        self.model, self.rank = model, rank
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: list[LocalTensor] = []

    def group(self, prefix: str, rows: Sequence[Row]) -> None:
        """The rows of one vLLM parameter."""
        name = prefix + (rows[0].hf if rows[0].vllm == "=" else rows[0].vllm)
        if "{expert}" not in rows[0].hf:
            self.tensor((name, None), [(prefix + row.hf, row) for row in rows])
            return
        for local, expert in enumerate(self.rank.experts):
            self.tensor((name, local), [(prefix + row.hf.replace("{expert}", str(expert)), row) for row in rows])

    def tensor(self, identity: tuple[str, int | None], named: list[tuple[str, Row]]) -> None:
        """One matrix, or vector, that the rows fill one below the other."""
        parts: list[Part] = []
        fills: tuple[Box, ...] = ()
        columns: tuple[int, ...] = ()
        at = 0
        for hf, row in named:
            shape = self.model.shape(row.shape)
            self.shapes[hf] = shape
            box, padding = self.box(row, hf, shape)
            if prod(box.lengths):
                parts.append(Part(hf, box, (at, *(0,) * (len(shape) - 1))))
            at, columns = at + box.lengths[0], box.lengths[1:]
            if padding:
                fills = (Box((at, *(0,) * (len(shape) - 1)), (padding, *shape[1:])),)
                at += padding
        self.tensors.append(LocalTensor(identity, (at, *columns), tuple(parts), fills))

    def box(self, row: Row, hf: str, shape: tuple[int, ...]) -> tuple[Box, int]:
        """The part of a canonical tensor that this rank has, and the rows of padding after it."""
        split = row.split_of("transformer_engine")
        if split is None or (self.rank.sequence_parallel and "shared" in row.conditions):
            return whole(shape), 0
        axis, dim = split
        n, index = (self.rank.moe_tp, self.rank.moe_tp_rank) if axis == "etp" else (self.rank.tp, self.rank.tp_rank)
        if row.arrangement == "vocab":
            padded = -(-shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
            if padded % n:
                raise ReshardError(f"vLLM's tp {n} does not divide the {padded} rows of {hf}")
            rows = padded // n
            start = min(index * rows, shape[0])
            length = min(rows, shape[0] - start)
            return Box((start, 0), (length, shape[1])), rows - length
        if row.arrangement in ("k", "v"):
            heads = self.model.symbols["NKV"]
            if n > heads:
                if n % heads:
                    raise ReshardError(f"vLLM's tp {n} is no multiple of the {heads} key and value heads of {hf}")
                n, index = heads, index // (n // heads)
        if shape[dim] % n:
            raise ReshardError(f"vLLM's {'expert ' * (axis == 'etp')}tp {n} does not divide dim {dim} of {hf}, which is {shape[dim]}")
        offsets, lengths = [0] * len(shape), list(shape)
        lengths[dim] = shape[dim] // n
        offsets[dim] = index * lengths[dim]
        return Box(tuple(offsets), tuple(lengths)), 0
