"""Parity: do two systems that hold the same model give the same logprobs?"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.parity.gate import parity
    from reshard.parity.limits import Limits, compare_scores
    from reshard.parity.metrics import Metrics, Scores, metrics_of
    from reshard.parity.monitor import Verdict, check_rollout
    from reshard.parity.prompts import random_prompts
    from reshard.parity.report import ParityReport
    from reshard.parity.routing import Routing
    from reshard.parity.vllm import LiveVllm, scores_of_outputs

__getattr__ = lazy(
    __name__,
    {
        "parity": "reshard.parity.gate",
        "Limits": "reshard.parity.limits",
        "compare_scores": "reshard.parity.limits",
        "Metrics": "reshard.parity.metrics",
        "Scores": "reshard.parity.metrics",
        "metrics_of": "reshard.parity.metrics",
        "Verdict": "reshard.parity.monitor",
        "check_rollout": "reshard.parity.monitor",
        "ParityReport": "reshard.parity.report",
        "random_prompts": "reshard.parity.prompts",
        "Routing": "reshard.parity.routing",
        "LiveVllm": "reshard.parity.vllm",
        "scores_of_outputs": "reshard.parity.vllm",
    },
    extra="parity",
)
__all__ = ["Limits", "LiveVllm", "Metrics", "ParityReport", "Routing", "Scores", "Verdict", "check_rollout", "compare_scores", "metrics_of",
           "parity", "random_prompts", "scores_of_outputs"]  # fmt: skip
