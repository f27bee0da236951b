"""The assignment problem: one column for each row, no column twice, so that the gains add up to the most."""

import numpy as np


def best_assignment(gains: np.ndarray) -> list[int]:
    """The column of each row for which the sum of ``gains[row, column]`` is the largest; `gains` is ``[n,
    n]``, of integers.

    Shortest augmenting paths: each row is added to an assignment of the rows before it, along the path of
    exchanges that costs the least. Prices of rows and columns keep all costs along the way at zero or more,
    and those that are taken at zero, so that the search is Dijkstra's. In all n ** 3 steps; sums must stay
    within int64.

    >>> best_assignment(np.array([[5, 4], [5, 1]]))
    [1, 0]
    """
    n = len(gains)
    if not n:
        return []
    costs = int(gains.max()) - gains.astype(np.int64)
    far = np.iinfo(np.int64).max
    row_prices, column_prices = np.zeros(n, np.int64), np.zeros(n, np.int64)
    holder = np.full(n, -1)  # the row that has a column
    for row in range(n):
        # of each column: from `row`, and the column that it is reached through
        distances, before = np.full(n, far), np.full(n, -1)
        reached = np.zeros(n, bool)
        at, current, so_far = -1, row, 0
        while current >= 0:
            through = so_far + costs[current] - row_prices[current] - column_prices
            nearer = ~reached & (through < distances)
            distances[nearer], before[nearer] = through[nearer], at
            at = int(np.where(reached, far, distances).argmin())
            so_far, reached[at], current = int(distances[at]), True, int(holder[at])
        saved = so_far - distances[reached]
        column_prices[reached] -= saved
        taken = reached & (holder >= 0)
        row_prices[holder[taken]] += so_far - distances[taken]
        row_prices[row] += so_far
        while at >= 0:
            previous = int(before[at])
            holder[at] = holder[previous] if previous >= 0 else row
            at = previous
    columns = np.empty(n, np.int64)
    columns[holder] = np.arange(n)
    return columns.tolist()
