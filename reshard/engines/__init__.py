"""Live inference engines as destinations of a refit.

Read in this order:

1. `reshard.refit.engine`: `Engine`, what an engine has to give (its config, its TP size, its placement, where
   the tensors lie, a guard), and what has defaults. `reshard.refit.guard` refuses to serve weights that are not
   whole.
2. `layout`: the arithmetic of which boxes its ranks hold; it needs neither the engine nor torch.
3. `tracing/`: records what an engine's own loader would write where.
4. `placing/`: `names` has what an engine calls a model's parameters; `rules` makes a placement of a trace, or
   holds rules of one's own against it; `places` decides for a live rank; `accounts` refuses tensors that a refit
   neither brings nor leaves alone for a named reason; `blocks` has the scales of layers in fp8 blocks.
5. `live`: follows tensors that an engine moves.
6. `workers/`: the methods that an engine's workers get, for refits and for chains.
7. `loading/`: a checkpoint of any format, opened for an engine's own loader.
8. `vllm/` and `sglang/`: all of this for one engine.
9. `together`: several servers, of any kind, that take a version of a chain or none.

None of these but the last two knows an engine by name, except that `workers/` has an option of vLLM's. `tested`
holds the versions that such a package was tested with. Another engine is a package beside them: its names, its
layout, a subclass of `LiveEngine`, and its way into the engine's processes.
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.engines.together import apply_deltas_together
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.worker import RefitExtension

__all__ = ["RefitExtension", "VllmModel", "apply_deltas_together"]
if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "RefitExtension": "reshard.engines.vllm.worker",
            "VllmModel": "reshard.engines.vllm.live",
            "apply_deltas_together": "reshard.engines.together",
        },
        extra="vllm",
        needs={"torch": __all__},
    )
