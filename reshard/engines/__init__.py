"""Live inference engines as destinations of a refit.

Read in this order:

1. `base`: `Engine`, what an engine has to give (its config, its TP size, its placement, where the
   tensors lie, a guard), and what has defaults.
2. `guard`: refuses to serve weights that are not whole.
3. `tracing/`: records what an engine's own loader would write where.
4. `rules`: makes a placement of that record, or holds rules of one's own against it.
5. `accounts`: refuses tensors that a refit neither brings nor leaves alone for a named reason.
6. `names` and `layout`: what an engine calls a model's parameters, and the arithmetic of which boxes
   its ranks hold; neither needs the engine, or torch. `placing` decides for a live rank.
7. `live` and `worker`: following tensors that an engine moves, and the methods that its workers get.
8. `blocks`: where the scales of layers in fp8 blocks lie.
9. `deltas` and `delta_methods`: deltas of a chain, written into a rank, and the workers' methods for it.
10. `checkpoint` and `stored_weights`: a Megatron checkpoint, opened for an engine's own loader.
11. `vllm/` and `sglang/`: all of this for one engine.

None of these but the last knows an engine by name. `tested` holds the versions that such a package was
tested with. Another engine is a package beside them: its names, its layout, a subclass of `LiveEngine`,
and its way into the engine's processes.
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.worker import RefitExtension

__all__ = ["RefitExtension", "VllmModel"]
if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {"RefitExtension": "reshard.engines.vllm.worker", "VllmModel": "reshard.engines.vllm.live"},
        extra="vllm",
        needs={"torch": __all__},
    )
