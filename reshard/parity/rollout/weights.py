"""What the logprobs of sampled tokens estimate: the KL of the engine's policy and the trainer's, and the importance
weights by which a trainer corrects for it.

The tokens were sampled from the engine's policy q, and p is the trainer's. With r = p / q of a token:

- k1, the mean of -log r, and k3, the mean of r - 1 - log r, estimate KL(q || p) (Schulman 2020, "Approximating KL
  divergence"); k3 is `reshard.parity.Metrics.kl_estimate_reverse`. k1 varies more, and may be below 0.
- k3 - k1 is the mean of r, less 1. Its expectation is 0 if the tokens were sampled from q and q can sample all that p
  can, and only then are both without bias. With top-p or top-k sampling, or logprobs before the temperature, it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.core.errors import OptionError
from reshard.parity.rollout.tokens import Tokens

# Weights that a trainer's correction leaves as they are: verl's `rollout_is_threshold` is 2 by default.
BOUNDS = (0.5, 2.0)


@dataclass(frozen=True)
class Weights:
    """The importance weights r = p_train / p_inference of the tokens, and of samples: the product of their tokens'.

    - `kl_k1`: the mean of -log r, in nats; `ratio_mean`: the mean of r, which is near 1 where the engine gives the
      logprobs of the distribution that it sampled from.
    - `ess`: the effective sample size of the tokens' weights, (sum r)^2 / sum r^2, as a share of the tokens.
    - `ratio_p99`, `ratio_p999`: weights that 99 % and 99.9 % of the tokens do not exceed; `abs_p99`, `abs_p999`: the
      same of the |difference of logprobs|, in nats.
    - `samples`: those with a token that counts; `sample_ess`: the effective size of their weights, as a share of them;
      `sample_below` and `sample_above`: the shares of them whose weight is beyond the bounds.
    - `sample_log_ratio_min`, `sample_log_ratio_max`: logs of the samples' smallest and largest weight, in nats.
    - `sample_mult_prob_error_max`: the largest of the samples' means of exp |difference|.
    """

    kl_k1: float
    ratio_mean: float
    ess: float
    ratio_p99: float
    ratio_p999: float
    abs_p99: float
    abs_p999: float
    samples: int
    sample_ess: float
    sample_below: float
    sample_above: float
    sample_log_ratio_min: float
    sample_log_ratio_max: float
    sample_mult_prob_error_max: float


def weights_of(tokens: Tokens, bounds: Sequence[float] = BOUNDS) -> Weights:
    """Return the figures of a rollout's importance weights.

    >>> logprobs = np.log([0.5, 0.25, 0.5]), np.log([0.25, 0.5, 0.5])
    >>> weights = weights_of(Tokens(*logprobs, np.array([2, 1])))
    >>> round(weights.ratio_mean, 3), round(weights.ess, 3), weights.sample_ess
    (1.167, 0.778, 1.0)
    """
    low, high = checked_bounds(bounds)
    log_ratio = tokens.log_ratio
    counted = tokens.counts > 0
    of_samples = np.bincount(tokens.samples, log_ratio, len(tokens.counts))[counted]
    magnitude = np.abs(log_ratio)
    # "higher" takes a value that occurs, which at least this share of the tokens does not exceed.
    p99, p999 = np.quantile(log_ratio, (0.99, 0.999), method="higher")
    abs_p99, abs_p999 = np.quantile(magnitude, (0.99, 0.999), method="higher")
    with np.errstate(over="ignore"):
        p99, p999 = np.exp((p99, p999))
        ratio_mean = np.exp(log_ratio).mean()
        errors = np.bincount(tokens.samples, np.exp(magnitude), len(tokens.counts))[counted]
    return Weights(
        float(-log_ratio.mean()),
        float(ratio_mean),
        effective_share(log_ratio),
        float(p99),
        float(p999),
        float(abs_p99),
        float(abs_p999),
        int(counted.sum()),
        effective_share(of_samples),
        float((of_samples < np.log(low)).mean()),
        float((of_samples > np.log(high)).mean()),
        float(of_samples.min()),
        float(of_samples.max()),
        float((errors / tokens.counts[counted]).max()),
    )


def effective_share(log_weights: np.ndarray) -> float:
    """Return the effective sample size of weights, (sum w)^2 / sum w^2, over their number; weights of any size.

    >>> effective_share(np.zeros(4)), effective_share(np.array([0.0, -2000.0]))
    (1.0, 0.5)
    """
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))


def checked_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of weights. Raises OptionError unless they are two, around 1."""
    values: tuple[Any, ...] = tuple(bounds)
    if len(values) != 2 or not 0 < values[0] <= 1 <= values[1]:
        raise OptionError(f"bounds of {values} hold no weight of 1: give two such as {BOUNDS}")
    return float(values[0]), float(values[1])
