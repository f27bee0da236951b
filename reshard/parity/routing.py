"""Compare the experts that two systems send each token to, and tell near-ties from errors.

Two implementations of one model differ by rounding, and where two experts score almost the same a
token can go to either. From that layer on its hidden state differs, so that its choices in later
layers say nothing. A difference is therefore judged at the first layer where a token's experts
differ, by how much one system prefers its own choice.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from reshard.core.errors import ReshardError


class Choices(NamedTuple):
    """The experts that a prompt's n tokens went to: `experts` ``[n, layers, top k]``, ascending,
    and `scores` ``[n, layers, experts]`` that they were chosen by, the larger the better (None
    if the system does not report them); `layers` has the layers' numbers."""

    layers: tuple[int, ...]
    experts: np.ndarray
    scores: np.ndarray | None


class ExpertGroups(NamedTuple):
    """Group-limited routing: experts come from the `chosen` of `total` groups whose best two
    experts score most together (DeepSeek-V3, section 2.1.2)."""

    total: int
    chosen: int


@dataclass(frozen=True)
class Routing:
    """The comparison of two systems' routing: of `choices` (a token in a layer) `differing` differ;
    of `tokens` tokens `differing_tokens` differ in some layer.

    `margin` is the largest at the first layer where a token's experts differ: how far apart one
    system scores the experts that it took and those that the other took, in standard deviations of
    that token's scores. Zero where nothing differs. `mean_abs_same` and `mean_abs_differing` are
    the mean |difference of logprobs| of the tokens whose experts are all the same, and of the
    others.
    """

    choices: int
    differing: int
    tokens: int
    differing_tokens: int
    margin: float
    worst_layer: int | None
    mean_abs_same: float | None = None
    mean_abs_differing: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for ``--json``."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """The result for people."""
        if not self.differing:
            return f"all {self.choices:,} choices of experts are the same"
        text = (f"{self.differing:,} of {self.choices:,} choices of experts differ, of "
                f"{self.differing_tokens:,} of {self.tokens:,} tokens; at a token's first the scores are "
                f"{self.margin:.2g} standard deviations apart at most (layer {self.worst_layer})")  # fmt: skip
        if self.mean_abs_differing is None:
            return text
        same = "-" if self.mean_abs_same is None else f"{self.mean_abs_same:.3g}"
        others = f"{self.mean_abs_differing:.3g} of the others"
        return f"{text}; mean_abs {same} of the tokens without a difference, {others}"


def compare_routing(
    a: Sequence[Choices],
    b: Sequence[Choices],
    groups: ExpertGroups | None = None,
    apart: Sequence[np.ndarray] | None = None,
) -> Routing:
    """Compare the choices of two systems for the same prompts. `groups` limits experts to groups;
    `apart` has the |difference of logprobs| of each prompt's tokens ``[n]``.

    Raises ReshardError if the systems do not have the same MoE layers, or neither reports its
    scores.

    >>> scores = np.array([[[0.9, 0.5, 0.4, 0.1]]])
    >>> one, two = (Choices((0,), np.array([[chosen]]), scores) for chosen in ([0, 1], [0, 2]))
    >>> routing = compare_routing([one], [two._replace(scores=None)])
    >>> routing.differing, round(routing.margin, 2)
    (1, 0.35)
    """
    choices = differing = tokens = differing_tokens = 0
    margin, worst = 0.0, None
    differs_somewhere: list[np.ndarray] = []
    for x, y in zip(a, b, strict=True):
        if x.layers != y.layers or x.experts.shape != y.experts.shape:
            raise ReshardError(
                f"A chooses experts in layers {list(x.layers)}, {x.experts.shape[-1]} of "
                f"them, B in layers {list(y.layers)}, {y.experts.shape[-1]}"
            )
        other = (x.experts != y.experts).any(-1)
        somewhere = other.any(-1)
        choices, differing = choices + other.size, differing + int(other.sum())
        tokens, differing_tokens = tokens + len(other), differing_tokens + int(somewhere.sum())
        for token in np.flatnonzero(somewhere):
            layer = int(other[token].argmax())
            distance = _margin(x, y, token, layer, groups)
            if not distance <= margin:  # NaN counts as the largest
                margin, worst = distance, x.layers[layer]
        differs_somewhere.append(somewhere)
    same, others = None, None
    if apart is not None and differs_somewhere:
        values, where = np.concatenate(apart), np.concatenate(differs_somewhere)
        same, others = (float(part.mean()) if len(part) else None for part in (values[~where], values[where]))
    return Routing(choices, differing, tokens, differing_tokens, margin, worst, same, others)


def _margin(x: Choices, y: Choices, token: int, layer: int, groups: ExpertGroups | None) -> float:
    """Return how far apart the experts of the two systems score, in standard deviations of the
    token's scores, by the scores of the first system that reports them."""
    if x.scores is None:
        x, y = y, x
    if x.scores is None:
        raise ReshardError(
            "neither system tells the scores that it chooses experts by: compare with "
            "transformers or Megatron-Core"
        )
    scores = x.scores[token, layer].astype(np.float64)
    taken, other = x.experts[token, layer], y.experts[token, layer]
    if groups is not None and groups.chosen < groups.total:
        distance = _apart_in_groups(scores, taken, other, groups)
    else:
        distance = _experts_apart(scores, taken, other)
    return distance / _spread(scores)


def _experts_apart(scores: np.ndarray, taken: np.ndarray, other: np.ndarray) -> float:
    """Return the largest distance between scores of experts that only one system took: the best of
    one against the best of the other, and so on."""
    only_taken, only_other = np.setdiff1d(taken, other), np.setdiff1d(other, taken)
    return float(np.abs(np.sort(scores[only_taken]) - np.sort(scores[only_other])).max())


def _apart_in_groups(scores: np.ndarray, taken: np.ndarray, other: np.ndarray, groups: ExpertGroups) -> float:
    """Return the distance where experts come from the best groups only: a group that one system
    took in place of another may score the same while its experts do not."""
    experts_of_a_group = len(scores) // groups.total
    of_groups = np.sort(scores.reshape(groups.total, experts_of_a_group), axis=-1)[:, -2:].sum(axis=-1)
    best_first = np.sort(of_groups)[::-1]
    last_taken, first_left_out = best_first[groups.chosen - 1], best_first[groups.chosen]

    def groups_of(experts: np.ndarray) -> set[int]:
        return {int(expert) // experts_of_a_group for expert in experts}

    # The other system took experts from groups that these scores leave out: how far below the last
    # one taken?
    entered = [group for group in groups_of(np.setdiff1d(other, taken)) if of_groups[group] < last_taken]
    if entered:
        return float(max(last_taken - of_groups[group] for group in entered))
    # Groups of which the other system took no expert: how far above the first one left out?
    deserted = groups_of(np.setdiff1d(taken, other)) - groups_of(other)
    between_experts = _experts_apart(scores, taken, other)
    if not deserted:
        return between_experts
    return float(min(between_experts, max(of_groups[group] - first_left_out for group in deserted)))


def _spread(values: np.ndarray) -> float:
    return float(values.std()) or 1.0
