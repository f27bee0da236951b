"""Parity: do two systems that hold the same model give the same logprobs?

gate.py        parity(): both systems, the figures, the limits
comparison.py  runs both systems, and the runs that measure their rounding
systems/       transformers, Megatron-Core, vLLM, SGLang
prompts.py     token ids, random or read from a file
metrics.py     the figures of two systems' scores
noise.py       their difference in units of rounding, from runs in fp32
rounding.py    plain weights rounded as an engine with quantized weights rounds
routing.py     the experts that tokens go to
coverage.py    the tensors that no run looked at
limits.py      the largest values that pass
causes/        why two systems differ, and how much of the difference each cause makes
report.py      the result, for people and programs; html.py makes a page of it
divergence.py  the first module whose output differs
rollout/       check_rollout() and RolloutMonitor, for a training run
"""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.parity.gate import parity
    from reshard.parity.limits import Limits, compare_scores
    from reshard.parity.metrics import Metrics, Scores, metrics_of
    from reshard.parity.prompts import random_prompts
    from reshard.parity.report import ParityReport
    from reshard.parity.rollout.check import Verdict, check_rollout
    from reshard.parity.rollout.monitor import RolloutMonitor
    from reshard.parity.rollout.run import read_run
    from reshard.parity.routing import Routing
    from reshard.parity.systems.outputs import scores_of_outputs
    from reshard.parity.systems.sglang import LiveSglang
    from reshard.parity.systems.vllm import LiveVllm

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "parity": "reshard.parity.gate",
            "Limits": "reshard.parity.limits",
            "compare_scores": "reshard.parity.limits",
            "Metrics": "reshard.parity.metrics",
            "Scores": "reshard.parity.metrics",
            "metrics_of": "reshard.parity.metrics",
            "Verdict": "reshard.parity.rollout.check",
            "check_rollout": "reshard.parity.rollout.check",
            "RolloutMonitor": "reshard.parity.rollout.monitor",
            "read_run": "reshard.parity.rollout.run",
            "ParityReport": "reshard.parity.report",
            "random_prompts": "reshard.parity.prompts",
            "Routing": "reshard.parity.routing",
            "LiveSglang": "reshard.parity.systems.sglang",
            "LiveVllm": "reshard.parity.systems.vllm",
            "scores_of_outputs": "reshard.parity.systems.outputs",
        },
        extra="parity",
        needs={"torch": ["LiveSglang", "LiveVllm", "scores_of_outputs"]},
    )
__all__ = [
    "Limits",
    "LiveSglang",
    "LiveVllm",
    "Metrics",
    "ParityReport",
    "RolloutMonitor",
    "Routing",
    "Scores",
    "Verdict",
    "check_rollout",
    "compare_scores",
    "metrics_of",
    "parity",
    "random_prompts",
    "read_run",
    "scores_of_outputs",
]
