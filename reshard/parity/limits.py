"""The largest values of parity's figures that pass, and a sentence for each that is exceeded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.core.errors import OptionError
from reshard.models.model import Model
from reshard.parity.metrics import Metrics, Scores, metrics_of, routing_of
from reshard.parity.noise import Noise
from reshard.parity.routing import Routing

# What a figure that is not always there needs.
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
# Default limits that guess at rounding; they do not hold where rounding was measured.
ROUNDING_GUESSES = ("max_abs", "mean_abs", "token_mult_prob_error", "kl")
# A token may go to other experts this many times further from a tie than the rounding of one system
# explains.
MARGIN_FACTOR = 3.0
# Random tokens at far positions may have logprobs of -20 and less, where the sums of several ranks,
# which come in another order, round to larger differences: of SmolLM2-135M at TP3 in fp32 up to 8e-4.
FAR_FACTOR = 10.0


@dataclass(frozen=True)
class Limits:
    """The largest values that pass; None does not limit. `argmax_agreement` is the smallest that
    passes.

    `routing_margin` limits how far from a tie a token may be that goes to other experts
    (`reshard.parity.routing`), `noise_ratio` the difference in units of measured rounding
    (`reshard.parity.noise`), `kl_estimate_reverse` the KL of a rollout. A limit on a figure that
    was not measured is exceeded. The limits in `defaults`, by name and value, hold only where their
    figure was measured.

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
        """Return the default limits for a dtype, or for an engine that serves quantized weights
        (``fp8``).

        For fp32 they allow what two implementations differ by; otherwise a multiple of the measured
        rounding, and absolute values, with room for trained models, where none was measured.
        `given` limits replace defaults."""
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
        """Return the default limits for a rollout, which has only the logprobs of sampled tokens:
        absolute values, with room for trained models, for the engine's dtype or ``fp8``."""
        kl = {"fp32": 1e-6, "bf16": 0.01, "fp8": 0.06}[dtype]
        limits = Limits.of_dtype(dtype, **given).with_noise(None)
        if "kl_estimate_reverse" in given:
            return limits
        return replace(limits, kl_estimate_reverse=kl, defaults=limits.defaults | {"kl_estimate_reverse": kl})

    def with_noise(self, noise: Noise | None, margin: float | None = None) -> "Limits":
        """Return the limits that hold for measured rounding, or, where `noise` is None, without it.

        With `noise` the defaults that guess at rounding are dropped, and tokens may go to other
        experts as far from a tie as rounding explains; `margin` is the largest seen. Without it the
        default on `noise_ratio` is dropped."""
        if "noise_ratio" not in self.defaults and self.noise_ratio is None:
            return self
        dropped = ROUNDING_GUESSES if noise is not None else ("noise_ratio",)
        defaults = {name: value for name, value in self.defaults.items() if name not in dropped}
        changed: dict[str, Any] = {name: None for name in dropped if name in self.defaults}
        if noise is not None and margin is not None and "routing_margin" in defaults:
            defaults["routing_margin"] = max(defaults["routing_margin"], MARGIN_FACTOR * margin)
            changed["routing_margin"] = defaults["routing_margin"]
        return replace(self, **changed, defaults=defaults)

    def to_dict(self) -> dict[str, float | None]:
        """Return the limits by name, for ``--json``."""
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
                raise OptionError(
                    f"a limit of {value} on {name} cannot be: give a finite number of at "
                    f"least {least:g}" + (", more than 0 and at most 1" if name == "argmax_agreement" else "")
                )
        if all(value is None for value in self.to_dict().values()):
            raise OptionError("without any limit the gate cannot fail: give at least one")

    def exceeded(
        self, metrics: Metrics, routing: Routing | None = None, noise: Noise | None = None
    ) -> list[str]:
        """Return a sentence for each limit that is exceeded, or whose figure was not measured."""
        sentences = []
        for name, limit, value in self._limited_figures(metrics, routing, noise):
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

    def exceeded_at_far_positions(self, metrics: Metrics) -> list[str]:
        """Return the sentences for a prompt at far positions, for which only differences of
        logprobs are known."""
        names = ("max_abs", "mean_abs", "token_mult_prob_error")
        chosen = {name: getattr(self, name) for name in names}
        if "max_abs" in self.defaults and chosen["max_abs"] is not None:
            chosen["max_abs"] *= FAR_FACTOR
        return Limits(**chosen).exceeded(metrics)

    def unmeasured(
        self, metrics: Metrics, routing: Routing | None = None, noise: Noise | None = None
    ) -> dict[str, str]:
        """Return, by name, a sentence for each default limit whose figure was not measured."""
        return {
            name: f"{name} was not measured: {_NEEDS[name]}"
            for name, limit, value in self._limited_figures(metrics, routing, noise)
            if value is None and self.defaults.get(name) == limit
        }

    def _limited_figures(
        self, metrics: Metrics, routing: Routing | None, noise: Noise | None
    ) -> list[tuple[str, float, float | None]]:
        """Return (name, limit, figure or None) for each limit."""
        values: dict[str, Any] = metrics.to_dict()
        values["routing_margin"] = routing.margin if routing is not None and routing.choices else None
        values["noise_ratio"] = None if noise is None else noise.ratio
        return [(name, limit, values[name]) for name, limit in self.to_dict().items() if limit is not None]


def compare_scores(
    a: Sequence[Scores], b: Sequence[Scores], limits: Limits, model: Model | None = None
) -> tuple[Metrics, list[str]]:
    """Return the metrics of all prompts together, and a sentence for each limit that they exceed.
    With `model` the limit on routing is checked too."""
    limits.check()
    overall = metrics_of(a, b)
    return overall, limits.exceeded(overall, None if model is None else routing_of(a, b, model))
