"""reshard: the same weights in Hugging Face, Megatron-Core and vLLM, moved exactly and fast.

The calls of the command line, as a library. Importing the package imports neither torch nor numpy.

>>> import reshard
>>> reshard.hf_to_mcore("Qwen3-30B-A3B", "mcore", reshard.Layout(tp=4, pp=2, ep=4))  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.compare import check, diff
    from reshard.convert import hf_to_mcore, mcore_to_hf
    from reshard.errors import ReshardError
    from reshard.inspection import inspect
    from reshard.layout import Layout
    from reshard.refit.forecast import plan_refit
    from reshard.sources import read_model
    from reshard.vllm_layout import VllmLayout

_HOMES = {
    "hf_to_mcore": "convert", "mcore_to_hf": "convert", "inspect": "inspection", "diff": "compare", "check": "compare",
    "Layout": "layout", "ReshardError": "errors", "VllmLayout": "vllm_layout", "plan_refit": "refit.forecast", "read_model": "sources",
}  # fmt: skip
__all__ = ["Layout", "ReshardError", "VllmLayout", "check", "diff", "hf_to_mcore", "inspect", "mcore_to_hf", "plan_refit", "read_model"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"reshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")
