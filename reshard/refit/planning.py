"""The plan of an inference rank: which boxes of the trainer's it reads, from which ranks, and as
what elements."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Placement
from reshard.core.planner import PlanError, Transfer, make_plan
from reshard.models.config_fields import ENVIRONMENT, ignored
from reshard.refit.codecs import codec_between
from reshard.refit.codecs.places import SHAPE, places_of
from reshard.refit.copying.addresses import NO_SLOT, PART_ROUND, Pieces, staged_rounds_of
from reshard.refit.engine import Engine
from reshard.refit.protocol.held import HeldTensors
from reshard.refit.routes import nearest


def plan_pieces(
    engine: Engine,
    held: Mapping[int, HeldTensors],
    names: Mapping[int, str],
    distances: Mapping[int, int],
    position: int,
    where: str,
) -> dict[int, Pieces]:
    """Return the pieces that an engine's rank needs, by trainer's rank, each from the nearest that holds it.

    `held`, `names` and `distances` are the trainer's ranks', `position` is this rank's among the
    engine's, and `where` names the served model. Raises ReshardError where the trainer does not
    hold what is needed.
    """
    wanted = engine.placement
    sources = Sources.of(
        held,
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
    return {rank: Pieces.of(of_rank, index) for rank, of_rank in copies.items()}


def build_requests(engine: Engine, pieces: Pieces) -> np.ndarray:
    """Return the rows in which a trainer's rank is asked for pieces (`reshard.refit.copying.addresses`)."""
    if not engine.scales and not engine.staged_rounds:
        return pieces.requests
    index, in_parts = pieces.destinations[:, 0], pieces.parts[:, PART_ROUND]
    rounds = np.where(in_parts != NO_SLOT, in_parts, staged_rounds_of(engine)[index])
    return np.concatenate(
        [pieces.requests, pieces.destinations, places_of(engine)[index, SHAPE], rounds[:, None]], 1
    )


def _codecs(engine: Engine, sources: "Sources", where: str) -> dict[tuple[str, Any], int]:
    """Return the codec of each part of each local tensor, by the part's name and the tensor's id. Raises
    ReshardError where the trainer lacks a tensor, or has it in a dtype without a codec to the engine's."""
    lacking, without_codec = [], []
    codecs: dict[tuple[str, Any], int] = {}
    dtypes = {region.tensor.dtype for region in engine.regions.values()}
    names = {dtype: dtype_named(str(dtype)).name for dtype in dtypes}
    for tensor in engine.placement.tensors.values():
        engine_dtype = names[engine.regions[tensor.id].tensor.dtype]
        for part in tensor.parts:
            trainer_dtype = sources.dtypes.get(part.name)
            if trainer_dtype is None:
                lacking.append(part.name)
                continue
            scales = engine.scales.get(tensor.id)
            codec = codec_between(
                trainer_dtype, engine_dtype, scales.rounding if scales is not None else None
            )
            if codec is None:
                without_codec.append(
                    f"{part.name} is {trainer_dtype} in the trainer, but {engine_dtype} in the engine: use "
                    f"{'one dtype for both' if scales is None else 'a trainer with parameters in bf16 or fp32'}"
                )
                continue
            codecs[part.name, tensor.id] = codec
    if lacking:
        absent = sorted(set(lacking))
        fields = sorted(ignored())
        hint = (
            f"; where {listed(fields)} was not ignored yet as one side was made, its tensors may have other names: "
            f"ignore the same in both processes from the start, by {ENVIRONMENT}={','.join(fields)}"
        )
        raise ReshardError(
            f"the trainer's model lacks {len(absent)} parameters that {where} calls for: {listed(absent)}"
            + hint * bool(fields)
        )
    if without_codec:
        raise ReshardError(without_codec[0])
    return codecs


class Replicas(NamedTuple):
    """The id of a local tensor that one or more of a trainer's ranks hold alike."""

    number: int


@dataclass
class Sources:
    """All that a trainer's ranks hold: distinct local tensors, the holders of each as (rank, index
    there), and the dtype of each name."""

    tensors: list[LocalTensor] = field(default_factory=list)
    holders: dict[Replicas, list[tuple[int, int]]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(held_by_rank: Mapping[int, HeldTensors], wanted: set[str], names: Mapping[int, str]) -> "Sources":
        """Put together what the ranks hold of the wanted names. Raises ReshardError where two
        have another dtype."""
        sources = Sources()
        known: dict[tuple, Replicas] = {}
        first: dict[str, int] = {}
        for rank, held in held_by_rank.items():
            for tensor, dtype in zip(held.tensors, held.dtypes, strict=True):
                parts = tuple(part for part in tensor.parts if part.name in wanted)
                if not parts:
                    continue
                for name in {part.name for part in parts}:
                    other = first.setdefault(name, rank)
                    if sources.dtypes.setdefault(name, dtype) != dtype:
                        both = f"{sources.dtypes[name]} and {dtype}"
                        raise ReshardError(
                            f"{names[other]} and {names[rank]} do not agree on the dtype of {name}: {both}"
                        )
                replicas = known.get((tensor.shape, parts))
                if replicas is None:
                    replicas = known[tensor.shape, parts] = Replicas(len(sources.tensors))
                    sources.tensors.append(LocalTensor(replicas, tensor.shape, parts))
                    sources.holders[replicas] = []
                sources.holders[replicas].append((rank, tensor.id))
        return sources
