"""The gate: score the same prompts in two systems, measure, and hold the figures against limits."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from reshard.core.errors import ReshardError
from reshard.core.extras import require
from reshard.engines.vllm.layout import VllmLayout
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model
from reshard.parity.configs import config_differences, sentences_on
from reshard.parity.metrics import Metrics, Scores, metrics_of, routing_of
from reshard.parity.noise import BOTH_IN_FP32, Noise
from reshard.parity.prompts import SERVED, Prompt, Reach, check_prompts, random_prompts, reach_of
from reshard.parity.routing import Routing

if TYPE_CHECKING:
    from reshard.parity.systems import System


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
    "noise_ratio": "it needs a system that is a path, which can be run in fp32 too (not with --no-noise)",
}  # fmt: skip
LIMITED = ("max_abs", "mean_abs", "token_mult_prob_error", "kl", "argmax_agreement", "routing_margin", "noise_ratio",
           "kl_estimate_reverse")  # fmt: skip
# Of the defaults those that are a guess at rounding, and give way where that was measured.
GUESSED = ("max_abs", "mean_abs", "token_mult_prob_error", "kl")
# A token may go to other experts so many times further from a tie than by the rounding of one system alone.
MARGINS = 3.0


@dataclass(frozen=True)
class Limits:
    """The largest values that pass; None does not limit. `argmax_agreement` is the smallest. `routing_margin`
    limits how far from a tie a token may be that goes to other experts (`reshard.parity.routing`), `noise_ratio` the
    difference in units of the rounding that was measured (`reshard.parity.noise`), `kl_estimate_reverse` a rollout's KL.

    A limit on a figure that was not measured is exceeded. Those in `defaults`, by name and value, hold only
    where it was.

    >>> import numpy as np
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
    noise_ratio: float | None = None
    kl_estimate_reverse: float | None = None
    defaults: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of_dtype(dtype: str, **given: float) -> "Limits":
        """The defaults: for fp32 what is left between two implementations; for bf16, and for an engine that serves
        quantized weights (``fp8``), a multiple of the rounding that is measured, and where it cannot be, absolute
        limits that leave room for trained models. Limits that are `given` replace them."""
        chosen = dict(mean_abs=0.15, token_mult_prob_error=1.2, kl=0.02, routing_margin=0.3, noise_ratio=1.5)
        if dtype == "fp8":
            chosen = dict(mean_abs=0.5, token_mult_prob_error=1.7, kl=0.06, noise_ratio=2.0)
        if dtype == "fp32":
            chosen = dict(
                max_abs=1e-3, mean_abs=1e-4, token_mult_prob_error=1.0001, kl=1e-6, routing_margin=1e-3
            )
        return Limits(
            **chosen | given, defaults={name: value for name, value in chosen.items() if name not in given}
        )

    @staticmethod
    def of_rollout(dtype: str = "bf16", **given: float) -> "Limits":
        """The defaults for a rollout, of which there are the logprobs of sampled tokens alone: absolute limits that leave
        room for trained models, by the engine's dtype or ``fp8``."""
        kl = {"fp32": 1e-6, "bf16": 0.01, "fp8": 0.06}[dtype]
        limits = Limits.of_dtype(dtype, **given).given_noise(None)
        if "kl_estimate_reverse" in given:
            return limits
        return replace(limits, kl_estimate_reverse=kl, defaults=limits.defaults | {"kl_estimate_reverse": kl})

    def given_noise(self, noise: Noise | None, margin: float | None = None) -> "Limits":
        """These limits where `noise` was measured: the defaults that only guess at it no longer hold, and tokens may
        go to other experts as far from a tie as that explains, of which `margin` was seen. Without it those in units
        of it do not hold."""
        if "noise_ratio" not in self.defaults and self.noise_ratio is None:
            return self
        dropped = (*GUESSED,) if noise is not None else ("noise_ratio",)
        kept = {name: value for name, value in self.defaults.items() if name not in dropped}
        changed: dict[str, Any] = {name: None for name in dropped if name in self.defaults}
        if noise is not None and margin is not None and "routing_margin" in kept:
            kept["routing_margin"] = max(kept["routing_margin"], MARGINS * margin)
            changed["routing_margin"] = kept["routing_margin"]
        return replace(self, **changed, defaults=kept)

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

    def exceeded(
        self, metrics: Metrics, routing: Routing | None = None, noise: Noise | None = None
    ) -> list[str]:
        """A sentence for every limit that the metrics, the routing or the noise exceed, or on a figure that is not
        there."""
        sentences = []
        for name, limit, value in self._held_against(metrics, routing, noise):
            if value is None:
                if self.defaults.get(name) != limit:
                    sentences.append(f"{name} was not measured, the limit is {limit:.6g}: {_NEEDS[name]}")
                continue
            if name == "noise_ratio" and noise is not None:
                sentences += noise.exceeded(limit)
                continue
            within = value >= limit if name == "argmax_agreement" else value <= limit
            if not within:  # NaN is not
                sentences.append(f"{name} is {value:.6g}, the limit is {limit:.6g}")
        return sentences

    def exceeded_far(self, metrics: Metrics) -> list[str]:
        """The same of a prompt at far positions, for which there are differences of logprobs alone."""
        names = ("max_abs", "mean_abs", "token_mult_prob_error")
        kept = {name: getattr(self, name) for name in names}
        return Limits(**kept).exceeded(metrics)

    def unmeasured(
        self, metrics: Metrics, routing: Routing | None = None, noise: Noise | None = None
    ) -> dict[str, str]:
        """By name, a sentence for every default limit on a figure that was not measured."""
        return {
            name: f"{name} was not measured: {_NEEDS[name]}"
            for name, limit, value in self._held_against(metrics, routing, noise)
            if value is None and self.defaults.get(name) == limit
        }

    def _held_against(
        self, metrics: Metrics, routing: Routing | None, noise: Noise | None
    ) -> list[tuple[str, float, float | None]]:
        """Name, limit and figure of every limit that there is."""
        values: dict[str, Any] = metrics.to_dict()
        values["routing_margin"] = routing.margin if routing is not None and routing.choices else None
        values["noise_ratio"] = None if noise is None else noise.ratio
        return [(name, limit, values[name]) for name, limit in self.to_dict().items() if limit is not None]


