"""Refit: move the weights of a live Megatron model into a live vLLM, shard to shard and in place."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.refit.forecast import Forecast, plan_refit
    from reshard.refit.link import Link, Report, connect
    from reshard.refit.members import Members

_HOMES = {"Link": "link", "Report": "link", "connect": "link", "Members": "members", "Forecast": "forecast", "plan_refit": "forecast"}
__all__ = ["Forecast", "Link", "Members", "Report", "connect", "plan_refit"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"reshard.refit.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'reshard.refit' has no attribute {name!r}")
