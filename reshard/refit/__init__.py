"""Refit: move the weights of a live trainer into a live engine, shard to shard and in place.

No trainer and no engine is known here by name: `reshard.refit.holder` has what both have in common,
`reshard.refit.trainer` and `reshard.refit.engine` what each adds.
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.comm.group import RefitGroup
    from reshard.refit.connecting import connect
    from reshard.refit.link import Link
    from reshard.refit.options import ConnectOptions
    from reshard.refit.reporting.report import RefitReport

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "ConnectOptions": "reshard.refit.options",
            "Link": "reshard.refit.link",
            "RefitGroup": "reshard.comm.group",
            "RefitReport": "reshard.refit.reporting.report",
            "connect": "reshard.refit.connecting",
        },
        extra="megatron",
        needs={"torch": ["ConnectOptions", "Link", "connect"]},
    )
__all__ = ["ConnectOptions", "Link", "RefitGroup", "RefitReport", "connect"]
