"""The gate: score the same prompts in two systems, measure, and hold the figures against limits."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from reshard.core.errors import ReshardError
from reshard.core.extras import require
from reshard.engines.vllm.layout import VllmLayout
from reshard.megatron.layout import Layout
from reshard.models.model import Model
from reshard.parity.metrics import Metrics, Scores, metrics_of
from reshard.parity.prompts import SERVED, Prompt, check_prompts, random_prompts
from reshard.parity.routing import Groups, Routing, compare_routing

if TYPE_CHECKING:
    from reshard.parity.systems import System

# Distributions that are kept for the KL over the vocabulary, in bytes of each system.
KEPT_BYTES = 1 << 30


# How to get the figures that are not always there.
_NEEDS = {
    "kl": "it needs the distributions of both systems (Scores.distributions; an engine of your own is "
          "started with max_logprobs=-1), and where there are logprobs only, as of a rollout, limit "
          "mean_abs or token_mult_prob_error instead",
    "argmax_agreement": "it needs the best tokens of both systems (Scores.best), which the logprobs of a "
                        "rollout do not tell",
    "routing_margin": "it needs a model with experts and what both systems chose (Scores.choices; not with "
                      "--no-routing; vLLM tells it on backends that record it), which the logprobs of a "
                      "rollout do not tell",
}  # fmt: skip
LIMITED = ("max_abs", "mean_abs", "token_mult_prob_error", "kl", "argmax_agreement", "routing_margin")


@dataclass(frozen=True)
class Limits:
    """The largest values that pass; None does not limit. `argmax_agreement` is the smallest. `routing_margin`
    limits how far from a tie a token may be that goes to other experts (`reshard.parity.routing`).

    A limit on a figure that was not measured is exceeded. Those in `defaults`, by name and value, hold only
    where it was.

    >>> check = metrics_of([Scores(np.array([-1.0]))], [Scores(np.array([-1.0]))])
    >>> Limits.of_dtype("bf16").exceeded(check), len(Limits.of_dtype("bf16", kl=0.1).exceeded(check))
    ([], 1)
    """

    max_abs: float | None = None
    mean_abs: float | None = None
    token_mult_prob_error: float | None = None
    kl: float | None = None
    argmax_agreement: float | None = None
    routing_margin: float | None = None
    defaults: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of_dtype(dtype: str, **given: float) -> "Limits":
        """The defaults: for fp32 what is left between two implementations, for bf16 less than trainers accept
        (1.05), for an engine that serves quantised weights (``fp8``) what its rounding does to random weights:
        trained ones are nearer. Limits that are `given` replace them."""
        chosen = dict(mean_abs=0.04, token_mult_prob_error=1.04, kl=5e-3, routing_margin=0.3)
        if dtype == "fp8":
            chosen = dict(mean_abs=0.5, token_mult_prob_error=1.7, kl=0.06)
        if dtype == "fp32":
            chosen = dict(
                max_abs=1e-3, mean_abs=1e-4, token_mult_prob_error=1.0001, kl=1e-6, routing_margin=1e-3
            )
        return Limits(
            **chosen | given, defaults={name: value for name, value in chosen.items() if name not in given}
        )

    def to_dict(self) -> dict[str, float | None]:
        """The limits by name."""
        return {name: getattr(self, name) for name in LIMITED}

    def check(self) -> None:
        """Raise ReshardError for a limit that cannot fail, or that nothing can pass."""
        for name, value in self.to_dict().items():
            if value is None:
                continue
            least = {"token_mult_prob_error": 1.0}.get(name, 0.0)
            if (
                not math.isfinite(value)
                or value < least
                or (name == "argmax_agreement" and not 0 < value <= 1)
            ):
                raise ReshardError(
                    f"a limit of {value} on {name} cannot be: give a finite number of at "
                    f"least {least:g}" + (", more than 0 and at most 1" if name == "argmax_agreement" else "")
                )
        if all(value is None for value in self.to_dict().values()):
            raise ReshardError("without any limit the gate cannot fail: give at least one")

    def exceeded(self, metrics: Metrics, routing: Routing | None = None) -> list[str]:
        """A sentence for every limit that the metrics, or the routing, exceed, or on a figure that is not
        there."""
        found = []
        for name, limit, value in self._held_against(metrics, routing):
            if value is None:
                if self.defaults.get(name) != limit:
                    found.append(f"{name} was not measured, the limit is {limit:.6g}: {_NEEDS[name]}")
                continue
            within = value >= limit if name == "argmax_agreement" else value <= limit
            if not within:  # NaN is not
                found.append(f"{name} is {value:.6g}, the limit is {limit:.6g}")
        return found

    def unmeasured(self, metrics: Metrics, routing: Routing | None = None) -> dict[str, str]:
        """By name, a sentence for every default limit on a figure that was not measured."""
        return {name: f"{name} was not measured: "
                      f"{_NEEDS[name]}" for name, limit, value in self._held_against(metrics, routing)
                if value is None and self.defaults.get(name) == limit}  # fmt: skip

    def _held_against(
        self, metrics: Metrics, routing: Routing | None
    ) -> list[tuple[str, float, float | None]]:
        """Name, limit and figure of every limit that there is."""
        values: dict[str, Any] = metrics.to_dict()
        values["routing_margin"] = routing.margin if routing is not None and routing.choices else None
        return [(name, limit, values[name]) for name, limit in self.to_dict().items() if limit is not None]


@dataclass
class ParityReport:
    """Two systems' scores, compared. `noise` has what the same system gives twice and in another dtype, by
    name; `routing` is None where the model has no experts, or a system does not tell which it chose.
    `unmeasured` are sentences on the default limits that had nothing to hold; `quantised` says whether an engine
    served quantised weights, for which `limits` are others."""

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
    unmeasured: list[str] = field(default_factory=list)
    quantised: bool = False

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
            "a": self.a, "b": self.b, "dtype": self.dtype, "quantised": self.quantised, "ok": self.ok,
            "exceeded": self.exceeded, "unmeasured": self.unmeasured, "limits": self.limits.to_dict(), "overall": self.overall.to_dict(),
            "noise": {name: metrics.to_dict() for name, metrics in self.noise.items()},
            "routing": self.routing and self.routing.to_dict(), "prompts": [metrics.to_dict() for metrics in self.prompts],
        }  # fmt: skip


def compare_scores(
    a: Sequence[Scores], b: Sequence[Scores], limits: Limits, model: Model | None = None
) -> tuple[Metrics, list[str]]:
    """The metrics of all prompts together, and the limits that they exceed. With `model`, how their experts
    compare is among them."""
    limits.check()
    overall = metrics_of(a, b)
    return overall, limits.exceeded(overall, None if model is None else routing_of(a, b, model))


def parity(
    a: "str | System",
    b: "str | System",
    prompts: Sequence[Prompt] | int = 8,
    *,
    dtype: str | None = None,
    layout: Layout | None = None,
    engine: VllmLayout | None = None,
    hf_config: str | Path | None = None,
    limits: Limits | Callable[[str], Limits] | None = None,
    lengths: Sequence[int] = (16, 64, 128),
    seed: int = 0,
    batch_size: int = 1,
    packed: bool = False,
    routing: bool = True,
    noise: bool = False,
    quantization: str | None = None,
    exact: bool = False,
) -> ParityReport:
    """Score prompts in two systems and compare.

    `a` and `b` are paths or hub ids: Hugging Face directories, which transformers runs, or Megatron
    checkpoints, which Megatron-Core runs at `layout` (under torchrun, where that has several ranks). With
    ``vllm:`` before it vLLM serves it, at `engine` (default: TP over all processes): a Hugging Face directory
    as vLLM loads it, a Megatron checkpoint by a refit from Megatron-Core. Either may also be a
    `reshard.parity.LiveVllm`. `prompts` are token ids, or how many random ones to make; `batch_size` of them
    go together, padded, or `packed` into one sequence. `dtype` is ``fp32`` (default without a GPU) or
    ``bf16``; `limits` may be a function of it, or of ``fp8`` where an engine serves quantised weights.
    `quantization` is what vLLM is started with (beside what a config says), and `exact` rounds in a refit as
    vLLM's own loading does. `routing` compares the experts that tokens go to. With `noise`
    A is also scored again, and in the other dtype.

    Raises ReshardError where a system cannot be loaded, the two do not have the same vocabulary, a prompt
    does not fit, or logprobs are missing, NaN or infinite.
    """
    require("parity", "torch")
    import torch
    import torch.distributed as dist

    from reshard.parity.opening import is_megatron, open_system
    from reshard.parity.systems import DTYPES, Scoring, System, join_processes, scores_of

    dtype = dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if dtype not in DTYPES:
        raise ReshardError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if quantization is not None and not any(_is_started(side) for side in (a, b)):
        raise ReshardError(f"quantization {quantization} is for a system with vllm: before it: neither has")
    if exact and not any(_is_started(side) and is_megatron(side) for side in (a, b)):
        raise ReshardError(
            "exact is for a vLLM that is refitted, vllm: and a Megatron checkpoint: neither system is one"
        )
    layout = layout or Layout()
    plain = _limits(limits or Limits.of_dtype, dtype)
    rounded = plain
    if not all(isinstance(side, str) and not _is_started(side) for side in (a, b)):
        with suppress(KeyError):  # limits of one's own may know dtypes only
            rounded = _limits(limits or Limits.of_dtype, "fp8")
    join_processes()
    where = Path(hf_config) if hf_config is not None else None
    runs: dict[str, list[Scores]] = {}
    names: dict[str, str] = {}
    # What is scored, in this order: its name, the system, the dtype.
    wanted: list[tuple[str, str | System, str]] = [("a", a, dtype)]
    if noise:
        wanted.append(("A again", a, dtype))
    if noise and isinstance(a, str):  # a system that is running already has one dtype
        wanted.append((f"A in {_other(dtype)}", a, _other(dtype)))
    wanted.append(("b", b, dtype))
    first: Model | None = None
    quantised = False
    tokens = list[Prompt]()
    for name, spec, kind in wanted:
        if quantised and kind != dtype:
            continue  # vLLM quantises what is in bf16
        system = (
            spec
            if isinstance(spec, System)
            else open_system(spec, kind, layout, where, engine, quantization, exact)
        )
        with closing(system):
            model, context = system.model, int(system.model.config["max_position_embeddings"])
            size = model.symbols["V"]
            if isinstance(prompts, int):
                prompts = random_prompts(prompts, size, [min(n, context) for n in lengths], seed)
            tokens, first = list(prompts), first or model
            _check_same(first, model)
            check_prompts(tokens, size, context)
            how = Scoring(batch_size, packed, KEPT_BYTES // (4 * size), routing and model.num_experts > 0)
            runs[name], names[name] = scores_of(system, tokens, how), system.name
            quantised |= system.quantised
    assert first is not None
    overall = metrics_of(runs["a"], runs["b"])
    routed = routing_of(runs["a"], runs["b"], first)
    each = [metrics_of([x], [y]) for x, y in zip(runs["a"], runs["b"], strict=True)]
    floor = {name: metrics_of(runs["a"], scores) for name, scores in runs.items() if name not in ("a", "b")}
    one, two = ([replace(s, distributions=None) for s in runs[name]] for name in ("a", "b"))
    limits = rounded if quantised else plain
    exceeded, unmeasured = limits.exceeded(overall, routed), limits.unmeasured(overall, routed)
    if not first.num_experts:
        unmeasured.pop("routing_margin", None)
    return ParityReport(
        names["a"],
        names["b"],
        dtype,
        overall,
        each,
        limits,
        exceeded,
        floor,
        routed,
        one,
        two,
        tokens,
        dist.get_rank() == 0,
        list(unmeasured.values()),
        quantised,
    )


def _is_started(side: "str | System") -> TypeGuard[str]:
    return isinstance(side, str) and side.startswith(SERVED)


def _limits(limits: Limits | Callable[[str], Limits], kind: str) -> Limits:
    """Those for fp32, bf16 or fp8. Raises ReshardError where they cannot fail, or are none."""
    found = limits if isinstance(limits, Limits) else limits(kind)
    if not isinstance(found, Limits):
        raise ReshardError(f"limits gives a {type(found).__name__} for {kind}, not reshard.parity.Limits")
    found.check()
    return found


def _check_same(first: Model, model: Model) -> None:
    """Raise ReshardError where two systems cannot hold the same model."""
    one, other = first.family.architecture, model.family.architecture
    if one != other:
        raise ReshardError(f"A is a {one}, B a {other}: they do not hold the same model")
    if first.symbols["V"] != model.symbols["V"]:
        raise ReshardError(
            f"A has a vocabulary of {first.symbols['V']} tokens, B of {model.symbols['V']}: "
            f"they do not hold the same model"
        )


def routing_of(a: Sequence[Scores], b: Sequence[Scores], model: Model) -> Routing | None:
    """How the experts compare that two systems chose; None where one does not tell, or the model has none."""
    one, two = ([s.choices for s in some if s.choices is not None] for some in (a, b))
    if len(one) != len(a) or len(two) != len(b) or not one:
        return None
    apart = [np.abs(x.logprobs - y.logprobs) for x, y in zip(a, b, strict=True)]
    return compare_routing(one, two, Groups(*model.expert_groups), apart)


def _other(dtype: str) -> str:
    return "bf16" if dtype == "fp32" else "fp32"
