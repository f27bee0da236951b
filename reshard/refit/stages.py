"""Pipeline stages of an engine that serves a model without a mapping table, or a tower beside a language model: nobody
says which tensors a stage should take, so what judges is that each of the tensors is taken by one, and each of a
stage's filled."""

from collections.abc import Mapping, Sequence, Set

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, listed
from reshard.models.model import Model
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import ClassFamily, tower_of
from reshard.refit.agreement import Agreement
from reshard.refit.engine import Engine
from reshard.refit.lora.sides import AdapterEngine
from reshard.refit.protocol.stages import TakenTensors, exchange_taken


def check_stages(
    group: RefitGroup, agreed: Agreement, engine: Engine, model: Model, offered: Set[str] = frozenset()
) -> None:
    """Raise ReshardError for tensors of a model without a mapping table, or of a tower, that no pipeline stage of this
    rank's engine takes; every engine's rank calls this, once it knows what it takes. `offered` are the optional ones
    that trainers have.

    That each of a stage's own tensors is filled, and that an engine without stages takes all, an engine sees by itself.
    Of an adapter nothing is looked at: it goes where the weights below it are.
    """
    names = _of_no_table(model, offered)
    if not names or isinstance(engine, AdapterEngine):
        return
    tensors = engine.placement.tensors.values()
    own = frozenset(part.name for tensor in tensors for part in tensor.parts)
    taken = exchange_taken(
        group, agreed.engines, names, TakenTensors(engine.tp, engine.pp, engine.pp_rank, own & {*names})
    )
    if engine.pp == 1:
        return
    ranks = ranks_of_engine(agreed.engines, taken, group.rank)
    missed = sorted({*names}.difference(*(taken[rank].names for rank in ranks)))
    elsewhere = {name for rank in set(taken).difference(ranks) for name in taken[rank].names}
    if missed and elsewhere.issuperset(missed) and isinstance(model.family, ClassFamily):
        raise ReshardError(
            f"none of the {engine.pp} pipeline stages of this {engine.guard.engine} takes {listed(missed, 3)}, which "
            f"other engines do: experts that data parallel engines share are not supported with pipeline stages where "
            f"a model has no mapping table; start it with one of the two"
        )
    if missed:
        raise ReshardError(
            f"none of the {engine.pp} pipeline stages of this {engine.guard.engine} takes {listed(missed, 3)}, and it "
            f"would serve another model: serve this checkpoint with another engine"
        )


def _of_no_table(model: Model, offered: Set[str]) -> list[str]:
    """Return the published tensors of a model that no table covers, of which the loaders of engines alone say which
    stage takes them: all, or those of the tower that trainers have beside a language model."""
    if isinstance(model.family, ClassFamily):
        return sorted(model.family.saved)
    larger = model.config.get(TAKES_TOWER)
    tower = tower_of(model, larger) if larger else None
    if tower is None or not isinstance(tower.family, ClassFamily):
        return []
    return sorted(tower.family.saved.keys() & offered)


def ranks_of_engine(engines: Sequence[int], taken: Mapping[int, TakenTensors], own: int) -> list[int]:
    """Return which of the engines' ranks are those of one engine with rank `own`: they follow one another, stage by
    stage. Raises ReshardError if they do not."""
    start = 0
    while True:
        tp, pp, _, _ = taken[engines[start]]
        ranks = [*engines[start : start + tp * pp]]
        expected = [(tp, pp, stage) for stage in range(pp) for _ in range(tp)]
        if [taken[rank][:3] for rank in ranks] != expected:
            raise ReshardError(
                f"the ranks of an engine with {pp} pipeline stages do not follow one another, stage by stage, in the "
                f"group, and which of them serve a model together that no mapping table covers, or a tower, is not "
                f"known: number them as the engine does"
            )
        if own in ranks:
            return ranks
        start += len(ranks)
