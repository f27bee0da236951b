"""The gate: score the same prompts in two systems, measure, and hold the figures against limits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.errors import ReshardError
from reshard.layout import Layout
from reshard.model import Model
from reshard.parity.metrics import Metrics, Scores, metrics_of
from reshard.parity.prompts import Prompt, check_prompts, random_prompts
from reshard.parity.routing import Groups, Routing, compare_routing
from reshard.vllm_layout import VllmLayout

if TYPE_CHECKING:
    from reshard.parity.systems import System

# Distributions that are kept for the KL over the vocabulary, in bytes of each system.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """The largest values that pass; None does not limit. `argmax_agreement` is the smallest. `routing_margin` limits how far from a tie
    a token may be that goes to other experts (`reshard.parity.routing`)."""

    max_abs: float | None = None
    mean_abs: float | None = None
    token_mult_prob_error: float | None = None
    kl: float | None = None
    argmax_agreement: float | None = None
    routing_margin: float | None = None

    @staticmethod
    def of_dtype(dtype: str) -> "Limits":
        """The defaults: for fp32 what is left between two implementations, for bf16 less than trainers accept (1.05)."""
        if dtype == "fp32":
            return Limits(max_abs=1e-3, mean_abs=1e-4, token_mult_prob_error=1.0001, kl=1e-6, routing_margin=1e-3)
        return Limits(mean_abs=0.04, token_mult_prob_error=1.04, kl=5e-3, routing_margin=0.3)

    def check(self) -> None:
        """Raise ReshardError for a limit that cannot fail, or that nothing can pass."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            least = {"token_mult_prob_error": 1.0}.get(field.name, 0.0)
            if not math.isfinite(value) or value < least or (field.name == "argmax_agreement" and not 0 < value <= 1):
                raise ReshardError(f"a limit of {value} on {field.name} cannot be: give a finite number of at least {least:g}"
                                   + (", more than 0 and at most 1" if field.name == "argmax_agreement" else ""))  # fmt: skip
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise ReshardError("without any limit the gate cannot fail: give at least one")

    def exceeded(self, metrics: Metrics, routing: Routing | None = None) -> list[str]:
        """A sentence for every limit that the metrics, or the routing, exceed."""
        found = []
        values = metrics.to_dict() | {"routing_margin": None if routing is None else routing.margin}
        for field in fields(self):
            limit, value = getattr(self, field.name), values[field.name]
            if limit is None or value is None:
                continue
            over = value < limit if field.name == "argmax_agreement" else not value <= limit
            if over:
                found.append(f"{field.name} is {value:.6g}, the limit is {limit:.6g}")
        return found


