"""A worker that hands on what an engine serves, without the engine's own processes."""

from reshard.engines.workers.lending import LendingMethods
from reshard.refit.engine import Engine


class Lender(LendingMethods):
    """The only worker of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def _reshard_engine_side(self) -> Engine:
        return self.engine

    def _reshard_rank(self) -> int:
        return 0
