"""Value and cost of one source."""

from __future__ import annotations

from dataclasses import dataclass, field

# Least rounds of a source before its share changes, and prior of its added tokens.
FEWEST_ROUNDS = 16
_PRIOR_ROUNDS = 2
_PRIOR_ADDED = 0.5
# Weight of a round in running means.
RATE = 1 / 32
# Relative change of the number of requests that makes times obsolete; upper bound of a pass's weight, in mean passes.
_SAME_LOAD = 0.25
_OUTLIER = 3.0
_FEWEST_PASSES = 3
# Decay of a time's weight per pass of the other kind, and prior weight of no difference, in passes.
_FADE = 1 - 1 / 512
_DOUBTED_PASSES = 12.0


@dataclass
class RoundTime:
    """Running mean of round times at one load; `weight` in passes."""

    load: int = 0
    weight: float = 0.0
    seconds: float = 0.0

    def is_at(self, load: int) -> bool:
        """Whether it was measured with about `load` requests."""
        return abs(load - self.load) <= _SAME_LOAD * self.load

    def add(self, seconds: float, load: int) -> None:
        """Add a round's time with `load` running requests."""
        if not self.is_at(load):
            self.load, self.weight = load, 0.0
        if self.weight >= _FEWEST_PASSES:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.weight += 1
        self.seconds += max(RATE, 1 / self.weight) * (seconds - self.seconds)

    def fade(self) -> None:
        """Age by a pass of the other kind."""
        self.weight *= _FADE


@dataclass
class SourceValue:
    """Statistics of one source, and the share of requests that ask it."""

    share: float = 0.0
    # Accepted tokens per round that only it proposed, over `num_rounds` rounds.
    added: float = _PRIOR_ADDED
    num_rounds: int = 0
    num_pauses: int = 0
    num_trials: int = 0
    with_source: RoundTime = field(default_factory=RoundTime)
    without_source: RoundTime = field(default_factory=RoundTime)

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations."""
        return self.num_rounds >= FEWEST_ROUNDS and self.without_source.weight > 0

    @property
    def cost(self) -> float:
        """Relative increase of round time; reduced by uncertainty if all requests ask the source already."""
        with_it, without = self.with_source, self.without_source
        if not with_it.weight or not without.weight or not without.is_at(with_it.load):
            return 0.0
        cost = max(0.0, with_it.seconds / without.seconds - 1)
        if self.share < 1:
            return cost
        weight = min(with_it.weight, without.weight)
        return cost * weight / (weight + _DOUBTED_PASSES)

    def learn(self, added: int) -> None:
        """Record a round that asked it, and accepted tokens that only it proposed."""
        self.num_rounds += 1
        self.added += max(RATE, 1 / (_PRIOR_ROUNDS + self.num_rounds)) * (added - self.added)

    def took(self, seconds: float, share: float, load: int, is_joint: bool) -> None:
        """Record a pass's time; `share` of its asking rounds had asked this source.

        `is_joint`: the pass waited for all of them.
        """
        if share >= 0.5 or (share > 0 and is_joint):
            self.with_source.add(seconds, load)
            self.without_source.fade()
        elif share == 0:
            self.without_source.add(seconds, load)
            self.with_source.fade()
