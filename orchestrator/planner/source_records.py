"""Records of several drafters' trees for the same rounds: how long each takes, what one adds to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# Rounds that two drafters' trees were compared in, and trees of one, before anything is concluded.
FEWEST_ROUNDS = 8
# Weight of a round, or a tree, in running means.
_RATE = 1 / 16
# A tree that is awaited is given up when it is late by so many usual differences from the mean.
_LATE = 2.0


@dataclass(slots=True)
class _Mean:
    """A running mean, and that of differences from it."""

    count: int = 0
    value: float = 0.0
    spread: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        rate = max(_RATE, 1 / self.count)
        self.spread += rate * (abs(value - self.value) * (self.count > 1) - self.spread)
        self.value += rate * (value - self.value)

    @property
    def is_known(self) -> bool:
        return self.count >= FEWEST_ROUNDS


@dataclass
class SourceRecords:
    """Records of all requests of one kind.

    Committed tokens are the same whatever was drafted. So they tell of every tree how many of its tokens would have
    been accepted, of one that came late or was never verified too, and what a round would have gained by waiting.
    """

    # Rounds whose first tree was kept for another one's.
    num_waits: int = 0
    _seconds: defaultdict[str, _Mean] = field(default_factory=lambda: defaultdict(_Mean))
    _gains: defaultdict[tuple[str, str], _Mean] = field(default_factory=lambda: defaultdict(_Mean))

    def took(self, source: str, seconds: float) -> None:
        """A source's tree was there so long after it was asked for."""
        self._seconds[source].add(seconds)

    def compare(self, accepted: Mapping[str, int]) -> None:
        """Of one round: the tokens that each source's tree had right."""
        for one, its in accepted.items():
            for other, others in accepted.items():
                if one != other:
                    self._gains[one, other].add(max(0, others - its))

    def worthwhile_wait_s(
        self, there: Collection[str], missing: Collection[str], elapsed_s: float, tokens_per_s: float
    ) -> float:
        """How long a round had better wait for more trees, at most; 0 for not at all.

        `there` are the sources whose trees have come, `elapsed_s` after they were asked for. A tree is worth its wait
        if it is expected to add more tokens than come in that time anyway, of all requests.
        """
        longest_s = 0.0
        for source in missing:
            seconds, gains = self._seconds[source], [self._gains[one, source] for one in there]
            latest_s = seconds.value + _LATE * seconds.spread - elapsed_s
            if not seconds.is_known or not all(gain.is_known for gain in gains):
                continue
            gain = min(gain.value for gain in gains)
            if gain > tokens_per_s * max(0.0, seconds.value - elapsed_s):
                longest_s = max(longest_s, latest_s)
        return longest_s
