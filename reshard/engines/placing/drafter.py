"""Where the tensors of a drafter lie that is a model of its own: a trainer says which its checkpoint has
(`reshard.refit.drafter`), and the engine's own loader of the drafter where each of them goes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from reshard.core.errors import ReshardError, listed
from reshard.engines.placing.left_alone import LeftAlone
from reshard.engines.placing.rules import PlacedTensors, place_by_trace
from reshard.engines.tracing.trace import Canonical, Trace
from reshard.engines.tracing.views import StoredViews
from reshard.models.drafters import DRAFTER
from reshard.refit.drafter import DeclaredDrafter


def stored_drafter(declared: DeclaredDrafter) -> Canonical:
    """Return shape and dtype of each tensor of the drafter's checkpoint, as an engine's loader takes them."""
    return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in declared.tensors.items()}


def shared_error(engine: str, names: list[str]) -> ReshardError:
    """Return the error for published tensors of a trainer's drafter that an engine's drafter shares with its model."""
    return ReshardError(
        f"this {engine} has one tensor for its model's and its drafter's {listed(names, 2)}: the drafter's checkpoint "
        f"lacked it, had the model's own when it was loaded, or was not read (load_format='dummy'). The trainer has "
        f"one apart: leave it out if the drafter is to have the model's (WithDrafter(..., without=[{names[0]!r}])), "
        f"or start {engine} with a checkpoint of the drafter that has another"
    )


def check_is_current(
    engine: str, declared: DeclaredDrafter | None, left: LeftAlone, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise ReshardError if a trainer has brought the `tensors` of an engine's drafter, and the last one that connected
    has `declared` none: whoever gets the model from this engine would draft by another drafter."""
    if declared is None and left.were_brought(tensors):
        raise ReshardError(
            f"this {engine} drafts by what a trainer has brought before, and was connected to one without a drafter "
            f"since: an engine that got its weights would draft by another one; wait for what a trainer sends"
        )


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Give a module its own attributes back: loaders of drafters set some, which a trace must not."""
    kept = dict(vars(module))
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(kept)


def place_drafter(
    engine: str,
    module: torch.nn.Module,
    declared: DeclaredDrafter,
    trace: Trace,
    tensors: Mapping[str, torch.Tensor],
) -> PlacedTensors:
    """Return the tensors of a drafter, given the trace of its loader; `tensors` are those that are its own and that a
    checkpoint brings, by the names that the trace has.

    Raises ReshardError for a tensor of the trainer's drafter that the loader passes over, or writes into what the
    drafter shares with the model, and for one of the engine's that is not filled exactly once.
    """
    kind = type(module).__name__
    untaken = sorted(declared.tensors.keys() - {copy.name for copy in trace.copies})
    if untaken:
        raise ReshardError(
            f"{engine}'s {kind} does not take {listed(untaken, 3)} of the trainer's drafter, and would draft by "
            f"another one: leave out what its checkpoint does not have (WithDrafter(..., without=[...]))"
        )
    shared = sorted({copy.name for copy in trace.copies if copy.parameter not in tensors})
    if shared:
        raise shared_error(engine, shared)
    unfilled = sorted(tensors.keys() - {copy.parameter for copy in trace.copies})
    if unfilled:
        raise ReshardError(
            f"this {engine}'s {kind} has {listed(unfilled, 3)}, which the trainer's drafter does not have and a refit "
            f"would not bring: train that too, or start {engine} with a checkpoint of the drafter without it"
        )
    views = StoredViews({DRAFTER + name: shape for name, (shape, _) in declared.tensors.items()})
    named = [copy._replace(name=DRAFTER + copy.name) for copy in trace.copies]
    return place_by_trace(engine, views.of_trace(Trace(named, trace.fills)), views.matrices, tensors)
