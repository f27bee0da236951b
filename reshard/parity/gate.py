"""The gate: score the same prompts in two systems, measure, and hold the figures against limits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError
from reshard.layout import Layout
from reshard.parity.metrics import Metrics, Scores, metrics_of
from reshard.parity.prompts import Prompt, check_prompts, random_prompts

# Distributions that are kept for the KL over the vocabulary, in bytes of each system.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """The largest values that pass; None does not limit. `argmax_agreement` is the smallest."""

    max_abs: float | None = None
    mean_abs: float | None = None
    token_mult_prob_error: float | None = None
    kl: float | None = None
    argmax_agreement: float | None = None

    @staticmethod
    def of_dtype(dtype: str) -> "Limits":
        """The defaults: for fp32 what is left between two implementations, for bf16 less than trainers accept (1.03 to 1.1)."""
        if dtype == "fp32":
            return Limits(max_abs=1e-3, mean_abs=1e-4, token_mult_prob_error=1.0001, kl=1e-6)
        return Limits(mean_abs=0.02, token_mult_prob_error=1.02, kl=1e-3)

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

    def exceeded(self, metrics: Metrics) -> list[str]:
        """A sentence for every limit that `metrics` exceed."""
        found = []
        for field in fields(self):
            limit, value = getattr(self, field.name), getattr(metrics, field.name)
            if limit is None or value is None:
                continue
            over = value < limit if field.name == "argmax_agreement" else not value <= limit
            if over:
                found.append(f"{field.name} is {value:.6g}, the limit is {limit:.6g}")
        return found


@dataclass
class ParityReport:
    """Two systems' scores, compared. `noise` has what the same system gives twice and in another dtype, by name."""

    a: str
    b: str
    dtype: str
    overall: Metrics
    prompts: list[Metrics]
    limits: Limits
    exceeded: list[str]
    noise: dict[str, Metrics]
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
            "prompts": [metrics.to_dict() for metrics in self.prompts],
        }  # fmt: skip


def compare_scores(a: Sequence[Scores], b: Sequence[Scores], limits: Limits) -> tuple[Metrics, list[str]]:
    """The metrics of all prompts together, and the limits that they exceed."""
    limits.check()
    overall = metrics_of(a, b)
    return overall, limits.exceeded(overall)


def parity(a: str, b: str, prompts: Sequence[Prompt] | int = 8, *, dtype: str | None = None, layout: Layout | None = None,
           hf_config: str | Path | None = None, limits: Limits | Callable[[str], Limits] | None = None,
           lengths: Sequence[int] = (16, 64, 128), seed: int = 0,
           batch_size: int = 1, noise: bool = False) -> ParityReport:  # fmt: skip
    """Score prompts in two systems and compare.

    `a` and `b` are paths or hub ids: Hugging Face directories, which transformers runs, or Megatron checkpoints, which Megatron-Core
    runs at `layout` (under torchrun, where that has several ranks). `prompts` are token ids, or how many random ones to make. `dtype` is
    ``fp32`` (default without a GPU) or ``bf16``; `limits` may be a function of it. With `noise` A is
    also scored again, and in the other dtype.

    Raises ReshardError where a system cannot be loaded, the two do not have the same vocabulary, a prompt does not fit, or logprobs are
    missing, NaN or infinite.
    """
    import torch
    import torch.distributed as dist

    from reshard.parity.systems import DTYPES, join_processes, open_system, scores_of

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
    wanted: list[tuple[str, str, str]] = [("a", a, dtype), ("b", b, dtype)]
    if noise:
        wanted[1:1] = [("A again", a, dtype), (f"A in {_other(dtype)}", a, _other(dtype))]
    vocabulary, first_architecture, tokens = 0, "", list[Prompt]()
    for name, spec, kind in wanted:
        system = open_system(spec, kind, layout, where)
        size, context = system.model.symbols["V"], int(system.model.config["max_position_embeddings"])
        if isinstance(prompts, int):
            prompts = random_prompts(prompts, size, [min(n, context) for n in lengths], seed)
        architecture = system.model.family.architecture
        if first_architecture not in ("", architecture):
            raise ReshardError(f"A is a {first_architecture}, B a {architecture}: they do not hold the same model")
        first_architecture = architecture
        if vocabulary and vocabulary != size:
            raise ReshardError(f"A has a vocabulary of {vocabulary} tokens, B of {size}: they do not hold the same model")
        vocabulary = size
        tokens = list(prompts)
        check_prompts(tokens, size, context)
        keep = KEPT_BYTES // (4 * size * len(tokens))
        runs[name], names[name] = scores_of(system, tokens, batch_size, keep), system.name
        system.close()
    overall, exceeded = compare_scores(runs["a"], runs["b"], limits)
    each = [metrics_of([x], [y]) for x, y in zip(runs["a"], runs["b"], strict=True)]
    floor = {name: metrics_of(runs["a"], scores) for name, scores in runs.items() if name not in ("a", "b")}
    one, two = ([replace(s, distributions=None) for s in runs[name]] for name in ("a", "b"))
    first = dist.get_rank() == 0
    return ParityReport(names["a"], names["b"], dtype, overall, each, limits, exceeded, floor, one, two, tokens, first)


def _other(dtype: str) -> str:
    return "bf16" if dtype == "fp32" else "fp32"
