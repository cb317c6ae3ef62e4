"""What a round takes, learned from the passes of one verifier: the pass itself, and the time around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.planning.regression import Evidence, RobustRegression

# After how many passes an observation weighs half, for what follows the load and for what lasts.
RECENT_PASSES = 48
LASTING_PASSES = 2000
# A difference of this many seconds is nothing unusual for a pass or the time between two.
_NORMAL_ERROR_S = 0.0005
# Passes between two fits while the load is about the same.
PASSES_PER_FIT = 4
# A pass waits for drafts where at least this share of its rounds do.
JOINT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: of how many sequences it was a round, of these how many had asked for drafts, the tokens that it
    committed, and its rows in all.

    `context` is the committed tokens of those sequences together. `gap_s` is the time since the pass before it ended
    that was not spent in the pass itself: lingering, messages, the drafters' share of the machine. None where the
    verifier may have been idle.
    """

    num_rounds: int
    num_asked: int
    num_tokens: int
    num_rows: int
    context: int
    pass_s: float
    gap_s: float | None

    @property
    def is_joint(self) -> bool:
        """Whether about everyone had asked for drafts, so that the pass waited for all of them."""
        return self.num_asked >= JOINT_SHARE * self.num_rounds


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
        self._is_known = False
        self.costs = Costs()

    @property
    def is_known(self) -> bool:
        """Whether there is anything to plan with."""
        return self._is_known

    def evidence(self) -> tuple[Evidence, Evidence]:
        """What was seen of passes, and of the time between them."""
        return self._pass.evidence(), self._gap.evidence()

    def restore(self, evidence: tuple[Evidence, Evidence]) -> None:
        """Begin with what was seen elsewhere."""
        in_pass, around = evidence
        self._pass.restore(in_pass)
        self._gap.restore(around)
        self._is_known = around.weight > 0
        self._fit()

    def add(self, record: PassRecord) -> bool:
        """Learn from a pass; whether the costs have changed."""
        self._pass.add(_pass_features(record), record.pass_s)
        if record.gap_s is not None:
            joint = record.num_asked if record.is_joint else 0
            self._gap.add((1.0, record.num_rounds, record.num_asked, joint), record.gap_s)
            self._is_known = True
        self._since_fit += 1
        is_due = (
            self._since_fit >= PASSES_PER_FIT or abs(record.num_rounds - self._fitted_rounds) > record.num_rounds / 4
        )
        if is_due:
            self._since_fit, self._fitted_rounds = 0, record.num_rounds
            self._fit()
        return is_due

    def pass_s(self, record: PassRecord) -> float:
        """What a pass like this one is expected to take."""
        return max(1e-6, float(self._pass.coefficients @ _pass_features(record)))

    def plain_round_s(self, num_rounds: float, context: float) -> float:
        """The interval between passes of so many sequences and no drafts."""
        seconds = self._pass.coefficients @ np.array([1.0, num_rounds, 0.0, context / 1000, 0.0])
        return max(1e-6, float(seconds + self._gap.coefficients @ np.array([1.0, num_rounds, 0.0, 0.0])))

    def _fit(self) -> None:
        in_pass, around = self._pass.solve().tolist(), self._gap.solve().tolist()
        self.costs = Costs(
            row_s=max(0.0, in_pass[2]),
            round_s=max(0.0, in_pass[1] + around[1]),
            asking_s=max(0.0, in_pass[4] + around[2]),
            asking_jointly_s=max(0.0, in_pass[4] + around[2] + around[3]),
        )


def _pass_features(record: PassRecord) -> tuple[float, ...]:
    further = record.num_rows - record.num_rounds
    return 1.0, record.num_rounds, further, record.context / 1000, record.num_asked
