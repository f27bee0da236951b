"""Compare the logprobs that trainer and inference engine give the same rollout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reshard.core.printed import NoTruthValue, Printed
from reshard.parity.limits import Limits, compare_scores
from reshard.parity.metrics import Metrics, Scores
from reshard.parity.rollout.parts import Parts, part_lines, parts_of
from reshard.parity.rollout.tokens import select
from reshard.parity.rollout.weights import BOUNDS, Weights, weights_of


@dataclass(frozen=True)
class Verdict(NoTruthValue, Printed):
    """The metrics of a rollout (A: trainer, B: inference), and the limits that they exceed; the tokens' importance
    weights, and the parts that groups of tokens have in the difference. `weights` and `parts` are None for a rollout
    that could not be compared (`RolloutMonitor.step`)."""

    metrics: Metrics
    exceeded: list[str]
    weights: Weights | None = None
    parts: Parts | None = None

    @property
    def ok(self) -> bool:
        """True if every limit holds."""
        return not self.exceeded

    def to_dict(self, prefix: str = "") -> dict[str, Any]:
        """Return figures for a logger, by name, after a prefix such as ``rollout/``; ``ok`` is 1 or 0."""
        figures = asdict(self.metrics)
        figures |= {} if self.weights is None else asdict(self.weights)
        figures |= {} if self.parts is None else self.parts.to_dict()
        known = {
            name: value for name, value in figures.items() if value is not None and not math.isnan(value)
        }
        if "kl" not in known:
            known.pop("kl_tokens")
        return {f"{prefix}{name}": value for name, value in (known | {"ok": int(self.ok)}).items()}

    def lines(self) -> Iterator[str]:
        """Return the figures, tables of the parts, and the limits that are exceeded."""
        for name, value in self.to_dict().items():
            if "/" not in name and name != "ok":
                yield f"  {name:<34}{value:>12.6g}"
        for kind, groups in ({} if self.parts is None else self.parts.known()).items():
            yield from part_lines(kind, groups)
        yield "; ".join(self.exceeded) if self.exceeded else "every figure is within its limit"


def check_rollout(
    train: Any,
    inference: Any,
    mask: Any = None,
    limits: Limits | None = None,
    *,
    train_experts: Any = None,
    inference_experts: Any = None,
    versions: Any = None,
    version: int | None = None,
    bounds: Sequence[float] = BOUNDS,
) -> Verdict:
    """Compare the logprobs of a rollout's tokens.

    - `train` and `inference` are arrays or tensors ``[samples, tokens]`` in nats, on any device, or one sample's
      ``[tokens]``, or a list of such.
    - `mask` of the same shape says which tokens count (default: all).
    - `limits` default to `Limits.of_rollout()`; for an engine that serves quantized weights give
      ``Limits.of_rollout("fp8")``. They include the KL: the tokens were sampled from the engine, so that
      `kl_estimate_reverse` estimates KL(inference || train).
    - `train_experts` and `inference_experts` ``[samples, tokens, layers, top k]`` are the experts that both sides chose
      where they computed each logprob, which is at the token before.
    - `versions` are those of the weights that made each token ``[samples, tokens]``, or each sample ``[samples]``;
      `version` is that of the weights that gave `train`.
    - `bounds` are the importance weights between which a trainer's correction changes nothing.

    Raises ReshardError for shapes that differ, a mask without tokens, logprobs that are NaN or infinite where the mask
    counts them, and versions that are newer than the trainer's.

    >>> verdict = check_rollout([[-1.0, -2.0]], [[-1.01, -2.0]])
    >>> verdict.ok, round(verdict.metrics.token_mult_prob_error, 4)
    (True, 1.005)
    >>> verdict = check_rollout([[-1.0], [-2.0]], [[-1.01], [-2.0]], versions=[6, 7], version=7)
    >>> round(verdict.to_dict()["lag_1/mean_abs"], 4), verdict.parts.lag_max
    (0.005, 1)
    """
    tokens = select(
        train,
        inference,
        mask,
        train_experts=train_experts,
        inference_experts=inference_experts,
        versions=versions,
        version=version,
    )
    metrics, exceeded = compare_scores(
        [Scores(tokens.train)], [Scores(tokens.inference)], limits or Limits.of_rollout()
    )
    return Verdict(metrics, exceeded, weights_of(tokens, bounds), parts_of(tokens, bounds))
