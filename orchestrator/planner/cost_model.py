"""What a round takes, learned from the passes of one verifier: the pass itself, and the time around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
# A pass waits for drafts where at least this share of its rounds do.
JOINT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class PassSample:
    """One pass: of how many sequences it was a round, of these how many had asked for drafts, the tokens that it
    committed, and its rows in all.

    `context` is the committed tokens of those sequences together. `gap_s` is the time since the pass before it ended
    that was not spent in the pass itself: lingering, messages, the drafters' share of the machine. None where the
    verifier may have been idle. `reads_prompt` says whether a prompt ended in it, most of whose rows are not rounds'.
    """

    num_rounds: int
    num_asked: int
    num_tokens: int
    num_rows: int
    context: int
    pass_s: float
    gap_s: float | None
    reads_prompt: bool = False

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
