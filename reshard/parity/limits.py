"""The largest values of parity's figures that pass, and a sentence for each that is exceeded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.metrics import Metrics, Scores, metrics_of, routing_of
from reshard.parity.noise import Noise
from reshard.parity.routing import Routing

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
        limits = Limits.of_dtype(dtype, **given).with_noise(None)
        if "kl_estimate_reverse" in given:
            return limits
        return replace(limits, kl_estimate_reverse=kl, defaults=limits.defaults | {"kl_estimate_reverse": kl})

    def with_noise(self, noise: Noise | None, margin: float | None = None) -> "Limits":
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

    def exceeded_at_far_positions(self, metrics: Metrics) -> list[str]:
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


def compare_scores(
    a: Sequence[Scores], b: Sequence[Scores], limits: Limits, model: Model | None = None
) -> tuple[Metrics, list[str]]:
    """The metrics of all prompts together, and the limits that they exceed. With `model`, how their experts
    compare is among them."""
    limits.check()
    overall = metrics_of(a, b)
    return overall, limits.exceeded(overall, None if model is None else routing_of(a, b, model))
