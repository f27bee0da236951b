"""The parts that groups of tokens have in a rollout's figures.

Each token is in one group, so that the groups' sums over the number of all tokens add up to the figure of the whole:
a part divided by the group's share is the mean of the group's own tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from reshard.parity.rollout.tokens import Tokens
from reshard.parity.rollout.weights import BOUNDS, checked_bounds

# Lags that have a group of their own; one group has those that are larger.
LAGS = 8


class Part(NamedTuple):
    """Part of a group of tokens in a whole: its `share` of the tokens, and its parts of the mean |difference of
    logprobs| and of the two estimates of KL(inference || train), in nats: k1, and k3, `kl_estimate_reverse`."""

    share: float
    mean_abs: float
    kl_k1: float
    kl_estimate_reverse: float


@dataclass(frozen=True)
class Parts:
    """The parts of all tokens: by their importance weight, `ratio` (below, within and above the bounds), by
    `experts` (same, differ), and by staleness, `lag` (``0`` to ``7``, then ``8_or_more`` versions).

    None where it is not known. `lag_mean` and `lag_max` are in versions of the weights.
    """

    ratio: dict[str, Part]
    experts: dict[str, Part] | None = None
    lag: dict[str, Part] | None = None
    lag_mean: float | None = None
    lag_max: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return figures for a logger: ``experts_differ/mean_abs`` and so on."""
        figures: dict[str, Any] = {}
        for kind, groups in self.known().items():
            for group, part in groups.items():
                figures |= {f"{kind}_{group}/{name}": value for name, value in part._asdict().items()}
        if self.lag_mean is not None:
            figures |= {"lag_mean": self.lag_mean, "lag_max": self.lag_max}
        return figures

    def known(self) -> dict[str, dict[str, Part]]:
        """Return the groups' parts by kind, as far as they are known."""
        every = {"ratio": self.ratio, "experts": self.experts, "lag": self.lag}
        return {kind: groups for kind, groups in every.items() if groups is not None}


def parts_of(tokens: Tokens, bounds: Sequence[float] = BOUNDS) -> Parts:
    """Return the parts of a rollout's figures.

    >>> tokens = Tokens(np.array([-1.0, -2.0]), np.array([-1.5, -2.0]), np.array([2]), lag=np.array([3, 0]))
    >>> parts = parts_of(tokens)
    >>> parts.lag["3"].mean_abs, parts.lag["0"].share, parts.lag_mean
    (0.25, 0.5, 1.5)
    """
    low, high = checked_bounds(bounds)
    beyond = 1 + (tokens.log_ratio > np.log(high)).astype(np.int64) - (tokens.log_ratio < np.log(low))
    ratio = _by_group(tokens.log_ratio, beyond, ("below", "within", "above"))
    experts = lag = lag_mean = lag_max = None
    if tokens.rerouted is not None:
        experts = _by_group(tokens.log_ratio, tokens.rerouted.astype(np.int64), ("same", "differ"))
    if tokens.lag is not None:
        names = [*map(str, range(LAGS)), f"{LAGS}_or_more"]
        groups = _by_group(tokens.log_ratio, np.minimum(tokens.lag, LAGS), names)
        lag = {name: part for name, part in groups.items() if part.share}
        lag_mean, lag_max = float(tokens.lag.mean()), int(tokens.lag.max())
    return Parts(ratio, experts, lag, lag_mean, lag_max)


def part_lines(kind: str, groups: dict[str, Part]) -> Iterator[str]:
    """Return a table of the groups of a kind, for people."""
    yield f"{'by ' + kind:<16}{'tokens':>10}{'mean_abs':>12}{'share':>8}{'kl_k1':>12}{'kl (k3)':>12}{'share':>8}"
    whole = Part(*map(sum, zip(*groups.values(), strict=True)))
    for name, part in groups.items():
        yield _line(name.replace("_", " "), part, whole)
    yield _line("in all", whole, None)


def _line(name: str, part: Part, whole: Part | None) -> str:
    def of_whole(value: float, total: float) -> str:
        return f"{100 * value / total:.1f} %" if total else "-"

    shares = ("", "") if whole is None else (
        of_whole(part.mean_abs, whole.mean_abs), of_whole(part.kl_estimate_reverse, whole.kl_estimate_reverse)
    )  # fmt: skip
    return (f"  {name:<14}{f'{100 * part.share:.3g} %':>10}{part.mean_abs:>12.3g}{shares[0]:>8}{part.kl_k1:>12.3g}"
            f"{part.kl_estimate_reverse:>12.3g}{shares[1]:>8}").rstrip()  # fmt: skip


def _by_group(log_ratio: np.ndarray, groups: np.ndarray, names: Sequence[str]) -> dict[str, Part]:
    """Return the parts of groups, each token's being an index into `names`."""
    with np.errstate(over="ignore"):
        values = (None, np.abs(log_ratio), -log_ratio, np.exp(log_ratio) - 1 - log_ratio)
    columns = [np.bincount(groups, value, len(names)) / len(log_ratio) for value in values]
    return {name: Part(*map(float, row)) for name, row in zip(names, zip(*columns, strict=True), strict=True)}