@dataclass
class ParityReport:
    """Two systems' scores, compared. `noise` has what the same system gives twice and in another dtype, by name;
    `routing` is None where the model has no experts, or a system does not tell which it chose."""

    a: str
    b: str
    dtype: str
    overall: Metrics
    prompts: list[Metrics]
    limits: Limits
    exceeded: list[str]
    noise: dict[str, Metrics]
    routing: Routing | None
    scores_a: list[Scores]
    scores_b: list[Scores]
    tokens: list[Prompt]
    first_process: bool = True

    @property
    def ok(self) -> bool:
        """Whether every limit holds."""
        return not self.exceeded

    @property
    def worst(self) -> int:
        """The prompt with the largest mean |difference|."""
        return max(range(len(self.prompts)), key=lambda i: self.prompts[i].mean_abs)

    @property
    def worst_prompt(self) -> Prompt:
        """Its tokens."""
        return self.tokens[self.worst]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``; without the scores themselves."""
        return {
            "a": self.a, "b": self.b, "dtype": self.dtype, "ok": self.ok, "exceeded": self.exceeded, "limits": asdict(self.limits),
            "overall": self.overall.to_dict(), "noise": {name: metrics.to_dict() for name, metrics in self.noise.items()},
            "routing": self.routing and self.routing.to_dict(), "prompts": [metrics.to_dict() for metrics in self.prompts],
        }  # fmt: skip


def compare_scores(a: Sequence[Scores], b: Sequence[Scores], limits: Limits) -> tuple[Metrics, list[str]]:
    """The metrics of all prompts together, and the limits that they exceed."""
    limits.check()
    overall = metrics_of(a, b)
    return overall, limits.exceeded(overall)


def parity(a: "str | System", b: "str | System", prompts: Sequence[Prompt] | int = 8, *, dtype: str | None = None,
           layout: Layout | None = None, engine: VllmLayout | None = None, hf_config: str | Path | None = None,
           limits: Limits | Callable[[str], Limits] | None = None, lengths: Sequence[int] = (16, 64, 128), seed: int = 0,
           batch_size: int = 1, packed: bool = False, routing: bool = True, noise: bool = False) -> ParityReport:  # fmt: skip
    """Score prompts in two systems and compare.

    `a` and `b` are paths or hub ids: Hugging Face directories, which transformers runs, or Megatron checkpoints, which Megatron-Core
    runs at `layout` (under torchrun, where that has several ranks). With ``vllm:`` before it vLLM serves it, at `engine` (default:
    TP over all processes): a Hugging Face directory as vLLM loads it, a Megatron checkpoint by a refit from Megatron-Core. Either may
    also be a `reshard.parity.LiveVllm`. `prompts` are token ids, or how many random ones to make; `batch_size` of them go together,
    padded, or `packed` into one sequence. `dtype` is ``fp32`` (default without a GPU) or ``bf16``; `limits` may be a function of it.
    `routing` compares the experts that tokens go to. With `noise` A is also scored again, and in the other dtype.

    Raises ReshardError where a system cannot be loaded, the two do not have the same vocabulary, a prompt does not fit, or logprobs are
    missing, NaN or infinite.
    """
    import torch
    import torch.distributed as dist

    from reshard.parity.systems import DTYPES, Scoring, System, join_processes, open_system, scores_of

    dtype = dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if dtype not in DTYPES:
        raise ReshardError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    layout, limits = layout or Layout(), limits or Limits.of_dtype
    limits = limits if isinstance(limits, Limits) else limits(dtype)
    limits.check()
    join_processes()
    where = Path(hf_config) if hf_config is not None else None
    runs: dict[str, list[Scores]] = {}
    names: dict[str, str] = {}
    wanted: list[tuple[str, str | System, str]] = [("a", a, dtype), ("b", b, dtype)]
    if noise:
        wanted[1:1] = [("A again", a, dtype)] + ([(f"A in {_other(dtype)}", a, _other(dtype))] if isinstance(a, str) else [])
    first: Model | None = None
    tokens = list[Prompt]()
    for name, spec, kind in wanted:
        system = spec if isinstance(spec, System) else open_system(spec, kind, layout, where, engine)
        model, context = system.model, int(system.model.config["max_position_embeddings"])
        size = model.symbols["V"]
        if isinstance(prompts, int):
            prompts = random_prompts(prompts, size, [min(n, context) for n in lengths], seed)
        tokens, first = list(prompts), first or model
        _check_same(first, model)
        check_prompts(tokens, size, context)
        how = Scoring(batch_size, packed, KEPT_BYTES // (4 * size * len(tokens)), routing and model.num_experts > 0)
        runs[name], names[name] = scores_of(system, tokens, how), system.name
        system.close()
    assert first is not None
    overall = metrics_of(runs["a"], runs["b"])
    routed = routing_of(runs["a"], runs["b"], first)
    each = [metrics_of([x], [y]) for x, y in zip(runs["a"], runs["b"], strict=True)]
    floor = {name: metrics_of(runs["a"], scores) for name, scores in runs.items() if name not in ("a", "b")}
    one, two = ([replace(s, distributions=None) for s in runs[name]] for name in ("a", "b"))
    exceeded = limits.exceeded(overall, routed)
    return ParityReport(
        names["a"], names["b"], dtype, overall, each, limits, exceeded, floor, routed, one, two, tokens, dist.get_rank() == 0
    )


def _check_same(first: Model, model: Model) -> None:
    """Raise ReshardError where two systems cannot hold the same model."""
    one, other = first.family.architecture, model.family.architecture
    if one != other:
        raise ReshardError(f"A is a {one}, B a {other}: they do not hold the same model")
    if first.symbols["V"] != model.symbols["V"]:
        raise ReshardError(f"A has a vocabulary of {first.symbols['V']} tokens, B of {model.symbols['V']}: they do not hold the same model")


def routing_of(a: Sequence[Scores], b: Sequence[Scores], model: Model) -> Routing | None:
    """How the experts compare that two systems chose; None where one does not tell, or the model has none."""
    one, two = ([s.choices for s in some if s.choices is not None] for some in (a, b))
    if len(one) != len(a) or len(two) != len(b) or not one:
        return None
    apart = [np.abs(x.logprobs - y.logprobs) for x, y in zip(a, b, strict=True)]
    total, chosen = (int(model.config.get(key) or 1) for key in ("n_group", "topk_group"))
    return compare_routing(one, two, Groups(total, chosen), apart)


def _other(dtype: str) -> str:
    return "bf16" if dtype == "fp32" else "fp32"
