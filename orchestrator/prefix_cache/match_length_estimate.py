"""How long what is guessed first stays right in one output."""

from __future__ import annotations

from collections.abc import Sequence

# Before anything was seen, one token of so many is taken to be wrong: too many for a guess to be worth more than what
# drafters usually say.
_PRIOR_TOKENS = 5.0
# So many more where the whole prompt was answered before, and greedily now as then.
_REPEATED_TOKENS = 32.0


class MatchLengthEstimate:
    """The first of an output's guesses beside what was committed, token by token, whether it was proposed or not.

    Guesses that come true do so together, and those behind a wrong one are all wrong. Rates of single guesses, taken
    over all requests, cannot tell an output that repeats another from one that leaves it every few tokens; the tokens
    between two mistakes of this output can.
    """

    def __init__(self) -> None:
        self._num_tokens = _PRIOR_TOKENS
        self._num_wrong = 1.0

    def repeats(self) -> None:
        """What is guessed is what followed the very same prompt."""
        self._num_tokens += _REPEATED_TOKENS

    def learn(self, guessed: Sequence[int], token_ids: Sequence[int]) -> None:
        """These `token_ids` were committed where `guessed` were to come next."""
        for guess, token in zip(guessed, token_ids, strict=False):
            self._num_tokens += 1
            if guess != token:
                self._num_wrong += 1
                return

    def expected_tokens(self, num_guessed: int) -> float:
        """How many of so many tokens in a row are right before the first that is not, on average."""
        wrong = self._num_wrong / self._num_tokens
        right = 1 - wrong
        return right * (1 - right**num_guessed) / wrong
