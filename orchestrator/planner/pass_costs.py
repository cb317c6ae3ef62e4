"""Cost of a pass and of a row in it, learned from passes."""

from __future__ import annotations

import operator
from itertools import combinations_with_replacement

# Half-life of a pass in the fit, in passes: seconds of decoding, so that it follows load and machine.
HALF_LIFE = 128
# Passes between two fits; a fit takes as long as planning ten requests.
PASSES_PER_FIT = 8
# Upper bound of a pass's time in expected ones: longer passes were delayed by something else.
OUTLIER = 3.0
# Ridge in units of a feature's own mean square: it only decides where features do not vary apart.
RIDGE = 1e-3
_FADE = 0.5 ** (1 / HALF_LIFE)
_FEATURES = 5


class PassCosts:
    """Least squares, with decaying weights, of seconds = own + nodes + rounds + asking rounds + other rows.

    Age-weighted regression of a pass's time on its size as in ProPD (2402.13485, section 4.2). Other rows are those of
    prompts and of other orchestrators. Drafters on the same cores slow passes down, so asking rounds are a feature.
    Plain Python: for so few numbers arrays take longer.
    """

    def __init__(self) -> None:
        # Sums of products of features, and of these with the seconds: the upper triangle by rows.
        self._sums = [0.0] * ((_FEATURES + 1) * (_FEATURES + 2) // 2)
        self._since_fit = 0
        self._coefficients: list[float] = []

    @property
    def row_s(self) -> float:
        """Seconds that another node adds to a pass; 0 until known."""
        return max(0.0, self._coefficients[1]) if self._coefficients else 0.0

    def add(self, num_rounds: int, num_nodes: int, num_asked: int, num_rows: int, seconds: float) -> float:
        """Learn from a pass; returns its seconds without those of other rows, and of what else delayed it."""
        other_rows = max(0, num_rows - num_rounds - num_nodes)
        features = (1.0, num_nodes, num_rounds, num_asked, other_rows)
        other_s = 0.0
        if self._coefficients:
            expected_s = sum(map(operator.mul, self._coefficients, features))
            if expected_s > 0:
                seconds = min(seconds, OUTLIER * expected_s)
            other_s = min(max(0.0, self._coefficients[4] * other_rows), 0.9 * seconds)
        pairs = combinations_with_replacement((*features, seconds), 2)
        self._sums = [_FADE * total + one * other for total, (one, other) in zip(self._sums, pairs, strict=True)]
        self._since_fit += 1
        if self._since_fit >= PASSES_PER_FIT:
            self._since_fit = 0
            self._coefficients = self._fit()
        return seconds - other_s

    def _fit(self) -> list[float]:
        """Solve the normal equations by elimination; the ridge makes them positive definite."""
        sums = iter(self._sums)
        rows = [[0.0] * index + [next(sums) for _ in range(index, _FEATURES + 1)] for index in range(_FEATURES)]
        for index, row in enumerate(rows):
            row[index] += RIDGE * row[index] + 1e-9
        for index, row in enumerate(rows):
            for later in range(index + 1, _FEATURES):
                factor = row[later] / row[index]
                for column in range(later, _FEATURES + 1):
                    rows[later][column] -= factor * row[column]
        solution = [0.0] * _FEATURES
        for index in reversed(range(_FEATURES)):
            row = rows[index]
            known = sum(map(operator.mul, row[index + 1 : _FEATURES], solution[index + 1 :]))
            solution[index] = (row[_FEATURES] - known) / row[index]
        return solution
