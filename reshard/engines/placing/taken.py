"""Published tensors that an engine's loader does not take: many loaders pass over names that they do not know, and the
engine would serve another model."""

from collections.abc import Collection, Iterator

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.views import tensor_of
from reshard.engines.layout import WITHOUT_PARAMETER, EngineRank
from reshard.engines.tracing.canonical import canonical_tensors, stored_views
from reshard.engines.tracing.trace import Trace
from reshard.models.model import Block, Model
from reshard.models.without_table import ClassFamily


def check_all_taken(
    engine: str,
    module: torch.nn.Module,
    model: Model,
    rank: EngineRank,
    trace: Trace,
    stages: int,
    added_once: Collection[str] = (),
) -> None:
    """Raise ReshardError for published tensors of this rank's layers that the trace of an engine's loader does not
    have; of a model without a mapping table also for those outside the layers.

    `stages` are the engine's pipeline stages. `added_once` are rows that only some of the ranks have.
    """
    without_table = isinstance(model.family, ClassFamily)
    if without_table and stages > 1:
        return  # all of them are judged together, at connect (`reshard.refit.stages`)
    taken = {copy.name for copy in trace.copies}
    views = stored_views(model, canonical_tensors(model, torch.bfloat16))
    missed = []
    for block in model.blocks():
        if without_table or (not block.mtp and block.layer is not None and block.layer in rank.layers):
            names = _names(block, rank, added_once)
            missed += [name for name in names if tensor_of(views.places[name]) not in taken]
    if missed:
        raise ReshardError(
            f"{engine}'s {type(module).__name__} does not take {listed(missed, 3)}, and would serve another model: "
            f"serve this checkpoint with another engine"
        )


def _names(block: Block, rank: EngineRank, added_once: Collection[str]) -> Iterator[str]:
    for row in block.rows:
        if row.arrangement not in WITHOUT_PARAMETER and row.hf not in added_once:
            for _, name in row.names(block.published, rank.experts):
                yield name
