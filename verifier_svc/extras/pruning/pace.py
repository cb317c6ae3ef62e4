"""The decision to prune a pass early: only where that makes passes like it shorter. Pure.

Learned from the passes that ran, by pairs of neighbours of about the same size, of which one was pruned: a machine that
slows down slows both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verifier_svc.engine.pass_plan import padded_size
from verifier_svc.verify.draw_rule import Thresholds

# Of so many passes that could be pruned, one is run the other way: what was learned may have changed.
TRY_ONE_IN = 64
# Pairs of a size from which on its gain is known; until then its passes are pruned in turn.
LEAST_PAIRS = 8
# Passes of a size are larger than the smallest by less than this factor.
_SIZE_STEP = math.sqrt(2)
# Weight of a pair in the running mean, once there are many, and the most that one counts: the rest is a neighbour's.
_MEAN_RATE = 0.1
_MOST_GAIN = math.log(2)
# A lost token costs what hangs behind it, too: about so many tokens in all.
_LOST_BEHIND = 2.0

AUTO, ON, COMPARE = "auto", "on", "compare"


@dataclass(frozen=True, slots=True)
class PruningSettings:
    """What early pruning a target offers.

    Up to `free_rows` rows, a pass costs the same. `switch`: whether passes are pruned where that is worth it, all of
    them, or each is run both ways.
    """

    thresholds: Thresholds
    free_rows: int
    row_multiple: int = 1
    switch: str = AUTO

    @property
    def lost_share(self) -> float:
        """The share of a pass's tokens that pruning may lose, since the next round has to draft them again."""
        return _LOST_BEHIND * (1 - min(threshold.recall for threshold in self.thresholds))


@dataclass(slots=True)
class _Size:
    """Passes of about the same size. `gain`: the mean logarithm of the time without pruning over that with it."""

    gain: float = 0.0
    num_pairs: int = 0
    num_asked: int = 0
    # Of the last pass: whether it was pruned, and its seconds for each row that it began with.
    last: tuple[bool, float] | None = None

    def learn(self, seconds_per_row: float, *, was_pruned: bool) -> None:
        if self.last is not None and self.last[0] != was_pruned:
            whole, pruned = (self.last[1], seconds_per_row) if was_pruned else (seconds_per_row, self.last[1])
            gain = min(max(math.log(whole / pruned), -_MOST_GAIN), _MOST_GAIN)
            self.num_pairs += 1
            self.gain += max(1 / self.num_pairs, _MEAN_RATE) * (gain - self.gain)
        self.last = was_pruned, seconds_per_row


@dataclass(slots=True)
class PassTimes:
    """Passes, the rows that they began with, and their seconds, all added up."""

    num_passes: int = 0
    num_rows: int = 0
    seconds: float = 0.0


@dataclass
class PruningPace:
    """One engine's judgement of whether to prune the next pass. `times` are by whether passes were pruned."""

    settings: PruningSettings
    times: dict[bool, PassTimes] = field(default_factory=lambda: {False: PassTimes(), True: PassTimes()})
    _sizes: dict[int, _Size] = field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether passes are run both ways, for measurement."""
        return self.settings.switch == COMPARE

    def prunes(self, num_rows: int, num_candidates: int) -> bool:
        """Whether to prune a pass of so many rows, of which some may be pruned."""
        if num_candidates == 0 or self.settings.switch == ON:
            return num_candidates > 0
        # Not even worth a try where all of them together would save nothing.
        if self._computed(num_rows) == self._computed(num_rows - num_candidates):
            return False
        size = self._size(num_rows)
        if size.num_pairs < LEAST_PAIRS:
            return size.last is not None and not size.last[0]
        size.num_asked += 1
        pays = size.gain > self.settings.lost_share
        return not pays if size.num_asked % TRY_ONE_IN == 0 else pays

    def pass_over(self, num_rows: int, seconds: float, *, was_pruned: bool) -> None:
        """Learn from a pass over rounds alone that could be pruned, and began with so many rows."""
        times = self.times[was_pruned]
        times.num_passes += 1
        times.num_rows += num_rows
        times.seconds += seconds
        if seconds > 0:
            self._size(num_rows).learn(seconds / num_rows, was_pruned=was_pruned)

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(int(math.log(num_rows, _SIZE_STEP)), _Size())

    def _computed(self, num_rows: int) -> int:
        """Rows that a pass takes as long as."""
        return max(self.settings.free_rows, padded_size(num_rows, self.settings.row_multiple))
