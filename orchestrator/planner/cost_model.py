"""Cost model of a verifier's rounds, learned from its passes: pass time, time between passes, and missed passes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.passes import PassSample
from orchestrator.planner.regression import Evidence, RobustRegression

# Half-life of observations, in passes, of load-dependent and of lasting effects.
RECENT_PASSES = 48
LASTING_PASSES = 2000
# Errors up to this many seconds are normal for a pass or a gap.
_NORMAL_ERROR_S = 0.0005
# Passes between two fits while the load is about the same.
PASSES_PER_FIT = 4
# Drafters on the same cores slow passes down, to at most twice the time.
LEAST_PLAIN_SHARE = 0.5
# Upper bound of missed passes per round; more have other causes than drafts.
_MOST_MISSED = 8
# Borrowed costs are discarded if the median ratio of this many passes' times to the predicted ones is above MOST_RATIO
# or below its inverse. Single passes may be outliers at a process's start.
CHECKED_PASSES = 7
MOST_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Marginal times in seconds: of another row, sequence, and asking sequence (without its rows).

    If all ask, passes wait for drafts, and an asking sequence costs `asking_jointly_s`. Otherwise passes do not wait.
    """

    row_s: float = 0.0
    round_s: float = 0.0
    asking_s: float = 0.0
    asking_jointly_s: float = 0.0


class CostModel:
    """Round time = pass(rows, sequences, context, asking) + gap(sequences, asking), both locally linear.

    Drafts cost more than rows: rounds linger for them, and on a shared machine drafters slow passes down, so intervals
    between passes count. They are split because pass times are exact and teach the row price much faster than
    intervals, which lingering makes noisy; and because more rows do not lengthen the gap.
    """

    def __init__(self) -> None:
        # Constant, sequences, further rows, thousands of context tokens, asking.
        self._pass = RobustRegression(5, RECENT_PASSES, LASTING_PASSES, _NORMAL_ERROR_S, slow=[3])
        # Constant, sequences, asking, asking jointly.
        self._gap = RobustRegression(4, RECENT_PASSES, LASTING_PASSES, _NORMAL_ERROR_S)
        self._since_fit = 0
        self._fitted_rounds = 0
        self._knows_passes = self._knows_gaps = False
        self.costs = Costs()

    @property
    def is_known(self) -> bool:
        """Whether passes and gaps were observed."""
        return self._knows_passes and self._knows_gaps

    def evidence(self) -> tuple[Evidence, Evidence]:
        """Statistics of passes and gaps."""
        return self._pass.evidence(), self._gap.evidence()

    def restore(self, evidence: tuple[Evidence, Evidence]) -> None:
        """Start from another model's statistics."""
        in_pass, around = evidence
        self._pass.restore(in_pass)
        self._gap.restore(around)
        self._knows_passes, self._knows_gaps = in_pass.weight > 0, around.weight > 0
        self._fit()

    def add(self, record: PassSample) -> bool:
        """Learn from a pass; returns whether costs were refitted."""
        if not record.reads_prompt:
            # Prefill rows are cheaper per row than a few draft rows, and prefilling requests do not ask for drafts:
            # such passes would bias both coefficients.
            self._pass.add(_pass_features(record), record.pass_s)
            self._knows_passes = True
        if record.gap_s is not None:
            joint = record.num_asked if record.is_joint else 0
            self._gap.add((1.0, record.num_rounds, record.num_asked, joint), record.gap_s)
            self._knows_gaps = True
        self._since_fit += 1
        is_due = (
            self._since_fit >= PASSES_PER_FIT or abs(record.num_rounds - self._fitted_rounds) > record.num_rounds / 4
        )
        if is_due:
            self._since_fit, self._fitted_rounds = 0, record.num_rounds
            self._fit()
        return is_due

    def pass_s(self, record: PassSample) -> float:
        """Expected duration of a pass of this shape, in seconds."""
        return max(1e-6, float(self._pass.coefficients @ _pass_features(record)))

    def plain_round_s(self, num_rounds: float, context: float) -> float:
        """Expected interval between passes of `num_rounds` sequences without drafts, in seconds.

        An extrapolation while all passes had drafts, so bounded below by LEAST_PLAIN_SHARE of the duration of passes in
        which all ask, without draft rows.
        """
        alone = [1.0, num_rounds, 0.0, context / 1000]
        in_pass = self._pass.coefficients
        least = LEAST_PLAIN_SHARE * float(in_pass @ np.array([*alone, num_rounds]))
        seconds = max(least, float(in_pass @ np.array([*alone, 0.0])))
        return max(1e-6, seconds + float(self._gap.coefficients @ np.array([1.0, num_rounds, 0.0, 0.0])))

    def _fit(self) -> None:
        in_pass, around = self._pass.solve().tolist(), self._gap.solve().tolist()
        self.costs = Costs(
            row_s=max(0.0, in_pass[2]),
            round_s=max(0.0, in_pass[1] + around[1]),
            asking_s=max(0.0, in_pass[4] + around[2]),
            asking_jointly_s=max(0.0, in_pass[4] + around[2] + around[3]),
        )


