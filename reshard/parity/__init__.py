"""Parity: do two systems that hold the same model give the same logprobs?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.extras import importing

if TYPE_CHECKING:
    from reshard.parity.gate import parity
    from reshard.parity.limits import Limits, compare_scores
    from reshard.parity.metrics import Metrics, Scores, metrics_of
    from reshard.parity.monitor import Verdict, check_rollout
    from reshard.parity.prompts import random_prompts
    from reshard.parity.report import ParityReport
    from reshard.parity.routing import Routing
    from reshard.parity.systems.vllm import LiveVllm, scores_of_outputs

_MODULES = {
    "gate": ("parity",),
    "limits": ("Limits", "compare_scores"),
    "metrics": ("Metrics", "Scores", "metrics_of"),
    "monitor": ("Verdict", "check_rollout"),
    "report": ("ParityReport",),
    "prompts": ("random_prompts",),
    "routing": ("Routing",),
    "systems.vllm": ("LiveVllm", "scores_of_outputs"),
}
__all__ = ["Limits", "LiveVllm", "Metrics", "ParityReport", "Routing", "Scores", "Verdict", "check_rollout", "compare_scores", "metrics_of",
           "parity", "random_prompts", "scores_of_outputs"]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            with importing("parity"):
                return getattr(import_module(f"reshard.parity.{module}"), name)
    raise AttributeError(f"module 'reshard.parity' has no attribute {name!r}")
