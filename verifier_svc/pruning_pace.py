"""When early pruning is worth its step: a pass is pruned only where the rows saved pay for it. Pure.

Learned from the passes that ran: what a row costs, which share of its candidates a pass loses, and what the step takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from verifier_svc.draw_rule import Thresholds
from verifier_svc.pass_cost import PassCost
from verifier_svc.pass_plan import padded_size

# Of so many passes that could be pruned, one is run the other way: what was learned may have changed.
TRY_ONE_IN = 64
# Weight of a pass in the running means.
_MEAN_RATE = 0.1
# A lost token costs what hangs behind it, too: about so many tokens in all.
_LOST_BEHIND = 2.0


@dataclass(frozen=True, slots=True)
class PruningSettings:
    """What early pruning a target offers.

    `share_behind` is the share of a row's cost that comes behind the head. Up to `free_rows` rows, a pass costs the
    same. With `is_forced` every pass is pruned, be it worth it or not.
    """

    thresholds: Thresholds
    share_behind: float
    free_rows: int
    row_multiple: int = 1
    is_forced: bool = False

    @property
    def lost_share(self) -> float:
        """The share of a pass's tokens that pruning may lose, since the next round has to draft them again."""
        return _LOST_BEHIND * (1 - min(threshold.recall for threshold in self.thresholds))


class PruningPace:
    """One engine's judgement of whether to prune the next pass."""

    def __init__(self, settings: PruningSettings) -> None:
        self._settings = settings
        self._cost = PassCost()
        # Of the candidates pruned, and of a step's seconds; None before the first.
        self._share: float | None = None
        self._step_s = 0.0
        self._num_asked = 0

    def prunes(self, num_rows: int, num_candidates: int) -> bool:
        """Whether to prune a pass of so many rows, of which some may be pruned."""
        if num_candidates == 0 or self._settings.is_forced:
            return num_candidates > 0
        # Not even worth a try where all of them together would not pay.
        if not self._pays(num_rows, num_candidates, 1.0):
            return False
        self._num_asked += 1
        pays = self._share is None or self._pays(num_rows, num_candidates, self._share)
        return not pays if self._num_asked % TRY_ONE_IN == 0 else pays

    def pass_over(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass over rounds alone that was not pruned."""
        self._cost.add(self._computed(num_rows), seconds)

    def pruned(self, num_candidates: int, num_pruned: int, step_s: float) -> None:
        """Learn from a pass that was pruned."""
        share = num_pruned / num_candidates
        if self._share is None:
            self._share, self._step_s = share, step_s
        self._share += _MEAN_RATE * (share - self._share)
        self._step_s += _MEAN_RATE * (step_s - self._step_s)

    def _pays(self, num_rows: int, num_candidates: int, share: float) -> bool:
        """Whether the rows saved take longer than the step and what is lost with tokens that should have stayed."""
        line = self._cost.line
        if line is None:
            return False
        own_s, row_s = line
        computed = self._computed(num_rows)
        saved = computed - self._computed(num_rows - int(share * num_candidates))
        pass_s = max(0.0, own_s) + row_s * computed
        return row_s * saved * self._settings.share_behind > self._step_s + self._settings.lost_share * pass_s

    def _computed(self, num_rows: int) -> int:
        """Rows that a pass takes as long as."""
        return max(self._settings.free_rows, padded_size(num_rows, self._settings.row_multiple))
