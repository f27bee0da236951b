"""The parts that causes have in a difference of two systems' logprobs.

Runs that change one thing at a time lead from A to B. Each scores the same tokens, so that a token's difference is the
sum of those of the steps, and so are the figures: a cause's part of the mean |difference| is the mean of its step times
the sign of the whole, and its part of the KL the mean under A of its step's log ratio. A part below zero makes the
difference smaller.

What of the last step is gone where all tokens stand at one position is the part of positions: of rotary angles, and of
what scales with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from reshard.core.printed import Printed
from reshard.parity.metrics import Scores

CONFIG, WEIGHTS, BATCHING, ROUTING, INDEXING, ROUNDING, POSITIONS, UNEXPLAINED = (
    "config", "weights", "batching", "routing", "indexing", "rounding", "positions", "unexplained",
)  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """A cause's part of the mean |difference| and of the KL, in nats; None where not all of its runs kept
    distributions. `detail` says which fields, tensors or runs."""

    name: str
    mean_abs: float
    kl: float | None
    detail: str = ""


@dataclass
class Causes(Printed):
    """The parts of a difference, which add up to its mean |difference| `mean_abs` and its KL(A || B) `kl`.

    `not_measured` are sentences on causes that could not be told apart from others."""

    mean_abs: float
    kl: float | None
    causes: list[Cause]
    not_measured: list[str] = field(default_factory=list)

    @property
    def shares(self) -> dict[str, float]:
        """Each cause's share of the mean |difference|."""
        return {cause.name: cause.mean_abs / self.mean_abs if self.mean_abs else 0.0 for cause in self.causes}

    def lines(self) -> Iterator[str]:
        """Return a table of the causes."""
        yield f"{'why they differ':<16}{'mean_abs':>12}{'share':>8}{'kl':>12}"
        for cause in self.causes:
            kl = "-" if cause.kl is None else f"{cause.kl:.3g}"
            share = f"{100 * self.shares[cause.name]:.1f} %"
            yield f"  {cause.name:<14}{cause.mean_abs:>12.3g}{share:>8}{kl:>12}  {cause.detail}".rstrip()
        kl = "-" if self.kl is None else f"{self.kl:.3g}"
        yield f"  {'in all':<14}{self.mean_abs:>12.3g}{'':>8}{kl:>12}"
        yield from (f"note: {sentence}" for sentence in self.not_measured)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for ``--json``."""
        return asdict(self)


@dataclass(frozen=True)
class Step:
    """Scores of a run, and the cause by which it differs from the run before it; `of_positions` is the share of that
    which positions make."""

    cause: str
    scores: list[Scores]
    detail: str = ""
    of_positions: float = 0.0

    def shares(self) -> Iterator[tuple[str, float, str]]:
        """Yield each cause of this step, its share of it, and what the cause's row says."""
        if self.of_positions:
            yield POSITIONS, self.of_positions, "gone where all tokens stand at position 0"
        yield self.cause, 1 - self.of_positions, self.detail


def causes_of(start: Sequence[Scores], steps: Sequence[Step], notes: Sequence[str] = ()) -> Causes:
    """Return the parts of the difference between the scores of A and those of the last step, which is B.

    >>> a, b = ([Scores(np.array(logprobs))] for logprobs in ([-1.0, -2.0], [-1.5, -2.25]))
    >>> causes = causes_of(a, [Step("weights", [Scores(np.array([-1.5, -2.0]))]), Step("unexplained", b)])
    >>> causes.mean_abs, causes.shares
    (0.375, {'weights': 0.6666666666666666, 'unexplained': 0.3333333333333333})
    """
    runs = [start, *(step.scores for step in steps)]
    logprobs = [np.concatenate([s.logprobs for s in run]).astype(np.float64) for run in runs]
    sign = np.sign(logprobs[0] - logprobs[-1])
    parts = [float((sign * (x - y)).mean()) for x, y in pairwise(logprobs)]
    kls = _kl_parts(runs)
    by_cause: dict[str, Cause] = {}
    for step, part, kl in zip(steps, parts, kls, strict=True):
        for cause, share, detail in step.shares():
            known = by_cause.get(cause, Cause(cause, 0.0, 0.0))
            both = None if kl is None or known.kl is None else known.kl + share * kl
            details = "; ".join(dict.fromkeys(filter(None, (known.detail, detail))))
            by_cause[cause] = Cause(cause, known.mean_abs + share * part, both, details)
    whole = None if any(kl is None for kl in kls) else float(sum(kl for kl in kls if kl is not None))
    mean_abs = float(np.abs(logprobs[0] - logprobs[-1]).mean())
    ordered = sorted(by_cause.values(), key=lambda cause: (cause.name == UNEXPLAINED, -cause.mean_abs))
    return Causes(mean_abs, whole, ordered, list(notes))


def _kl_parts(runs: Sequence[Sequence[Scores]]) -> list[float | None]:
    """Return each step's part of KL(A || B), over the positions of which all runs kept distributions."""
    kept = [[s.distributions for s in run if s.distributions is not None] for run in runs]
    counts = [min(len(d[i]) for d in kept) for i in range(min(map(len, kept)))]
    if not sum(counts):
        return [None] * (len(runs) - 1)
    rows = [np.concatenate([d[i][:n] for i, n in enumerate(counts)]).astype(np.float64) for d in kept]
    probabilities = np.exp(rows[0])
    return [float((probabilities * (x - y)).sum() / len(x)) for x, y in pairwise(rows)]
