"""Estimate the GPU memory of a training layout, and of an RL step on it. Arithmetic only: no torch, no GPU.

`estimate.py` has the call, `report.py` what it returns. `stages.py` adds up a stage: `static.py` has what a rank holds from its
start (exact), `activations.py` what a layer keeps for its backward, `schedule.py` the microbatches
that are alive, `outside.py` bands for the rest. `phases.py` adds an engine for an RL step, `fit.py`
searches the layouts that fit.
"""

import sys
import types
from typing import Any

from reshard.core.deprecated import warn_renamed


class _CallableModule(types.ModuleType):
    """Keeps ``reshard.memory(...)`` working, which was a function before it was a package."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from reshard.memory.estimate import estimate_memory

        warn_renamed("reshard.memory(...)", "reshard.estimate_memory(...)")
        return estimate_memory(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
