"""What a training layout, and an RL step on it, needs of each GPU's memory. Arithmetic only: no torch, no GPU.

`estimate.estimate_memory` puts it together: `static.py` what a rank holds from its start (exact), `activations.py` what
a layer keeps for its backward, `schedule.py` which microbatches are alive, `outside.py` what no formula says,
as bands; `phases.py` an RL step with an engine; `fit.py` which layouts fit.
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
