"""When sources that were compared are compared anew."""

from __future__ import annotations

# Where drafting is tried in vain: behind so many passes, and behind twice as many each time until a trial finds a gain.
FIRST_BETWEEN = 1024
LONGEST_BETWEEN = 16384
# Behind a fourth of that already where a round's tokens have changed by this factor since the sources that are asked
# had so many passes.
SHARE_WHEN_TOKENS_CHANGE = 0.25
OTHER_TOKENS = 1.5
PASSES_TO_KNOW_TOKENS = 64


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
