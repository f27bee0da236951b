"""The rounding of two systems, measured on the prompts that they are compared on, and their
difference in units of it.

Two systems that hold one model differ by what each rounds: d = e_A - e_B, where e is a system's
logprob minus that of the same checkpoint in fp32. How large that is depends on the model and on the
prompts (a trained model of 30 layers moves three times as far as four layers of random weights), so
it is measured rather than assumed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reshard.parity.metrics import Scores

CONFIDENCE = 0.99
# Neighboring tokens are resampled together: they share a context, and so part of their rounding.
BLOCK = 16
# With fewer blocks an interval from resampling is too narrow to be believed.
MIN_BLOCKS = 8
RESAMPLES = 2000
# Rounding of one model in two systems is within this factor. What one has beyond it is counted as a
# difference.
COMPARABLE = 2.0
# The difference that two systems may have in fp32, as a share of their rounding in bf16, which is
# 65,536 times coarser; and on a GPU, whose kernels may compute fp32 in TF32, which is only 8 times
# finer than bf16. A single token may differ by LARGEST times that share of the largest rounding.
SHARE_IN_FP32, SHARE_IN_TF32 = 0.01, 0.25
LARGEST = 4.0
# Name of that comparison in a report; others are named by the run that a side is compared with, as
# "A in fp32".
BOTH_IN_FP32 = "A and B in fp32"


@dataclass(frozen=True)
class Noise:
    """The difference of A and B in units of rounding.

    `a` and `b` are the mean |rounding| of each system. Where one could not be measured it is None,
    and the other's is used instead. `ratio` is mean |A - B| over the root of the sum of their
    squares, about 1 for two systems that round independently, and lies between `low` and `high`
    with `confidence`. `in_fp32` is the mean |difference| of the two checkpoints in fp32 as a share
    of the rounding of both, at most `share`, and `largest_in_fp32` the largest in units of the
    largest rounding; None unless both were run so.
    """

    tokens: int
    blocks: int
    a: float | None
    b: float | None
    ratio: float
    low: float
    high: float
    confidence: float = CONFIDENCE
    in_fp32: float | None = None
    largest_in_fp32: float | None = None
    share: float = SHARE_IN_FP32

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for ``--json``."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """The result for people."""
        return (
            f"A and B differ by {self.ratio:.3g} times the rounding measured on these {self.tokens} tokens "
            f"({self._interval}; A rounds by {_figure(self.a)}, B by {_figure(self.b)})"
        )

    @property
    def _interval(self) -> str:
        return f"{self.confidence:.0%} confidence: {self.low:.3g} to {self.high:.3g}"

    def exceeded(self, limit: float) -> list[str]:
        """Return sentences on differences that are not rounding, or that too few tokens distinguish from
        rounding."""
        sentences = []
        if not self.low <= limit:  # NaN is not
            sentences.append(f"noise_ratio is {self.ratio:.6g} ({self._interval}), the limit is {limit:.6g}")
        elif self.blocks < MIN_BLOCKS:
            sentences.append(
                f"{self.tokens} tokens are too few to tell a difference from rounding: score more than "
                f"{MIN_BLOCKS * BLOCK}, such as --random 8"
            )
        elif not self.high <= limit:
            sentences.append(
                f"noise_ratio is {self.ratio:.6g} ({self._interval}), which {self.tokens} tokens are too few to "
                f"hold against the limit of {limit:.6g}: score more, such as --random 64"
            )
        return sentences + self.left_in_fp32

    @property
    def left_in_fp32(self) -> list[str]:
        """A sentence if the difference in fp32 is larger than rounding can be; else empty."""
        if self.in_fp32 is not None and not self.in_fp32 <= self.share:
            return [
                f"in fp32 A and B still differ by {self.in_fp32:.3g} times the rounding in this dtype, the limit is "
                f"{self.share:g}: this is not rounding"
            ]
        if self.largest_in_fp32 is not None and not self.largest_in_fp32 <= LARGEST * self.share:
            return [
                f"in fp32 a token of A and B still differs by {self.largest_in_fp32:.3g} times the largest rounding "
                f"in this dtype, the limit is {LARGEST * self.share:g}: this is not rounding"
            ]
        return []


def noise_of(
    a: Sequence[Scores],
    b: Sequence[Scores],
    rounded: tuple[Sequence[Scores] | None, Sequence[Scores] | None],
    exact: tuple[Sequence[Scores] | None, Sequence[Scores] | None],
    fp32: tuple[Sequence[Scores] | None, Sequence[Scores] | None] = (None, None),
    same_kind: bool = True,
    share: float = SHARE_IN_FP32,
) -> Noise | None:
    """Compare the difference of two systems' scores with the rounding of either; None if neither
    was measured.

    The rounding of a system is `rounded` minus `exact`: its scores in its dtype, and its
    checkpoint's in fp32. `fp32` are the scores of both checkpoints in fp32, which may differ by
    `share` of the rounding. Systems of the `same_kind` round by similar amounts, so that rounding
    far beyond the other's counts as a difference; not so where one serves quantized weights.

    >>> def score(*values):
    ...     return [Scores(np.array(values * 100))]
    >>> plain = score(-1.0, -2.0)
    >>> noise = noise_of(score(-1.1, -2.0), score(-1.0, -2.1), (score(-1.1, -2.0), None), (plain, None))
    >>> round(noise.ratio, 3), noise.b
    (1.414, None)
    """
    errors = [_abs_differences(one, other) for one, other in zip(rounded, exact, strict=True)]
    measured = [error for error in errors if error is not None]
    if not measured:
        return None
    difference = _abs_differences(a, b)
    assert difference is not None
    error_a, error_b = (measured[0] if error is None else error for error in errors)
    blocks = _block_starts([len(scores.logprobs) for scores in a])
    sums = np.stack([np.add.reduceat(values, blocks) for values in (difference, error_a, error_b)])
    samples = np.random.default_rng(0).integers(0, len(blocks), (RESAMPLES, len(blocks)))
    excess = COMPARABLE if same_kind else float("inf")
    ratios = _ratio(sums[:, samples].sum(-1), excess)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(np.quantile(ratios, share)) for share in (tail, 1 - tail))
    means = [None if error is None else float(error.mean()) for error in errors]
    between = _abs_differences(*fp32)
    left = largest = None
    if between is not None:
        left = _quotient(between.mean(), np.hypot(error_a.mean(), error_b.mean()))
        largest = _quotient(between.max(), max(error_a.max(), error_b.max()))
    return Noise(
        len(difference),
        len(blocks),
        means[0],
        means[1],
        float(_ratio(sums.sum(-1), excess)),
        low,
        high,
        in_fp32=left,
        largest_in_fp32=largest,
        share=share,
    )


def _abs_differences(one: Sequence[Scores] | None, other: Sequence[Scores] | None) -> np.ndarray | None:
    """Return the |difference| of every token, or None if either is missing."""
    if one is None or other is None:
        return None
    return np.concatenate([np.abs(x.logprobs - y.logprobs) for x, y in zip(one, other, strict=True)])


def _block_starts(counts: Sequence[int]) -> np.ndarray:
    """Return the first token of each block of neighboring tokens; no block has tokens of two
    prompts."""
    starts, first = list[int](), 0
    for count in counts:
        starts += range(first, first + count, BLOCK)
        first += count
    return np.array(starts)


def _ratio(sums: np.ndarray, excess: float) -> np.ndarray:
    """Return the difference over the rounding of both, from the sums of each ``[3, ...]``. Of
    either rounding at most `excess` times the other's counts."""
    difference, a, b = sums
    if np.isfinite(excess):
        a, b = np.minimum(a, excess * b), np.minimum(b, excess * a)
    noise = np.hypot(a, b)
    return np.where(difference == 0, 0.0, difference / np.where(noise == 0, np.finfo(float).tiny, noise))


def _quotient(value: float, unit: float) -> float:
    return 0.0 if value == 0 else float(value / unit) if unit else float("inf")


def _figure(value: float | None) -> str:
    return "an unknown amount" if value is None else f"{value:.3g}"
