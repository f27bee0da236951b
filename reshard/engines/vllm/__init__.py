"""vLLM as the destination of a refit, and vLLM that starts from a Megatron checkpoint.

Read in the order in which things happen:

Start
    `plugin` is what every process of vLLM calls. `load_format/` is ``--load-format reshard``.
    `worker` is mixed into vLLM's workers: from its first line on, layers are made so that they can
    be refitted (`compat`), and `guard` checks each run of the model.

Connect
    `live` is the `Engine`. It asks `weights/` what may be written (`supported`), which rank this is
    (`rank`; what it holds follows from `layout` and `names`, held against the trace of vLLM's
    loader, `stand_ins`), and what becomes of every tensor (`accounts`).

Refit
    Plain weights are written where vLLM serves from. `quantized/` has the rest: a slab for what
    vLLM processes after loading, and what makes codes and scales of plain weights. At the end
    `weights/mla` derives and `weights/kept` restores.

Serve
    `requests/` is where requests enter the engine's core, and where those that may not be served are
    answered; a run of the model that `guard` refuses is the end of the engine.

Names of vLLM that are no part of its interface are in `compat`, `layers`, `requests/`,
`quantized/layers` and `quantized/processing` only. `layout` and `names` import nothing of it: a plan needs no vLLM.
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
