"""The time of a round, learned from the passes of one verifier: the pass, the time around it, and missed passes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.passes import PassSample
from orchestrator.planner.regression import Evidence, RobustRegression

# After how many passes an observation weighs half, for what follows the load and for what lasts.
RECENT_PASSES = 48
LASTING_PASSES = 2000
# A difference of this many seconds is nothing unusual for a pass or the time between two.
_NORMAL_ERROR_S = 0.0005
# Passes between two fits while the load is about the same.
PASSES_PER_FIT = 4
# Drafters on the same cores slow passes down, but by no more than this.
LEAST_PLAIN_SHARE = 0.5
# Missed passes of a round: more than this is no wait for a draft but something else.
_MOST_MISSED = 8
# Borrowed costs: so many passes are compared. If most of them took more than this many times what was expected, or less
# than that part of it, the costs are those of another machine. Prompts and what else begins with a process make single
# passes odd.
CHECKED_PASSES = 7
MOST_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Marginal times in seconds: of a further row, sequence, and sequence that asks for drafts (its rows aside).

    Where everyone asks, a pass waits for the drafts, and one that asks costs `asking_jointly_s`. Where only some do,
    the others go on without them.
    """

    row_s: float = 0.0
    round_s: float = 0.0
    asking_s: float = 0.0
    asking_jointly_s: float = 0.0


class CostModel:
    """Time of a round = pass(rows, sequences, context, asking) + gap(sequences, asking), both linear here and now.

    Drafters cost more than rows: the round lingers for them, and on a shared machine they slow the pass down. So the
    interval between passes is what counts. It is split because the pass is known exactly and teaches the price of rows
    much faster than the interval, which waiting makes noisy; and rows that are there already cost the pass alone.
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
        """Whether there is anything to plan with."""
        return self._knows_passes and self._knows_gaps

    def evidence(self) -> tuple[Evidence, Evidence]:
        """What was seen of passes, and of the time between them."""
        return self._pass.evidence(), self._gap.evidence()

    def restore(self, evidence: tuple[Evidence, Evidence]) -> None:
        """Begin with what was seen elsewhere."""
        in_pass, around = evidence
        self._pass.restore(in_pass)
        self._gap.restore(around)
        self._knows_passes, self._knows_gaps = in_pass.weight > 0, around.weight > 0
        self._fit()

    def add(self, record: PassSample) -> bool:
        """Learn from a pass; whether the costs have changed."""
        if not record.reads_prompt:
            # Hundreds of rows cost less each than a few do, and requests ask for no drafts while they are read: what
            # such passes take would be put down to that.
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
        """What a pass like this one is expected to take."""
        return max(1e-6, float(self._pass.coefficients @ _pass_features(record)))

    def plain_round_s(self, num_rounds: float, context: float) -> float:
        """The interval between passes of so many sequences and no drafts.

        While all passes had drafts this is a guess far from what was seen, and not believed below LEAST_PLAIN_SHARE of
        what passes take where all ask for drafts, rows aside.
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
        self._missed += min(_MOST_MISSED, num_passes - 1)

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
        """In all, when one more asks with so many."""
        constant, slope = map(float, self._regressions[is_joint].coefficients)
        return max(0.0, constant + (2 if slope > 0 else 1) * slope * num_asked)


class BorrowedCosts:
    """Compares the first passes with what was expected of them."""

    def __init__(self, costs: CostModel) -> None:
        """`costs` are as they were learned elsewhere, and learn nothing more."""
        self._costs = costs
        self._ratios: list[float] = []

    @property
    def is_checked(self) -> bool:
        """Whether there is nothing more to find out."""
        return len(self._ratios) >= CHECKED_PASSES

    def are_refuted_by(self, record: PassSample) -> bool:
        """Take a pass in; whether it is the one that shows that the costs are wrong."""
        self._ratios.append(record.pass_s / self._costs.pass_s(record))
        return self.is_checked and not 1 / MOST_RATIO <= statistics.median(self._ratios) <= MOST_RATIO
