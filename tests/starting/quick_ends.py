"""Let vLLM's processes end without a look at all that was imported before they were forked.

To free the memory of an engine its processes unfreeze and collect everything, and so copy it: a third of what
those of a small engine compute, right before they exit.
"""

import gc
from types import SimpleNamespace

from vllm.distributed import parallel_state
from vllm.v1.engine import core
from vllm.v1.worker import gpu_worker

still_frozen = SimpleNamespace(**vars(gc) | {"unfreeze": lambda: None})
for module in (parallel_state, core, gpu_worker):
    if hasattr(module, "gc"):
        module.gc = still_frozen  # type: ignore[attr-defined]
