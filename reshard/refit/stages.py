"""Pipeline stages of an engine that serves a model without a mapping table: nobody says which tensors a stage should
take, so what judges is that each of the model's tensors is taken by one, and each of a stage's filled."""

from collections.abc import Mapping, Sequence

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, listed
from reshard.models.model import Model
from reshard.models.without_table import ClassFamily
from reshard.refit.agreement import Agreement
from reshard.refit.engine import Engine
from reshard.refit.lora.sides import AdapterEngine
from reshard.refit.protocol.stages import TakenTensors, exchange_taken


def check_stages(group: RefitGroup, agreed: Agreement, engine: Engine, model: Model) -> None:
    """Raise ReshardError for tensors of a model without a mapping table that no pipeline stage of this rank's engine
    takes; every engine's rank calls this, once it knows what it takes.

    That each of a stage's own tensors is filled, and that an engine without stages takes all, an engine sees by itself.
    Of an adapter nothing is looked at: it goes where the weights below it are.
    """
    if not isinstance(model.family, ClassFamily) or isinstance(engine, AdapterEngine):
        return
    names = sorted(model.family.saved)
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
    if missed and elsewhere.issuperset(missed):
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
                f"group, and which of them serve a model without a mapping table together is not known: number them as "
                f"the engine does"
            )
        if own in ranks:
            return ranks
        start += len(ranks)
