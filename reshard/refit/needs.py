"""What an inference rank needs of the trainer: which boxes, from which ranks, and as what elements."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Placement
from reshard.core.planner import PlanError, Transfer, make_plan
from reshard.engines.base import Engine
from reshard.refit.addresses import IN_ROUND, NO_SLOT, Pieces, rounds_of
from reshard.refit.codecs import codec_between
from reshard.refit.fp8_blocks.items import SHAPE, places_of
from reshard.refit.protocol.encoding import Held
from reshard.refit.routes import nearest


def needed(
    engine: Engine,
    published: Mapping[int, Held],
    names: Mapping[int, str],
    distances: Mapping[int, int],
    position: int,
    where: str,
) -> dict[int, Pieces]:
    """The pieces that an engine's rank needs, by trainer's rank, each from the nearest that holds it.

    `published`, `names` and `distances` are the trainer's ranks', `position` is this rank's among the engine's, and `where` names the
    served model. Raises ReshardError where the trainer does not hold what is needed.
    """
    wanted = engine.placement
    sources = Sources.of(
        published,
        {part.name for tensor in wanted.tensors.values() for part in tensor.parts},
        names,
    )
    codecs = _codecs(engine, sources, where)
    try:
        plan = make_plan(Placement.of(wanted.shapes, sources.tensors), wanted)
    except PlanError as error:
        raise ReshardError(f"the trainer's shards do not make up the served model: {error}") from error
    copies: dict[int, list[tuple[int, int, Transfer]]] = defaultdict(list)
    choices: dict[tuple[int, ...], int] = {}  # among holders of the same ranks, of which there are few
    for transfer in plan.transfers:
        holders = sources.holders[transfer.src]
        ranks = tuple([rank for rank, _ in holders])
        if ranks not in choices:
            choices[ranks] = nearest(ranks, distances.__getitem__, position, engine.tp)
        rank, shard = holders[choices[ranks]]
        copies[rank].append((shard, codecs[transfer.name, transfer.dst], transfer))
    index = {identity: index for index, identity in enumerate(engine.regions)}
    return {rank: Pieces.of(some, index) for rank, some in copies.items()}


def build_requests(engine: Engine, pieces: Pieces) -> np.ndarray:
    """What a trainer's rank is told of its pieces."""
    if not engine.scales and not engine.staged_rounds:
        return pieces.asked
    index, in_parts = pieces.into[:, 0], pieces.parts[:, IN_ROUND]
    rounds = np.where(in_parts != NO_SLOT, in_parts, rounds_of(engine)[index])
    return np.concatenate([pieces.asked, pieces.into, places_of(engine)[index, SHAPE], rounds[:, None]], 1)


def _codecs(engine: Engine, sources: "Sources", where: str) -> dict[tuple[str, Any], int]:
    """How each part of each local tensor is encoded, by the part's name and the tensor's id. Raises
    ReshardError where the trainer lacks what is wanted, or has it in a dtype that none leads from."""
    lacking, other = [], []
    found: dict[tuple[str, Any], int] = {}
    dtypes = {region.tensor.dtype for region in engine.regions.values()}
    names = {dtype: dtype_named(str(dtype)).name for dtype in dtypes}
    for tensor in engine.placement.tensors.values():
        mine = names[engine.regions[tensor.id].tensor.dtype]
        for part in tensor.parts:
            theirs = sources.dtypes.get(part.name)
            if theirs is None:
                lacking.append(part.name)
                continue
            scales = engine.scales.get(tensor.id)
            codec = codec_between(theirs, mine, scales.rounding if scales is not None else None)
            if codec is None:
                other.append(
                    f"{part.name} is {theirs} in the trainer, but {mine} in the engine: use "
                    f"{'one dtype for both' if scales is None else 'a trainer with parameters in bf16 or fp32'}"
                )
                continue
            found[part.name, tensor.id] = codec
    if lacking:
        absent = sorted(set(lacking))
        raise ReshardError(
            f"the trainer's model lacks {len(absent)} parameters that {where} calls for: {listed(absent)}"
        )
    if other:
        raise ReshardError(other[0])
    return found


class Replicas(NamedTuple):
    """The id of a local tensor that one or more of a trainer's ranks hold alike."""

    number: int


@dataclass
class Sources:
    """All that a trainer's ranks hold: distinct local tensors, who has each (rank, index there), and the
    dtype of each name."""

    tensors: list[LocalTensor] = field(default_factory=list)
    holders: dict[Replicas, list[tuple[int, int]]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(published: Mapping[int, Held], wanted: set[str], names: Mapping[int, str]) -> "Sources":
        """Put together what the ranks have published, as far as it is wanted. Raises ReshardError where two
        have another dtype."""
        found = Sources()
        known: dict[tuple, Replicas] = {}
        first: dict[str, int] = {}
        for rank, held in published.items():
            for tensor, dtype in zip(held.tensors, held.dtypes, strict=True):
                parts = tuple(part for part in tensor.parts if part.name in wanted)
                if not parts:
                    continue
                for name in {part.name for part in parts}:
                    other = first.setdefault(name, rank)
                    if found.dtypes.setdefault(name, dtype) != dtype:
                        both = f"{found.dtypes[name]} and {dtype}"
                        raise ReshardError(
                            f"{names[other]} and {names[rank]} do not agree on the dtype of {name}: {both}"
                        )
                replicas = known.get((tensor.shape, parts))
                if replicas is None:
                    replicas = known[tensor.shape, parts] = Replicas(len(found.tensors))
                    found.tensors.append(LocalTensor(replicas, tensor.shape, parts))
                    found.holders[replicas] = []
                found.holders[replicas].append((rank, tensor.id))
        return found
