"""Parity: do two systems that hold the same model give the same logprobs?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.extras import importing

if TYPE_CHECKING:
    from reshard.parity.gate import Limits, ParityReport, compare_scores, parity
    from reshard.parity.metrics import Metrics, Scores, metrics_of
    from reshard.parity.monitor import Verdict, check_rollout
    from reshard.parity.prompts import random_prompts
    from reshard.parity.routing import Routing
    from reshard.parity.vllm import LiveVllm, scores_of_outputs

_HOMES = {
    "gate": ("Limits", "ParityReport", "compare_scores", "parity"),
    "metrics": ("Metrics", "Scores", "metrics_of"),
    "monitor": ("Verdict", "check_rollout"),
    "prompts": ("random_prompts",),
    "routing": ("Routing",),
    "vllm": ("LiveVllm", "scores_of_outputs"),
}
__all__ = ["Limits", "LiveVllm", "Metrics", "ParityReport", "Routing", "Scores", "Verdict", "check_rollout", "compare_scores", "metrics_of",
           "parity", "random_prompts", "scores_of_outputs"]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            with importing("parity"):
                return getattr(import_module(f"reshard.parity.{home}"), name)
    raise AttributeError(f"module 'reshard.parity' has no attribute {name!r}")