def _pass_features(record: PassSample) -> tuple[float, ...]:
    further = record.num_rows - record.num_rounds
    return 1.0, record.num_rounds, further, record.context / 1000, record.num_asked


class MissedPasses:
    """Missed passes per asking round, linear in the number that ask: drafters serve requests one after another.

    Another asking request waits itself and lengthens all others' waits. Its cost is therefore the mean plus the slope's
    part once more.
    """

    def __init__(self) -> None:
        # Of passes that do not wait for drafts, and of joint ones. Constant, asking.
        self._regressions = {
            is_joint: RobustRegression(2, RECENT_PASSES, LASTING_PASSES, normal_error=1.0) for is_joint in (False, True)
        }
        # Of the current pass: asking rounds, and passes that they missed.
        self.num_rounds = 0
        self._missed = 0

    def evidence(self) -> tuple[Evidence, Evidence]:
        """Statistics of passes that do not wait, and of joint ones."""
        return self._regressions[False].evidence(), self._regressions[True].evidence()

    def restore(self, evidence: tuple[Evidence, Evidence]) -> None:
        """Start from another model's statistics."""
        for is_joint, one in zip((False, True), evidence, strict=True):
            self._regressions[is_joint].restore(one)

    def count(self, num_passes: int) -> None:
        """Count a round that ended `num_passes` passes after its previous one."""
        self._missed += min(_MOST_MISSED, num_passes - 1)

    def pass_over(self, num_asked: int, is_joint: bool, is_typical: bool) -> None:
        """Learn from the counts of a pass if it is typical, and reset them."""
        if self.num_rounds and is_typical:
            self._regressions[is_joint].add((1.0, num_asked), self._missed / self.num_rounds)
        self._missed = self.num_rounds = 0

    def solve(self) -> None:
        """Fit the regressions."""
        for regression in self._regressions.values():
            regression.solve()

    def jointly(self, num_asked: float) -> float:
        """Missed passes per round, if `num_asked` sequences ask and all others do too."""
        constant, slope = map(float, self._regressions[True].coefficients)
        return max(0.0, constant + slope * num_asked)

    def of_one_more(self, num_asked: float, is_joint: bool) -> float:
        """Total missed passes added by another asking sequence."""
        constant, slope = map(float, self._regressions[is_joint].coefficients)
        return max(0.0, constant + (2 if slope > 0 else 1) * slope * num_asked)


class BorrowedCosts:
    """Compares the first passes with the predictions of borrowed costs."""

    def __init__(self, costs: CostModel) -> None:
        """`costs` are the borrowed ones; they are not updated."""
        self._costs = costs
        self._ratios: list[float] = []

    @property
    def is_checked(self) -> bool:
        """Whether enough passes were compared."""
        return len(self._ratios) >= CHECKED_PASSES

    def are_refuted_by(self, record: PassSample) -> bool:
        """Compare a pass; returns whether it completes the refutation."""
        self._ratios.append(record.pass_s / self._costs.pass_s(record))
        return self.is_checked and not 1 / MOST_RATIO <= statistics.median(self._ratios) <= MOST_RATIO
