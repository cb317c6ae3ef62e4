"""The gain and the cost of one source."""

from __future__ import annotations

from dataclasses import dataclass, field

# Rounds that a source is known from before its share changes, and what it is taken to add until then.
FEWEST_ROUNDS = 16
_PRIOR_ROUNDS = 2
_PRIOR_ADDED = 0.5
# Weight of a round in running means.
RATE = 1 / 32
# A number of requests that differs by more than this share is another load; a pass counts as this many usual ones at
# most.
_SAME_LOAD = 0.25
_OUTLIER = 3.0
_FEWEST_PASSES = 3
# What is left of the weight of times with each pass without new ones, and how many passes count for no difference.
_FADE = 1 - 1 / 512
_DOUBTED_PASSES = 12.0


@dataclass
class RoundTime:
    """A running mean of times of rounds, at one load; `weight` is in passes."""

    load: int = 0
    weight: float = 0.0
    seconds: float = 0.0

    def is_at(self, load: int) -> bool:
        """Whether it is of about so many requests."""
        return abs(load - self.load) <= _SAME_LOAD * self.load

    def add(self, seconds: float, load: int) -> None:
        """A round took so long while so many requests ran."""
        if not self.is_at(load):
            self.load, self.weight = load, 0.0
        if self.weight >= _FEWEST_PASSES:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.weight += 1
        self.seconds += max(RATE, 1 / self.weight) * (seconds - self.seconds)

    def fade(self) -> None:
        """A pass of the other kind has gone by, since when this is less certain."""
        self.weight *= _FADE


@dataclass
class SourceValue:
    """What is known of one source, and the share of requests that ask it."""

    share: float = 0.0
    # Accepted tokens per round that it alone had proposed, from so many rounds.
    added: float = _PRIOR_ADDED
    num_rounds: int = 0
    num_pauses: int = 0
    num_trials: int = 0
    with_source: RoundTime = field(default_factory=RoundTime)
    without_source: RoundTime = field(default_factory=RoundTime)

    @property
    def is_known(self) -> bool:
        """Whether there is enough to judge it by."""
        return self.num_rounds >= FEWEST_ROUNDS and self.without_source.weight > 0

    @property
    def cost(self) -> float:
        """The share by which it makes rounds longer; as far as that is certain, where everybody asks it already."""
        with_it, without = self.with_source, self.without_source
        if not with_it.weight or not without.weight or not without.is_at(with_it.load):
            return 0.0
        cost = max(0.0, with_it.seconds / without.seconds - 1)
        if self.share < 1:
            return cost
        weight = min(with_it.weight, without.weight)
        return cost * weight / (weight + _DOUBTED_PASSES)

    def learn(self, added: int) -> None:
        """It was asked for a round, and had alone proposed so many of its accepted tokens."""
        self.num_rounds += 1
        self.added += max(RATE, 1 / (_PRIOR_ROUNDS + self.num_rounds)) * (added - self.added)

    def took(self, seconds: float, share: float, load: int, is_joint: bool) -> None:
        """A pass took so long, and this share of its rounds that had asked for drafts had asked for its.

        `is_joint` says that it waited for all of them.
        """
        if share >= 0.5 or (share > 0 and is_joint):
            self.with_source.add(seconds, load)
            self.without_source.fade()
        elif share == 0:
            self.without_source.add(seconds, load)
            self.with_source.fade()
