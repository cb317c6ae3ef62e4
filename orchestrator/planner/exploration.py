"""Exploration: a small share of rounds that tests whether the alternative is better by now. Seeded."""

from __future__ import annotations

import random

from orchestrator.planner.passes import FULL_SHARE

# While drafting pays: pauses of this many passes without drafts for all requests, after passes for which requests still
# wait. The first pause comes early, earlier with several requests, since before it the cost of drafting is unknown; the
# intervals double.
PAUSE_PASSES = 4
LONGEST_PAUSE = 16
# Pause when many requests have begun at once, long enough to measure plain passes.
NEW_LOAD_PAUSE_PASSES = 8
FIRST_PAUSE_AFTER = 32
FIRST_PAUSE_IN_COMPANY_AFTER = 12
LONGEST_BETWEEN_PAUSES = 384
# While drafting does not pay: trials of this many rounds, after those in which drafters prefill, within this share of
# the time, which falls to the lowest one while trials show no gain. Up to MOST_TOGETHER running requests try together,
# since joint drafting behaves differently from one request that misses passes. Of more, one tries alone, because
# drafters would have to prefill all of them. A trial of one is charged ALONE_CHARGE of the time: it delays others a
# little.
TRIAL_ROUNDS = 8
LONGEST_TRIAL = 128
FIRST_TRIAL_SHARE = 0.03
LOWEST_TRIAL_SHARE = 0.0075
MOST_TOGETHER = 16
ALONE_CHARGE = 0.25
# Above FEW_TOGETHER requests, all try again only after one alone found a gain, or after this many that did not:
# prefilling for many takes seconds in which everything is slower.
FEW_TOGETHER = 4
TRIALS_ALONE = 16
# Factor by which the number of requests changes before trials start over.
OTHER_LOAD = 4.0


class Exploration:
    """Decides when to pause drafting and when to try it again.

    In the long run pauses take about 1 % of passes, and trials from 3 % down to less than 1 % of the time. A request
    that tries alone is drawn at random, so that none is excluded for good.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._load = 1.0
        self._between_pauses = 0.0
        self._until_pause = 0.0
        self._pause_left = self._pause_passes = 0
        self._trial_left = self._trial_passes = 0
        self._trial_share = FIRST_TRIAL_SHARE
        # Time budget of trials; at first and after a change of load, one may begin at once.
        self._credit_s = 0.0
        self._owes_trial = True
        self._alone_chance = 0.0
        self._num_alone = 0
        # Trials of one request left before the next joint one.
        self._num_alone_first = 0
        # Totals: pauses, joint trials, and trials of one request.
        self.num_pauses = self.num_trials = self.num_trials_alone = 0

    @property
    def is_pausing(self) -> bool:
        """Whether no request drafts now."""
        return self._pause_left > 0

    @property
    def is_trying(self) -> bool:
        """Whether all requests draft now."""
        return self._trial_left > 0

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a pause nor a joint trial."""
        return not self._pause_left and not self._trial_left

    def pause(self) -> None:
        """Pause drafting after a change of load, unless a pause or trial runs."""
        if not self._trial_left and not self._pause_left:
            self._pause_left, self._pause_passes = NEW_LOAD_PAUSE_PASSES, 0

    def owe_trial(self) -> None:
        """Let the next trial begin at once."""
        self._owes_trial = True

    def next_pass(
        self,
        num_running: int,
        num_asked: int,
        num_rounds: int,
        seconds: float,
        is_settled: bool,
        ran_as_planned: bool = True,
    ) -> bool:
        """Count a pass, `num_asked` of its rounds asking for drafts; returns whether it ends a joint trial.

        `is_settled`: drafters have prefilled all asking requests. `ran_as_planned`: the verifier knew which requests
        ask. Only then the pass counts for a pause or trial.
        """
        if num_running and not 1 / OTHER_LOAD < num_running / self._load < OTHER_LOAD:
            self._load = float(num_running)
            self._trial_share = FIRST_TRIAL_SHARE
            self._owes_trial = True
            self._num_alone_first = 0
            self._between_pauses = 0.0
        self._credit_s += self._trial_share * seconds
        if self._trial_left > 0:
            self._credit_s -= seconds
            self._trial_passes += 1
            self._trial_left = (
                0 if self._trial_passes == LONGEST_TRIAL else self._trial_left - (is_settled and ran_as_planned)
            )
            if not self._trial_left:
                self._num_alone_first = TRIALS_ALONE
            return not self._trial_left
        self._alone_chance = 0.0
        if self._num_alone > 0:
            self._credit_s -= ALONE_CHARGE * seconds
        elif self._pause_left > 0:
            self._pause_passes += 1
            is_full = ran_as_planned and num_rounds >= FULL_SHARE * num_running
            self._pause_left = 0 if self._pause_passes == LONGEST_PAUSE else self._pause_left - is_full
        elif num_asked:
            self._count_down(num_running)
        elif self._owes_trial or self._random.random() < self._credit_s / (TRIAL_ROUNDS * seconds):
            self._begin_trial(num_running)
        return False

    def tries_alone(self) -> bool:
        """Whether a request that does not draft begins a trial; to be called once per round of it."""
        if self._num_alone > 0 or self._random.random() >= self._alone_chance:
            return False
        self._owes_trial = False
        self._num_alone += 1
        self._num_alone_first -= self._num_alone_first > 0
        self.num_trials_alone += 1
        return True

    def tried_alone(self) -> None:
        """End a trial of one request, or of a request that ended."""
        self._num_alone -= 1

    def trial_over(self, found_gain: bool) -> None:
        """Set the share of time for trials by the result of one."""
        if found_gain:
            self._num_alone_first = 0
        self._trial_share = FIRST_TRIAL_SHARE if found_gain else max(LOWEST_TRIAL_SHARE, 0.75 * self._trial_share)

    def _begin_trial(self, num_running: int) -> None:
        if num_running <= (MOST_TOGETHER if not self._num_alone_first else FEW_TOGETHER):
            self._owes_trial = False
            self._credit_s = min(self._credit_s, 0.0)
            self._trial_left, self._trial_passes = TRIAL_ROUNDS, 0
            self.num_trials += 1
        else:
            self._alone_chance = 1 / num_running

    def _count_down(self, num_running: int) -> None:
        if self._between_pauses == 0:
            first = FIRST_PAUSE_AFTER if num_running <= 1 else FIRST_PAUSE_IN_COMPANY_AFTER
            self._between_pauses = self._until_pause = float(first)
        self._until_pause -= 1
        if self._until_pause <= 0:
            self._pause_left, self._pause_passes = PAUSE_PASSES, 0
            self.num_pauses += 1
            self._between_pauses = min(LONGEST_BETWEEN_PAUSES, 2 * self._between_pauses)
            self._until_pause = self._between_pauses * self._random.uniform(0.75, 1.25)
