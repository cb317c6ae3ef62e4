"""Comparison of several sources, each alone and all together, in turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Observed rounds of a turn, and upper bound of its passes.
TURN_ROUNDS = 12
LONGEST_TURN = 48
# A turn ends early after this many rounds below HOPELESS_SHARE of the best's, or plain decoding's, tokens per second.
FEWEST_ROUNDS = 6
HOPELESS_SHARE = 0.75
# Prior weight, in promised tokens, of accepted per promised tokens being 1.
_PRIOR_TOKENS = 16.0

Sources = tuple[str, ...]
# Passes between comparisons; doubles each time until a trial finds a gain.
FIRST_BETWEEN = 1024
LONGEST_BETWEEN = 16384
# Due after this share of the interval already if tokens per round have changed by a factor of OTHER_TOKENS since the
# asked sources had PASSES_TO_KNOW_TOKENS passes.
SHARE_WHEN_TOKENS_CHANGE = 0.25
OTHER_TOKENS = 1.5
PASSES_TO_KNOW_TOKENS = 64


class SourceComparison:
    """Gives each source a turn alone, and all a turn together; then the better half further turns (successive halving).

    The score is tokens per round over time per round. Accepted tokens vary by about their mean, so promised tokens are
    used, corrected by the ratio of accepted to promised ones.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Raises ValueError for fewer than two sources."""
        if len(names) < 2:
            raise ValueError(f"of {list(names)} none can be better than another")
        self._ranked: list[Sources] = [*((name,) for name in names), tuple(names)]
        self._records = {sources: _Record() for sources in self._ranked}
        # Remaining candidates, and how many of them have had their turn.
        self._num_left = len(self._ranked)
        self._num_done = 0
        # Of the turn: sources whose trees have arrived, observed rounds, and passes.
        self._have_come: set[str] = set()
        self._num_rounds = self._num_passes = 0
        # Tokens per second of a request without drafts, as far as known.
        self._plain = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the best is known."""
        return self._num_left == 1

    @property
    def turn(self) -> Sources:
        """Sources to ask now; the best at the end."""
        return self._ranked[self._num_done]

    @property
    def ranked(self) -> list[str]:
        """All sources, best first as far as known."""
        return [sources[0] for sources in self._ranked if len(sources) == 1]

    def learn(self, promised: float, accepted: int, come: Collection[str]) -> None:
        """Learn from a round that asked these sources, once trees of all have arrived after prefill.

        `come` are sources with trees in this round.
        """
        self._have_come.update(come)
        if self._is_under_way:
            self._num_rounds += 1
            self._records[self.turn].add_round(promised, accepted)

    def pass_over(self, seconds: float | None, plain: float = 0.0) -> None:
        """Count a pass with asking rounds; `seconds` is None if its time is not representative.

        `plain` is a request's tokens per second without drafts; 0 if unknown. The comparison ends if the best is no
        better.
        """
        if self.is_over:
            return
        self._plain = plain
        self._num_passes += 1
        if self._is_under_way and seconds is not None:
            self._records[self.turn].add_pass(seconds)
        if self._num_rounds >= TURN_ROUNDS or self._num_passes >= LONGEST_TURN or self._is_hopeless:
            self._next()

    @property
    def _is_under_way(self) -> bool:
        return self._have_come.issuperset(self.turn)

    @property
    def _is_hopeless(self) -> bool:
        if self._num_rounds < FEWEST_ROUNDS:
            return False
        best = max(self._plain, *(record.tokens_per_s for record in self._records.values()))
        return self._records[self.turn].tokens_per_s < HOPELESS_SHARE * best

    def _next(self) -> None:
        self._have_come = set()
        self._num_rounds = self._num_passes = 0
        self._num_done += 1
        if self._num_done == self._num_left:
            left = self._ranked[: self._num_left]
            left.sort(key=lambda sources: -self._records[sources].tokens_per_s)
            self._ranked[: self._num_left] = left
            self._num_left = self._num_worth_another_turn([self._records[sources].tokens_per_s for sources in left])
            self._num_done = 0

    def _num_worth_another_turn(self, speeds: Sequence[float]) -> int:
        """Number of candidates with another turn, given speeds in descending order; 1 ends the comparison."""
        if speeds[0] <= self._plain:
            return 1
        return min((len(speeds) + 1) // 2, sum(speed >= HOPELESS_SHARE * speeds[0] for speed in speeds))


@dataclass
class _Record:
    """Totals of a candidate's rounds and passes."""

    num_rounds: int = 0
    promised: float = 0.0
    accepted: int = 0
    num_passes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of a request; 0 without observations."""
        if not self.num_rounds or not self.seconds:
            return 0.0
        kept = (_PRIOR_TOKENS + self.accepted) / (_PRIOR_TOKENS + self.promised)
        return (1 + kept * self.promised / self.num_rounds) * self.num_passes / self.seconds

    def add_round(self, promised: float, accepted: int) -> None:
        self.num_rounds += 1
        self.promised += promised
        self.accepted += accepted

    def add_pass(self, seconds: float) -> None:
        self.num_passes += 1
        self.seconds += seconds


class ComparisonPace:
    """Passes since the last comparison, and tokens per round after it."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._between = FIRST_BETWEEN
        # Passes with the current sources, and tokens per round once there were enough.
        self._num_alike = 0
        self._usual_tokens: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether the interval since the last comparison is over."""
        return self._num_passes >= self._between

    def is_due_for(self, tokens: float) -> bool:
        """Whether a comparison is due early, because tokens per round differ from those with the new sources."""
        usual = self._usual_tokens
        if usual is None or self._num_passes < SHARE_WHEN_TOKENS_CHANGE * self._between:
            return False
        return not usual / OTHER_TOKENS < tokens < usual * OTHER_TOKENS

    def pass_over(self) -> None:
        """Count a pass, with or without drafts."""
        self._num_passes += 1

    def drafted(self, tokens: float) -> None:
        """Count a pass with drafts; `tokens` is the current mean per round."""
        self._num_alike += 1
        if self._num_alike == PASSES_TO_KNOW_TOKENS:
            self._usual_tokens = tokens

    def sources_changed(self) -> None:
        """Reset after a change of sources."""
        self._num_alike, self._usual_tokens = 0, None

    def begun_anew(self) -> None:
        """Double the interval to the comparison after this one."""
        self._between = min(LONGEST_BETWEEN, 2 * self._between)

    def over(self) -> None:
        """Restart the interval after a comparison."""
        self._num_passes = 0

    def found_gain(self) -> None:
        """Reset the interval: drafting pays with the compared sources."""
        self._between = FIRST_BETWEEN
