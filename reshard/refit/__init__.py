"""Refit: move the weights of a live trainer into a live engine, shard to shard and in place.

No trainer and no engine is known here by name: `reshard.refit.trainer` and `reshard.refit.engine`
have their interfaces.
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.comm.group import RefitGroup
    from reshard.refit.connecting import connect
    from reshard.refit.link import Link
    from reshard.refit.report import RefitReport

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Link": "reshard.refit.link",
            "RefitGroup": "reshard.comm.group",
            "RefitReport": "reshard.refit.report",
            "connect": "reshard.refit.connecting",
        },
        extra="megatron",
        needs={"torch": ["Link", "connect"]},
    )
__all__ = ["Link", "RefitGroup", "RefitReport", "connect"]
