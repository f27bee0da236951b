"""Parity: do two systems that hold the same model give the same logprobs?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.parity.gate import Limits, ParityReport, compare_scores, parity
    from reshard.parity.metrics import Metrics, Scores, metrics_of
    from reshard.parity.monitor import Verdict, check_rollout
    from reshard.parity.routing import Routing
    from reshard.parity.vllm import LiveVllm, scores_of_outputs

_HOMES = {"Limits": "gate", "ParityReport": "gate", "compare_scores": "gate", "parity": "gate", "Metrics": "metrics", "Scores": "metrics",
          "metrics_of": "metrics", "Verdict": "monitor", "check_rollout": "monitor", "Routing": "routing", "LiveVllm": "vllm",
          "scores_of_outputs": "vllm"}  # fmt: skip
__all__ = ["Limits", "LiveVllm", "Metrics", "ParityReport", "Routing", "Scores", "Verdict", "check_rollout", "compare_scores", "metrics_of",
           "parity", "scores_of_outputs"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"reshard.parity.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'reshard.parity' has no attribute {name!r}")
