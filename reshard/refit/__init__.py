"""Refit: move the weights of a live trainer into a live engine, shard to shard and in place.

No trainer and no engine is known here by name: `reshard.trainers.base` and `reshard.engines.base` have their interfaces.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.deprecated import warn_renamed
from reshard.core.extras import importing

if TYPE_CHECKING:
    from reshard.comm.group import RefitGroup
    from reshard.refit.connecting import connect
    from reshard.refit.link import Link
    from reshard.refit.report import RefitReport

_MODULES = {
    "Link": "reshard.refit.link",
    "RefitGroup": "reshard.comm.group",
    "RefitReport": "reshard.refit.report",
    "connect": "reshard.refit.connecting",
}
_RENAMED = {"Members": "RefitGroup", "Report": "RefitReport"}
__all__ = ["Link", "RefitGroup", "RefitReport", "connect"]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warn_renamed(f"reshard.refit.{name}", f"reshard.refit.{_RENAMED[name]}")
        name = _RENAMED[name]
    if name in _MODULES:
        with importing("megatron"):
            return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'reshard.refit' has no attribute {name!r}")
