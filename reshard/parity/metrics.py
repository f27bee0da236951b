"""Metrics of the difference between two systems' logprobs of the same tokens, by the names that
trainers use."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.routing import Choices, ExpertGroups, Routing, compare_routing


@dataclass(frozen=True)
class Scores:
    """The scores that a system gives one prompt of n tokens, teacher-forced.

    `logprobs` ``[n - 1]``: of each token after the first, given those before it, in nats. `best`
    ``[n - 1]``: the token that the system finds most likely there. `distributions` ``[positions,
    vocabulary]``: logprobs of all tokens at the first `positions` places, as many as were kept.
    `choices`: the experts that the tokens went to, where they were recorded.
    """

    logprobs: np.ndarray
    best: np.ndarray | None = None
    distributions: np.ndarray | None = None
    choices: Choices | None = None


@dataclass(frozen=True)
class Metrics:
    """The difference between A and B over `tokens` tokens.

    `token_mult_prob_error` is the mean of exp(|logprob A - logprob B|), 1 where they agree. `kl` is
    KL(A || B) over the whole vocabulary, in nats, the mean of the `kl_tokens` positions at which
    both systems gave all logprobs, None without any. `kl_estimate` is the mean of r - 1 - log r
    with r = p_B / p_A, which estimates that KL where the tokens were sampled from A (Schulman 2020,
    "Approximating KL divergence", k3); `kl_estimate_reverse`, with A and B exchanged, estimates
    KL(B || A) where they were sampled from B. `argmax_agreement` is the share of positions at which
    both find the same token most likely. `ratio_*` describe the importance ratios p_A / p_B of the
    tokens.
    """

    tokens: int
    mean_abs: float
    max_abs: float
    token_mult_prob_error: float
    kl: float | None
    kl_tokens: int
    kl_estimate: float
    kl_estimate_reverse: float
    pearson: float
    argmax_agreement: float | None
    ratio_min: float
    ratio_max: float
    ratio_std: float

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def metrics_of(a: Sequence[Scores], b: Sequence[Scores]) -> Metrics:
    """Compare two systems' scores of the same prompts.

    Raises ReshardError, naming prompt and token, if there are fewer logprobs than tokens, a
    logprob is NaN or infinite, or the shapes of a system's scores do not fit together.

    >>> metrics = metrics_of([Scores(np.array([-1.0, -2.0]))], [Scores(np.array([-1.0, -2.5]))])
    >>> metrics.max_abs, metrics.mean_abs
    (0.5, 0.25)
    """
    check_scores(a, b)
    one, two = (np.concatenate([s.logprobs for s in scores]).astype(np.float64) for scores in (a, b))
    if not len(one):
        raise ReshardError("the prompts have no token to predict: give prompts of two tokens or more")
    difference = one - two
    same = [
        x.best == y.best
        for x, y in zip(a, b, strict=True)
        if x.best is not None and y.best is not None and len(x.best)
    ]
    agreement = float(np.mean(np.concatenate(same))) if same else None
    kl, kl_tokens = _kl(a, b)
    with np.errstate(over="ignore"):
        ratio = np.exp(difference)
        error = np.exp(np.abs(difference)).mean()
        estimate, reverse = ((np.exp(x) - 1 - x).mean() for x in (-difference, difference))
    return Metrics(
        len(one),
        float(np.abs(difference).mean()),
        float(np.abs(difference).max()),
        float(error),
        kl,
        kl_tokens,
        float(estimate),
        float(reverse),
        _pearson(one, two),
        agreement,
        float(ratio.min()),
        float(ratio.max()),
        float(ratio.std()),
    )


def routing_of(a: Sequence[Scores], b: Sequence[Scores], model: Model) -> Routing | None:
    """Compare the experts that two systems chose; None if one does not report them, or the model
    has none."""
    one, two = ([s.choices for s in scores if s.choices is not None] for scores in (a, b))
    if len(one) != len(a) or len(two) != len(b) or not one:
        return None
    apart = [np.abs(x.logprobs - y.logprobs) for x, y in zip(a, b, strict=True)]
    return compare_routing(one, two, ExpertGroups(*model.expert_groups), apart)


def check_scores(a: Sequence[Scores], b: Sequence[Scores]) -> None:
    """Raise ReshardError if the scores cannot be compared."""
    if len(a) != len(b):
        raise ReshardError(f"A has scores of {len(a)} prompts, B of {len(b)}")
    if not len(a):
        raise ReshardError("there are no prompts to compare")
    for prompt, pair in enumerate(zip(a, b, strict=True)):
        if len(pair[0].logprobs) != len(pair[1].logprobs):
            raise ReshardError(
                f"prompt {prompt}: A gives {len(pair[0].logprobs)} logprobs, B {len(pair[1].logprobs)}"
            )
        for name, scores in zip("AB", pair, strict=True):
            bad = np.flatnonzero(~np.isfinite(scores.logprobs))
            if len(bad):
                raise ReshardError(
                    f"{name} gives the logprob {scores.logprobs[bad[0]]} for token "
                    f"{bad[0] + 1} of prompt {prompt}"
                )
            count, best, rows = len(scores.logprobs), scores.best, scores.distributions
            if best is not None and len(best) != count:
                raise ReshardError(
                    f"prompt {prompt}: {name} gives {len(best)} best tokens for {count} logprobs"
                )
            if rows is not None and len(rows) > count:
                raise ReshardError(
                    f"prompt {prompt}: {name} gives {len(rows)} distributions for {count} logprobs"
                )
        widths = [scores.distributions.shape[-1] for scores in pair if scores.distributions is not None]
        if len(set(widths)) > 1:
            raise ReshardError(
                f"prompt {prompt}: A gives distributions over a vocabulary of "
                f"{widths[0]} tokens, B of {widths[1]}"
            )


def _kl(a: Sequence[Scores], b: Sequence[Scores]) -> tuple[float | None, int]:
    total, count = 0.0, 0
    for x, y in zip(a, b, strict=True):
        if x.distributions is None or y.distributions is None:
            continue
        n = min(len(x.distributions), len(y.distributions))
        p, q = x.distributions[:n].astype(np.float64), y.distributions[:n].astype(np.float64)
        total, count = total + float((np.exp(p) * (p - q)).sum()), count + n
    return (total / count if count else None), count


def _pearson(one: np.ndarray, two: np.ndarray) -> float:
    """Return the correlation; 1 for equal values, also where they do not vary."""
    if np.array_equal(one, two):
        return 1.0
    x, y = one - one.mean(), two - two.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else 0.0
