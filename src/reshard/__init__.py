"""reshard: the same weights in Hugging Face, Megatron-Core and vLLM, moved exactly and fast.

The calls of the command line, as a library. Importing the package imports neither torch nor numpy.

>>> import reshard
>>> reshard.hf_to_mcore("Qwen3-30B-A3B", "mcore", reshard.Layout(tp=4, pp=2, ep=4))  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.core.errors import ReshardError
    from reshard.disk.compare import check, diff
    from reshard.disk.convert import hf_to_mcore, mcore_to_hf
    from reshard.disk.inspection import inspect
    from reshard.disk.sources import read_model
    from reshard.engines.vllm.layout import VllmLayout
    from reshard.footprint.estimate import memory
    from reshard.forecast import plan_refit
    from reshard.homes.bridge import AutoBridge
    from reshard.homes.exporting import export
    from reshard.homes.loading import load
    from reshard.homes.offloading import offload, onload
    from reshard.homes.saving import save
    from reshard.megatron.layout import Layout
    from reshard.models.config_fields import ignored_config_fields

_HOMES = {
    "hf_to_mcore": "disk.convert", "mcore_to_hf": "disk.convert", "inspect": "disk.inspection", "diff": "disk.compare",
    "check": "disk.compare", "read_model": "disk.sources", "Layout": "megatron.layout", "VllmLayout": "engines.vllm.layout",
    "plan_refit": "forecast", "ReshardError": "core.errors", "ignored_config_fields": "models.config_fields",
    "AutoBridge": "homes.bridge", "export": "homes.exporting", "load": "homes.loading", "offload": "homes.offloading",
    "onload": "homes.offloading", "save": "homes.saving", "memory": "footprint.estimate",
}  # fmt: skip
__all__ = ["AutoBridge", "Layout", "ReshardError", "VllmLayout", "check", "diff", "export", "hf_to_mcore", "ignored_config_fields",
           "inspect", "load", "mcore_to_hf", "memory", "offload", "onload", "plan_refit", "read_model", "save"]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"reshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")
