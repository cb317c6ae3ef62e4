"""Comparison of several sources, each alone and all together, in turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# A turn lasts for so many rounds that were looked at, and for no more passes than these.
TURN_ROUNDS = 12
LONGEST_TURN = 48
# A turn is over after so many rounds already if these have less than this share of the tokens per second of the best,
# or of plain decoding.
FEWEST_ROUNDS = 6
HOPELESS_SHARE = 0.75
# Promised tokens that speak for promises being kept.
_PRIOR_TOKENS = 16.0

Sources = tuple[str, ...]
# When sources are compared anew: after so many passes, and after twice as many each time until a trial finds a gain.
FIRST_BETWEEN = 1024
LONGEST_BETWEEN = 16384
# After a fourth of that already where a round's tokens have changed by this factor since the sources that are asked
# had so many passes.
SHARE_WHEN_TOKENS_CHANGE = 0.25
OTHER_TOKENS = 1.5
PASSES_TO_KNOW_TOKENS = 64


class SourceComparison:
    """Gives every source a turn alone, and all of them one together; then the better half another one, and so on.

    They are as good as the tokens of a round over the time of such a round. What rounds accept differs by about as much
    as they accept: judged is what trees promise, corrected by how that was kept.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Raises ValueError where there are not several."""
        if len(names) < 2:
            raise ValueError(f"of {list(names)} none can be better than another")
        self._ranked: list[Sources] = [*((name,) for name in names), tuple(names)]
        self._records = {sources: _Record() for sources in self._ranked}
        # Those that may still be the best, of whom the first so many have had their turn.
        self._num_left = len(self._ranked)
        self._num_done = 0
        # Of the turn: sources whose trees have come, rounds that were looked at, and passes.
        self._have_come: set[str] = set()
        self._num_rounds = self._num_passes = 0
        # Tokens per second of a request that nobody drafts for, as far as they are known.
        self._plain = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the best is known."""
        return self._num_left == 1

    @property
    def turn(self) -> Sources:
        """The sources that are asked now; the best when it is over."""
        return self._ranked[self._num_done]

    @property
    def ranked(self) -> list[str]:
        """All sources, the best one first, as far as that is known."""
        return [sources[0] for sources in self._ranked if len(sources) == 1]

    def learn(self, promised: float, accepted: int, come: Collection[str]) -> None:
        """Learn from a round that had asked these sources; drafters read first what they were not told.

        `come` are the sources whose trees came.
        """
        self._have_come.update(come)
        if self._is_under_way:
            self._num_rounds += 1
            self._records[self.turn].add_round(promised, accepted)

    def pass_over(self, seconds: float | None, plain: float = 0.0) -> None:
        """A pass has ended in which some had asked; None where its time says nothing.

        `plain` are the tokens per second of a request that nobody drafts for; 0 while they are not known. Where the
        best is no better, it does not matter which one is.
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
        """How many of those that had one, best first; one where nothing is left to find out."""
        if speeds[0] <= self._plain:
            return 1
        return min((len(speeds) + 1) // 2, sum(speed >= HOPELESS_SHARE * speeds[0] for speed in speeds))


@dataclass
class _Record:
    """What became of a source's rounds."""

    num_rounds: int = 0
    promised: float = 0.0
    accepted: int = 0
    num_passes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of a request; 0 where nothing was seen."""
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
    """Counts passes since the last comparison, and remembers what rounds brought then."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._between = FIRST_BETWEEN
        # Passes with the sources that are asked now, and the tokens of a round once there were enough of them.
        self._num_alike = 0
        self._usual_tokens: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether the last comparison is long enough ago."""
        return self._num_passes >= self._between

    def is_due_for(self, tokens: float) -> bool:
        """Whether it is for rounds that bring so many tokens: quite others than when the sources asked were new."""
        usual = self._usual_tokens
        if usual is None or self._num_passes < SHARE_WHEN_TOKENS_CHANGE * self._between:
            return False
        return not usual / OTHER_TOKENS < tokens < usual * OTHER_TOKENS

    def pass_over(self) -> None:
        """A pass has ended, whoever asked for drafts in it."""
        self._num_passes += 1

    def drafted(self, tokens: float) -> None:
        """A pass has ended in which sources were asked; `tokens` are those of a round these days."""
        self._num_alike += 1
        if self._num_alike == PASSES_TO_KNOW_TOKENS:
            self._usual_tokens = tokens

    def sources_changed(self) -> None:
        """Other sources are asked now."""
        self._num_alike, self._usual_tokens = 0, None

    def begun_anew(self) -> None:
        """The next comparison but this one comes later."""
        self._between = min(LONGEST_BETWEEN, 2 * self._between)

    def over(self) -> None:
        """A comparison has ended."""
        self._num_passes = 0

    def found_gain(self) -> None:
        """Drafting pays with what a comparison has found."""
        self._between = FIRST_BETWEEN
