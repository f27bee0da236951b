"""What is served by an engine that moves weights while it serves, as experts by their load: as a source that is one
only as long as nothing moves."""

from collections.abc import Callable

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.refit.engine import Engine
from reshard.refit.served import ServedWeights


class Unmoved(ServedWeights):
    """What one rank of an engine serves, where it lies now. Made between two of the engine's steps, it follows nothing,
    and so may be read by another thread: the engine's guard ends that, and counts, before anything moves.

    `check_whole` raises ReshardError if the engine serves something that cannot be handed on.
    """

    def __init__(self, engine: Engine, check_whole: Callable[[], None]) -> None:
        engine.refresh_regions()
        self.engine, self.check_whole = engine, check_whole
        self.guard, self.hf_config = engine.guard, engine.hf_config
        self.placement, self.regions, self.scales = engine.placement, engine.regions, engine.scales
        self.staged_rounds, self.moves = engine.staged_rounds, engine.guard.moves

    def check_as_published(self) -> None:
        """Raise ReshardError if what this rank serves was quantized, or cannot be handed on whole."""
        super().check_as_published()
        self.check_whole()

    def check_model(self, model: Model) -> None:
        """Raise ReshardError if the published config that the engine serves is of another model."""
        self.engine.check_model(model)

    def facts(self) -> bytes | None:
        """Return what the engine says of its weights beside them."""
        return self.engine.facts()

    def check_current(self) -> None:
        """Raise ReshardError unless this rank holds whole weights, where they were."""
        super().check_current()
        if self.guard.moves != self.moves:
            raise ReshardError(
                f"this {self.guard.engine} has moved experts by their load (EPLB) since it was to hand them on"
            )
