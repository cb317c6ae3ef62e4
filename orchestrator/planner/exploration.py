"""The small share of rounds that is spent on finding out whether the other way would be better by now. Seeded."""

from __future__ import annotations

import random

from orchestrator.planner.passes import FULL_SHARE

# Where drafting pays: so many passes in a row without it, for everyone, after those that requests miss which still
# wait. The first pause comes soon, in company sooner, since before it the cost of drafting is not known; to each
# further one it takes twice as long.
PAUSE_PASSES = 4
LONGEST_PAUSE = 16
# When many requests have begun at once: as many as it takes to know what plain passes reach now.
NEW_LOAD_PAUSE_PASSES = 8
FIRST_PAUSE_AFTER = 32
FIRST_PAUSE_IN_COMPANY_AFTER = 12
LONGEST_BETWEEN_PAUSES = 384
# Where it does not pay: it is tried for so many rounds in a row, after those in which drafters catch up, as often as
# this share of the time allows, which falls to the lower one while trials show no gain. Up to so many running requests
# try together, since drafts that everybody waits for are another thing than drafts that one request misses passes for.
# Of more, one tries alone, because drafters would have to catch up with all of them.
# What one that tries alone is charged, as a share of the time: it holds up the others a little.
TRIAL_ROUNDS = 8
LONGEST_TRIAL = 128
FIRST_TRIAL_SHARE = 0.03
LOWEST_TRIAL_SHARE = 0.0075
MOST_TOGETHER = 16
ALONE_CHARGE = 0.25
# All of more than a few try again when one alone has found a gain, or after so many that have not: drafters have to
# catch up with each, and of many that takes seconds in which everything is slower.
FEW_TOGETHER = 4
TRIALS_ALONE = 16
# A load that has changed by this factor is another one.
OTHER_LOAD = 4.0


class Exploration:
    """Decides when to pause drafting and when to try it again.

    Pauses soon take about 1 % of passes, and trials between 3 % and less than 1 % of the time. Who tries alone is drawn
    by lot, so that no request is written off for good, whatever its record.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._load = 1.0
        self._between_pauses = 0.0
        self._until_pause = 0.0
        self._pause_left = self._pause_passes = 0
        self._trial_left = self._trial_passes = 0
        self._trial_share = FIRST_TRIAL_SHARE
        # Time that trials may take; at first, and when the load has changed, one may begin at once.
        self._credit_s = 0.0
        self._owes_trial = True
        self._alone_chance = 0.0
        self._num_alone = 0
        # Trials of one alone that come before the next one of all.
        self._num_alone_first = 0
        # Since the start: pauses, trials of all, and of one alone.
        self.num_pauses = self.num_trials = self.num_trials_alone = 0

    @property
    def is_pausing(self) -> bool:
        """Whether nobody drafts now."""
        return self._pause_left > 0

    @property
    def is_trying(self) -> bool:
        """Whether everybody drafts now."""
        return self._trial_left > 0

    @property
    def is_idle(self) -> bool:
        """Whether everybody does what pays."""
        return not self._pause_left and not self._trial_left

    def pause(self) -> None:
        """Let nobody draft for the next passes, since the load is another one; unless something is tried already."""
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
        """A pass of so many rounds that took so long has ended, of which so many had asked for drafts.

        `is_settled` says that drafters have caught up with those who ask, `ran_as_planned` that the verifier had heard
        who is to ask. Only then it counts as one that was to be tried.
        Returns whether a trial of all has ended with it.
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
        """Whether a request that does not draft tries it for its next rounds; asked once in each of its rounds."""
        if self._num_alone > 0 or self._random.random() >= self._alone_chance:
            return False
        self._owes_trial = False
        self._num_alone += 1
        self._num_alone_first -= self._num_alone_first > 0
        self.num_trials_alone += 1
        return True

    def tried_alone(self) -> None:
        """The request that tried alone is done, or has ended."""
        self._num_alone -= 1

    def trial_over(self, found_gain: bool) -> None:
        """Try again soon, or rather later."""
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
