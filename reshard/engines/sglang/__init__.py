"""SGLang as the destination of a refit.

Read in the order in which things happen:

Start
    `plugin` is what every process of SGLang calls. It gives the scheduler the methods of `worker`, and
    puts the checks of `guard` around SGLang's runs and requests. `load` reads a Megatron checkpoint.

Connect
    `live` is the `Engine`. Of `weights/` it asks `supported` what may be written, `rank` which rank this is (what it
    holds follows from `layout` and `names`, held against the trace of SGLang's loader), and refuses a
    model of which SGLang's class does not take every tensor. Stages of a pipeline do so on a thread each
    (`pipeline`).

Refit
    Weights are written where SGLang serves from. At the end `weights/derived` makes anew what SGLang has made
    of them, and the cache of keys and values is flushed.

Names of SGLang that are no part of its interface are in `compat` only. `weights/layout` and `weights/names` import
nothing of it: a plan needs no SGLang.
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.engines.sglang.live import SglangModel

__all__ = ["SglangModel"]
if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__, {"SglangModel": "reshard.engines.sglang.live"}, extra="sglang", needs={"torch": __all__}
    )
