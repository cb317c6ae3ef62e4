"""Cost of a pass and of a row in it, learned from passes."""

from __future__ import annotations

import numpy as np

# Half-life of a pass in the fit, in passes: seconds of decoding, so that it follows load and machine.
HALF_LIFE = 128
# Passes between two fits; a fit takes as long as planning ten requests.
PASSES_PER_FIT = 8
# Upper bound of a pass's time in expected ones: longer passes were delayed by something else.
OUTLIER = 3.0
# Ridge in units of a feature's own mean square: it only decides where features do not vary apart.
RIDGE = 1e-3
_FADE = 0.5 ** (1 / HALF_LIFE)
_FEATURES = 6
# Decay of earlier passes in the mean of other rows per token: a prompt is read in few of many passes.
_ROWS_FADE = 0.5 ** (1 / 2048)


class PassCosts:
    """Least squares, with decaying weights, of seconds = own + nodes + rounds + asking rounds + other rows.

    Age-weighted regression of a pass's time on its size as in ProPD (2402.13485, section 4.2). Other rows are those of
    prompts and of other orchestrators. Drafters on the same cores slow passes down, so asking rounds are a feature, and
    so are other rows where rounds ask: drafters read the same prompts.
    """

    def __init__(self) -> None:
        # Sums of products of features and seconds.
        self._sums = np.zeros((_FEATURES + 1, _FEATURES + 1))
        self._since_fit = 0
        self._coefficients: list[float] = []
        self._other_rows = self._tokens = 0.0

    @property
    def row_s(self) -> float:
        """Seconds that another node adds to a pass; 0 until known."""
        return max(0.0, self._coefficients[1]) if self._coefficients else 0.0

    @property
    def other_s(self) -> tuple[float, float]:
        """Seconds of other rows for each token: without drafts, and where all rounds ask for them."""
        if not self._coefficients or not self._tokens:
            return 0.0, 0.0
        plain, more = (row_s * self._other_rows / self._tokens for row_s in self._coefficients[4:])
        plain = max(0.0, plain)
        return plain, plain + max(0.0, more)

    def add(
        self, num_rounds: int, num_nodes: int, num_asked: int, num_rows: int, num_tokens: float, seconds: float
    ) -> float:
        """Learn from a pass; returns its seconds without those of other rows, and of what else delayed it."""
        other_rows = max(0, num_rows - num_rounds - num_nodes)
        self._other_rows = _ROWS_FADE * self._other_rows + other_rows
        self._tokens = _ROWS_FADE * self._tokens + num_tokens
        rows_asking = other_rows * num_asked / max(1, num_rounds)
        features = (1.0, num_nodes, num_rounds, num_asked, other_rows, rows_asking)
        other_s = 0.0
        if self._coefficients:
            expected_s = sum(one * value for one, value in zip(self._coefficients, features, strict=True))
            if expected_s > 0:
                seconds = min(seconds, OUTLIER * expected_s)
            other_s = self._coefficients[4] * other_rows + self._coefficients[5] * rows_asking
            other_s = min(max(0.0, other_s), 0.9 * seconds)
        values = np.array((*features, seconds))
        self._sums *= _FADE
        self._sums += np.outer(values, values)
        self._since_fit += 1
        if self._since_fit >= PASSES_PER_FIT:
            self._since_fit = 0
            self._coefficients = self._fit()
        return seconds - other_s

    def _fit(self) -> list[float]:
        """Solve the normal equations; the ridge makes them positive definite."""
        products = self._sums[:-1, :-1]
        ridge = RIDGE * products.diagonal() + 1e-9
        solution: list[float] = np.linalg.solve(products + np.diag(ridge), self._sums[:-1, -1]).tolist()
        return solution
