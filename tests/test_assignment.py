"""The order of GPUs is the best of all: against every permutation, and against scipy's solver where there are too many."""

from itertools import permutations

import numpy as np
import pytest

from reshard.core.assignment import best_assignment


def gain(gains, columns):
    return sum(int(gains[row, column]) for row, column in enumerate(columns))


@pytest.mark.parametrize("size", range(1, 7))
def test_no_permutation_gains_more(size):
    random = np.random.default_rng(size)
    for most in (1, 3, 10**12):
        for _ in range(20):
            gains = random.integers(0, most + 1, (size, size))
            found = best_assignment(gains)
            assert sorted(found) == list(range(size))
            assert gain(gains, found) == max(gain(gains, order) for order in permutations(range(size)))


@pytest.mark.parametrize("size", [8, 16, 72])
def test_scipy_gains_no_more(size):
    solve = pytest.importorskip("scipy.optimize").linear_sum_assignment
    random = np.random.default_rng(size)
    for most in (2, 10**11):
        gains = random.integers(0, most, (size, size))
        found = best_assignment(gains)
        assert sorted(found) == list(range(size))
        assert gain(gains, found) == int(gains[solve(gains, maximize=True)].sum())


def test_greedy_would_not_do():
    """The control: each row's own favorite, taken in turn, gains less."""
    gains = np.array([[5, 4], [5, 0]])
    assert best_assignment(gains) == [1, 0] and gain(gains, [1, 0]) > gain(gains, [0, 1])


def test_nothing_is_assigned_to_nothing():
    assert best_assignment(np.zeros((0, 0), np.int64)) == []
