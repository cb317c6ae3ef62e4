"""Passes that go by without a request while it waits for its draft."""

from __future__ import annotations

from orchestrator.planner.cost_model import LASTING_PASSES, RECENT_PASSES
from orchestrator.planner.regression import Evidence, RobustRegression

# More than this is no wait for a draft but something else.
_MOST = 8


class MissedPasses:
    """Missed passes per round that asks for a draft, linear in how many ask: drafters serve them one after another.

    One more that asks waits itself, and makes all the others wait longer. So what it costs is not the mean, but the
    mean and once more what grows with the number.
    """

    def __init__(self) -> None:
        # Of passes that go on without those who wait, and of passes that wait for everybody. Constant, asking.
        self._regressions = {
            is_joint: RobustRegression(2, RECENT_PASSES, LASTING_PASSES, normal_error=1.0) for is_joint in (False, True)
        }
        # Of the pass that goes on: rounds that had asked for a draft, and the passes that they missed.
        self.num_rounds = 0
        self._missed = 0

    def evidence(self) -> tuple[Evidence, Evidence]:
        """What was seen where some ask, and where everybody does."""
        return self._regressions[False].evidence(), self._regressions[True].evidence()

    def restore(self, evidence: tuple[Evidence, Evidence]) -> None:
        """Begin with what was seen elsewhere."""
        for is_joint, one in zip((False, True), evidence, strict=True):
            self._regressions[is_joint].restore(one)

    def count(self, num_passes: int) -> None:
        """One of the rounds ended so many passes after the one before it."""
        self._missed += min(_MOST, num_passes - 1)

    def pass_over(self, num_asked: int, is_joint: bool, is_typical: bool) -> None:
        """Learn from what was counted for a pass, if it is typical."""
        if self.num_rounds and is_typical:
            self._regressions[is_joint].add((1.0, num_asked), self._missed / self.num_rounds)
        self._missed = self.num_rounds = 0

    def solve(self) -> None:
        """Fit again."""
        for regression in self._regressions.values():
            regression.solve()

    def jointly(self, num_asked: float) -> float:
        """Per round, where so many ask and everybody else does, too."""
        constant, slope = map(float, self._regressions[True].coefficients)
        return max(0.0, constant + slope * num_asked)

    def of_one_more(self, num_asked: float, is_joint: bool) -> float:
        """In all, when one more asks beside so many."""
        constant, slope = map(float, self._regressions[is_joint].coefficients)
        return max(0.0, constant + (2 if slope > 0 else 1) * slope * num_asked)
