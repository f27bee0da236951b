"""Live inference engines as destinations of a refit.

Read in this order:

1. `base`: `Engine`, what an engine has to give (its config, its TP size, its placement, where the
   tensors lie, a guard), and what has defaults.
2. `guard`: refuses to serve weights that are not whole.
3. `trace`: records what an engine's own loader would write where; `deduplicated` does so for one
   of many layers that are loaded alike.
4. `rules`: makes a placement of that record, or holds rules of one's own against it.
5. `accounts`: refuses tensors that a refit neither brings nor leaves alone for a named reason.
6. `vllm/`: all of this for vLLM.

None of these but the last knows an engine by name. Another engine, such as SGLang, is a package
beside ``vllm/``: a subclass of `Engine` that uses 2 to 5, its own layout, and its way into the
engine's processes. What its names are is kept there, not in the mapping tables.
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.worker import RefitExtension

__all__ = ["RefitExtension", "VllmModel"]
__getattr__ = lazy(
    __name__,
    {"RefitExtension": "reshard.engines.vllm.worker", "VllmModel": "reshard.engines.vllm.live"},
    extra="vllm",
)
