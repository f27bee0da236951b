"""The parts of a larger model beside its language model, as an engine serves them and transformers has them."""

import logging
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.engines.layout import EngineRank
from reshard.engines.placing.taken import check_all_taken
from reshard.engines.tracing.canonical import canonical_tensors, stored_tensors
from reshard.engines.tracing.trace import Canonical, Trace
from reshard.models.model import Model
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import tower_of

log = logging.getLogger("reshard")


class Tower(NamedTuple):
    """The tensors beside the language model, as a `model` of their own: their published `names`, and the `trace` of
    the engine's loader for them, of which a pipeline stage may take some, or none."""

    model: Model
    names: frozenset[str]
    trace: Trace

    def is_among(self, available: Set[str]) -> bool:
        """Tell whether a trainer that has the `available` tensors has those of the tower. Raises ReshardError if it
        has only some of them."""
        missing = sorted(self.names - available)
        if missing and len(missing) < len(self.names):
            raise ReshardError(
                f"the trainer has a part of what is beside the language model, and not {listed(missing, 3)}"
            )
        return not missing


def find_tower(
    engine: str,
    module: torch.nn.Module,
    model: Model,
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    rank: EngineRank,
    stages: int,
    trace: Callable[[Canonical], Trace],
) -> Tower | None:
    """Return what a refit may bring of the parts of an engine's model beside its language `model`; None if transformers
    has no class that says what they are, and if the engine does not serve all of them as its loader copies them.

    `hf_config` is that of the whole model, `stages` are the engine's pipeline stages, and `trace` is its loader's.
    Whether the stages together take all is judged at connect (`reshard.refit.stages`).
    """
    try:
        tower = tower_of(model, hf_config)
        if tower is None:
            return None
        traced = trace(stored_tensors(tower, dtype))
        check_all_taken(engine, module, tower, rank, traced, stages)
    except ReshardError as error:
        log.info("no refit brings the parts of this %s beside the language model: %s", engine, error)
        return None
    return Tower(tower, frozenset(canonical_tensors(tower, dtype)), traced)


def announced(tower: Tower | None, hf_config: dict[str, Any], stages: int) -> dict[str, Any]:
    """Return the `hf_config` of a larger model as an engine's rank posts it: with what a refit may bring of its `tower`
    there (`reshard.models.towers.TAKES_TOWER`)."""
    if tower is not None:
        return hf_config | {TAKES_TOWER: hf_config if tower.trace.copies else None}
    return hf_config | {TAKES_TOWER: False} if stages > 1 else hf_config
