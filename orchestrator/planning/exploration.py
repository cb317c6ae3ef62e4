"""The small share of rounds that is spent on finding out whether the other way would be better by now. Seeded."""

from __future__ import annotations

import random

# Where drafting pays: so many passes in a row without it, for everyone, after so many with it. The first pause comes
# soon, in company sooner, since without it the cost of drafting is not known; each further one takes twice as long.
PAUSE_PASSES = 3
FIRST_PAUSE_AFTER = 32
FIRST_PAUSE_IN_COMPANY_AFTER = 12
LONGEST_BETWEEN_PAUSES = 384
# Where it does not: a request tries so many rounds in a row with it. It begins with this chance per round, which falls
# to the lower one while trying shows no gain; one in so many running requests tries at a time.
PROBE_ROUNDS = 6
FIRST_PROBE_CHANCE = 1 / 96
LOWEST_PROBE_CHANCE = 1 / 768
RUNNING_PER_PROBE = 16
# A load that has changed by this factor is another one.
OTHER_LOAD = 4.0


class Exploration:
    """Decides when to pause drafting and when to try it again: at most about 6 % of rounds, soon about 1 %.

    Probes go to requests at random, so that no request is written off for good whatever its record.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._load = 1.0
        self._between_pauses = 0.0
        self._until_pause = 0.0
        self._pause_left = 0
        self._probe_chance = FIRST_PROBE_CHANCE
        self._num_probing = 0

    @property
    def is_pausing(self) -> bool:
        """Whether nobody drafts now."""
        return self._pause_left > 0

    def next_pass(self, num_running: int, num_asked: int) -> None:
        """A pass has ended in which so many rounds had asked for drafts."""
        if not 1 / OTHER_LOAD < num_running / self._load < OTHER_LOAD:
            self._load = float(num_running)
            self._probe_chance = FIRST_PROBE_CHANCE
            self._between_pauses = 0.0
        if self._pause_left > 0:
            self._pause_left -= 1
        elif num_asked:
            self._count_down(num_running)

    def begins_probe(self, num_running: int) -> bool:
        """Whether a request that does not draft tries it for its next rounds."""
        if self._num_probing * RUNNING_PER_PROBE >= max(1, num_running) or self._random.random() >= self._probe_chance:
            return False
        self._num_probing += 1
        return True

    def probe_over(self, found_gain: bool) -> None:
        """A probe has ended, or its request has."""
        self._num_probing -= 1
        self._probe_chance = FIRST_PROBE_CHANCE if found_gain else max(LOWEST_PROBE_CHANCE, self._probe_chance / 2)

    def _count_down(self, num_running: int) -> None:
        if self._between_pauses == 0:
            first = FIRST_PAUSE_AFTER if num_running <= 1 else FIRST_PAUSE_IN_COMPANY_AFTER
            self._between_pauses = self._until_pause = float(first)
        self._until_pause -= 1
        if self._until_pause <= 0:
            self._pause_left = PAUSE_PASSES
            self._between_pauses = min(LONGEST_BETWEEN_PAUSES, 2 * self._between_pauses)
            self._until_pause = self._between_pauses * self._random.uniform(0.75, 1.25)