@dataclass
class ParityReport:
    """Two systems' scores, compared. `noise` has how far a system is from what else was run of its checkpoint,
    by name, as ``A in fp32``; `rounding` is the difference in units of that, None where it was not measured. `routing` is None where the
    model has no experts, or a system does not tell which it chose. `unmeasured` are sentences on the default limits
    that had nothing to hold; `quantized` says whether an engine served quantized weights, for which `limits` are
    others. `fields` are those of the two configs that make two models. `far` is the difference at the far positions of
    `reach`, where both systems took those, and `covered` says how far positions went."""

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
    quantized: bool = False
    rounding: Noise | None = None
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    reach: Reach | None = None
    far: Metrics | None = None
    covered: str = ""

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

    @property
    def prompt_to_locate(self) -> tuple[Prompt, tuple[int, ...] | None]:
        """The prompt that shows best where the two depart, and where its tokens stand if not at 0, 1, 2 ..."""
        if self.reach is None or self.far is None or not self.far_only:
            return self.worst_prompt, None
        return self.reach.prompt, self.reach.positions

    @property
    def far_only(self) -> bool:
        """True where only the far positions show a difference: every sentence that is no config's is about them."""
        figures = self.exceeded[len(self.fields) :]
        return bool(figures) and all(sentence.startswith(f"at {self.covered}") for sentence in figures)

    @property
    def columns(self) -> dict[str, Metrics]:
        """What a table shows beside each other, by its head."""
        far = {} if self.far is None else {"at far positions": self.far}
        beside = {
            "both in fp32" if name == BOTH_IN_FP32 else f"{name[0]} to {name}": metrics
            for name, metrics in self.noise.items()
        }
        return {"A to B": self.overall} | far | beside

    @property
    def sentences(self) -> list[str]:
        """What there is to say beside the figures, for people."""
        said = [] if self.rounding is None else [f"rounding: {self.rounding.sentence}"]
        if self.routing is not None:
            said.append(f"routing: {self.routing.sentence}")
        return [*said, *([f"covered: {self.covered}"] if self.covered else [])]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``; without the scores themselves."""
        return {
            "a": self.a, "b": self.b, "dtype": self.dtype, "quantized": self.quantized, "ok": self.ok,
            "exceeded": self.exceeded, "unmeasured": self.unmeasured, "limits": self.limits.to_dict(), "overall": self.overall.to_dict(),
            "noise": {name: metrics.to_dict() for name, metrics in self.noise.items()},
            "rounding": self.rounding and self.rounding.to_dict(), "fields": self.fields,
            "covered": self.covered, "far": self.far and self.far.to_dict(),
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
    layout: MegatronLayout | None = None,
    engine: VllmLayout | None = None,
    hf_config: str | Path | None = None,
    limits: Limits | Callable[[str], Limits] | None = None,
    lengths: Sequence[int] = (16, 64, 128),
    seed: int = 0,
    batch_size: int = 1,
    packed: bool = False,
    routing: bool = True,
    noise: bool | None = None,
    reach: bool = True,
    quantization: str | None = None,
    exact: bool = False,
) -> ParityReport:
    """Score prompts in two systems and compare.

    `a` and `b` are paths or hub ids: Hugging Face directories, which transformers runs, or Megatron
    checkpoints, which Megatron-Core runs at `layout` (under torchrun, where that has several ranks). With
    ``vllm:`` before it vLLM serves it, at `engine` (default: TP over all processes): a Hugging Face directory
    as vLLM loads it, a Megatron checkpoint by a refit from Megatron-Core. Either may also be a
    `reshard.parity.LiveVllm`. `prompts` are token ids, or how many random ones to make; `batch_size` of them
    go together, padded, or `packed` into one sequence. With `reach` one more prompt of a few tokens stands at positions
    as far as the context goes, where both systems take positions. `dtype` is ``fp32`` (default without a GPU) or
    ``bf16``; `limits` may be a function of it, or of ``fp8`` where an engine serves quantized weights.
    `quantization` is what vLLM is started with (beside what a config says), and `exact` rounds in a refit as
    vLLM's own loading does. `routing` compares the experts that tokens go to. What either system rounds is measured
    where the dtype is not fp32, by running its checkpoint there too, unless `noise` is False; where it is True A is also
    scored again, and of fp32 in bf16.

    Raises ReshardError where a system cannot be opened, the two do not have the same vocabulary, a prompt
    does not fit, or logprobs are missing, NaN or infinite.
    """
    require("parity", "torch")
    import torch
    import torch.distributed as dist

    from reshard.parity.opening import is_megatron
    from reshard.parity.scoring import Bench
    from reshard.parity.systems import DTYPES, join_processes

    dtype = dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if dtype not in DTYPES:
        raise ReshardError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if quantization is not None and not any(_is_started(side) for side in (a, b)):
        raise ReshardError(f"quantization {quantization} is for a system with vllm: before it: neither has")
    if exact and not any(_is_started(side) and is_megatron(side) for side in (a, b)):
        raise ReshardError(
            "exact is for a vLLM that is refitted, vllm: and a Megatron checkpoint: neither system is one"
        )
    plain = _limits(limits or Limits.of_dtype, dtype)
    rounded = plain
    if not all(isinstance(side, str) and not _is_started(side) for side in (a, b)):
        with suppress(KeyError):  # limits of one's own may know dtypes only
            rounded = _limits(limits or Limits.of_dtype, "fp8")
    join_processes()
    where = Path(hf_config) if hf_config is not None else None
    bench = Bench(a, b, dtype, layout or MegatronLayout(), where, engine, quantization, exact)
    _check_same(*bench.models)
    fields = config_differences(*bench.models)
    context = min(int(model.config["max_position_embeddings"]) for model in bench.models)
    size = bench.models[0].symbols["V"]
    if isinstance(prompts, int):
        prompts = random_prompts(prompts, size, [min(n, context) for n in lengths], seed)
    tokens = list(prompts)
    check_prompts(tokens, size, context)
    longest = max(map(len, tokens))
    far = reach_of(bench.models[0], longest, seed) if reach else None
    bench.prepare(tokens, far, batch_size, packed, routing)
    bench.score_both()
    if noise:
        bench.score_again()
    noise_wanted = (dtype != "fp32" or bench.quantized) and noise is not False
    measured = bench.measure_noise() if noise_wanted else None
    measured_far = bench.far_noise()
    one, two = bench.runs["A"], bench.runs["B"]
    overall, routed = metrics_of(one, two), routing_of(one, two, bench.models[0])
    each = [metrics_of([x], [y]) for x, y in zip(one, two, strict=True)]
    margins = [routed.margin for routed in bench.routings if routed is not None]
    limits = (rounded if bench.quantized else plain).given_noise(measured, max(margins, default=None))
    unmeasured = limits.unmeasured(overall, routed, measured)
    if not bench.models[0].num_experts:
        unmeasured.pop("routing_margin", None)
    notes = [*unmeasured.values(), *bench.notes]
    if noise_wanted and measured is None:
        notes.append(
            "the limits are absolute ones, since no rounding could be measured: they leave room for any model"
        )
    exceeded = sentences_on(fields) + limits.exceeded(overall, routed, measured)
    if bench.far is not None:
        beyond = limits.exceeded_far(bench.far) if dtype == "fp32" else []
        if measured_far is not None:
            beyond = measured_far.left_in_fp32
        exceeded += [f"at {bench.covered}: {sentence}" for sentence in beyond]
    one, two = ([replace(s, distributions=None) for s in run] for run in (one, two))
    return ParityReport(
        a=bench.names["A"],
        b=bench.names["B"],
        dtype=dtype,
        overall=overall,
        prompts=each,
        limits=limits,
        exceeded=exceeded,
        noise=bench.noise,
        routing=routed,
        scores_a=one,
        scores_b=two,
        tokens=tokens,
        first_process=dist.get_rank() == 0,
        unmeasured=notes,
        quantized=bench.quantized,
        rounding=measured,
        fields=fields,
        reach=bench.reach,
        far=bench.far,
        covered=bench.covered,
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
