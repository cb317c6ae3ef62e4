"""Decision whether to prune a pass early, from the measured effect on similar passes. Pure.

Passes of about the same size are compared in pairs of neighbours, one pruned and one not: a change in the machine's
speed affects both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verifier_svc.engine.pass_plan import padded_size
from verifier_svc.verify.draw_rule import Thresholds

# One in this many prunable passes is run the other way, to track changes.
TRY_ONE_IN = 64
# Pairs of a size class before its gain is used; until then its passes alternate.
LEAST_PAIRS = 8
# Ratio between the bounds of a size class.
_SIZE_STEP = math.sqrt(2)
# Least weight of a pair in the running mean, and bound of one pair's gain: larger ratios are noise of neighbours.
_MEAN_RATE = 0.1
_MOST_GAIN = math.log(2)
# Tokens lost per pruned token that the target would have accepted, descendants included.
_LOST_BEHIND = 2.0

AUTO, ON, COMPARE = "auto", "on", "compare"


@dataclass(frozen=True, slots=True)
class PruningSettings:
    """Early pruning of a target.

    Passes of up to `free_rows` rows take the same time. `switch`: prune where it pays, always, or run each pass both
    ways.
    """

    thresholds: Thresholds
    free_rows: int
    row_multiple: int = 1
    switch: str = AUTO

    @property
    def lost_share(self) -> float:
        """Share of a pass's tokens that pruning may lose; the next round has to draft them again."""
        return _LOST_BEHIND * (1 - min(threshold.recall for threshold in self.thresholds))


@dataclass(slots=True)
class _Size:
    """Passes of about the same size. `gain`: mean log of the ratio of times without and with pruning."""

    gain: float = 0.0
    num_pairs: int = 0
    num_asked: int = 0
    # Of the last pass: whether it was pruned, and its seconds per row before pruning.
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
    """Totals: passes, their rows before pruning, and seconds."""

    num_passes: int = 0
    num_rows: int = 0
    seconds: float = 0.0


@dataclass
class PruningPace:
    """Pruning decisions of one engine. `times` by whether passes were pruned."""

    settings: PruningSettings
    times: dict[bool, PassTimes] = field(default_factory=lambda: {False: PassTimes(), True: PassTimes()})
    _sizes: dict[int, _Size] = field(default_factory=dict)

    @property
    def compares(self) -> bool:
        """Whether passes run both ways, for measurement."""
        return self.settings.switch == COMPARE

    def prunes(self, num_rows: int, num_candidates: int) -> bool:
        """Whether to prune a pass of `num_rows` rows, of which `num_candidates` may be pruned."""
        if num_candidates == 0 or self.settings.switch == ON:
            return num_candidates > 0
        # Not tried if pruning all candidates would save nothing.
        if self._computed(num_rows) == self._computed(num_rows - num_candidates):
            return False
        size = self._size(num_rows)
        if size.num_pairs < LEAST_PAIRS:
            return size.last is not None and not size.last[0]
        size.num_asked += 1
        pays = size.gain > self.settings.lost_share
        return not pays if size.num_asked % TRY_ONE_IN == 0 else pays

    def pass_over(self, num_rows: int, seconds: float, *, was_pruned: bool) -> None:
        """Learn from a prunable pass without prefill; `num_rows` before pruning."""
        times = self.times[was_pruned]
        times.num_passes += 1
        times.num_rows += num_rows
        times.seconds += seconds
        if seconds > 0:
            self._size(num_rows).learn(seconds / num_rows, was_pruned=was_pruned)

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(int(math.log(num_rows, _SIZE_STEP)), _Size())

    def _computed(self, num_rows: int) -> int:
        """Rows of the smallest pass with the same duration."""
        return max(self.settings.free_rows, padded_size(num_rows, self.settings.row_multiple))
