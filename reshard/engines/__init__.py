"""Live inference engines as destinations of a refit.

Read in this order:

1. `base`: `Engine`, what an engine has to give (its config, its TP size, its placement, where the
   tensors lie, a guard), and what has defaults.
2. `guard`: refuses to serve weights that are not whole.
3. `trace`: records what an engine's own loader would write where; `deduplicated` does so for one
   of many layers that are loaded alike.
4. `rules`: makes a placement of that record, or holds rules of one's own against it.
5. `accounts`: refuses tensors that a refit neither brings nor leaves alone for a named reason.
6. `names` and `layout`: what an engine calls a model's parameters, and the arithmetic of which boxes
   its ranks hold; neither needs the engine, or torch. `placing` decides for a live rank.
7. `canonical`, `stand_ins` and `live`: the published tensors that its loader takes, what it is traced
   on, and following tensors that it moves.
8. `vllm/`: all of this for vLLM.

None of these but the last knows an engine by name. Another engine is a package beside ``vllm/``: its
names, its layout, a subclass of `LiveEngine`, and its way into the engine's processes.
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
