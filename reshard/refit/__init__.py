"""Refit: move the weights of a live trainer into a live engine, shard to shard and in place.

No trainer and no engine is known here by name: `reshard.trainers.base` and `reshard.engines.base` have their interfaces.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.extras import importing

if TYPE_CHECKING:
    from reshard.refit.connecting import connect
    from reshard.refit.link import Link, Report
    from reshard.refit.members import Members

_HOMES = {"Link": "link", "Report": "link", "connect": "connecting", "Members": "members"}
__all__ = ["Link", "Members", "Report", "connect"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with importing("megatron"):
            return getattr(import_module(f"reshard.refit.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'reshard.refit' has no attribute {name!r}")
