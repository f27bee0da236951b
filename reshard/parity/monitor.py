"""Watch a training run: compare the logprobs that trainer and inference engine give the same
rollout."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.core.printed import NoTruthValue
from reshard.parity.limits import Limits, compare_scores
from reshard.parity.metrics import Metrics, Scores


@dataclass(frozen=True)
class Verdict(NoTruthValue):
    """The metrics of a rollout (A: trainer, B: inference), and the limits that they exceed."""

    metrics: Metrics
    exceeded: list[str]

    @property
    def ok(self) -> bool:
        """True if every limit holds."""
        return not self.exceeded

    def to_dict(self) -> dict[str, Any]:
        """Return figures for a logger, by name; ``ok`` is 1 or 0."""
        return {name: value for name, value in asdict(self.metrics).items() if value is not None} | {
            "ok": int(self.ok)
        }


def check_rollout(train: Any, inference: Any, mask: Any = None, limits: Limits | None = None) -> Verdict:
    """Compare the logprobs of a rollout's tokens.

    `train` and `inference` are arrays or tensors ``[samples, tokens]`` in nats (or one sample's
    ``[tokens]``, or a list of such); `mask` of the same shape says which tokens count (default:
    all). `limits` default to `Limits.of_rollout()`; for an engine that serves quantized weights
    give ``Limits.of_rollout("fp8")``. They include the KL: the tokens were sampled from the engine,
    so that `kl_estimate_reverse` estimates KL(inference || train).

    Raises ReshardError for shapes that differ, a mask without tokens, and logprobs that are NaN or
    infinite where the mask counts them.

    >>> verdict = check_rollout([[-1.0, -2.0]], [[-1.01, -2.0]])
    >>> verdict.ok, round(verdict.metrics.token_mult_prob_error, 4)
    (True, 1.005)
    """
    one, two = _rows(train), _rows(inference)
    masks = (
        [np.ones(len(row), bool) for row in one]
        if mask is None
        else [row.astype(bool) for row in _rows(mask)]
    )
    shapes = [[row.shape for row in rows] for rows in (one, two, masks)]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise ReshardError(
            f"the trainer's logprobs have shapes {shapes[0]}, the engine's {shapes[1]}, the mask {shapes[2]}"
        )
    a, b = (
        [Scores(row[chosen].astype(np.float64)) for row, chosen in zip(rows, masks, strict=True)]
        for rows in (one, two)
    )
    return Verdict(*compare_scores(a, b, limits or Limits.of_rollout()))


def _rows(values: Any) -> list[np.ndarray]:
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    if isinstance(values, np.ndarray):
        return list(np.atleast_2d(values))
    if isinstance(values, Sequence) and values and not hasattr(values[0], "__len__"):
        return [np.asarray(values)]
    return [
        row.detach().float().cpu().numpy() if hasattr(row, "detach") else np.asarray(row) for row in values
    ]
