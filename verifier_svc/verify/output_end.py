"""End of an output, checked token by token, so that it ends within an accepted block as in plain decoding."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.sampling import StoppingOptions
from coppice.core.stop_strings import StopStringMatcher
from coppice.core.tokenizer import TargetTokenizer


class FinishReason(enum.Enum):
    """Reason for the end of an output; names as in the public API."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_LENGTH = "context_length"


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """End of an output, and the stop string or the stop token's text that caused it."""

    reason: FinishReason
    stop_match: str | None = None


class OutputEnd:
    """Decides after each token of one sequence whether the output ends."""

    def __init__(
        self,
        options: StoppingOptions,
        *,
        eos_token_ids: Sequence[int],
        max_context_tokens: int,
        tokenizer: TargetTokenizer,
        prompt: Sequence[int],
        resumed: Sequence[int] = (),
    ) -> None:
        self._options = options
        self._eos = frozenset() if options.ignore_eos else frozenset(eos_token_ids)
        self._stop_tokens = frozenset(options.stop_token_ids)
        self._max_context_tokens = max_context_tokens
        self._length = len(prompt) + len(resumed)
        self._num_output = 0
        self._tokenizer = tokenizer
        self._matcher = StopStringMatcher(options.stop_strings) if options.stop_strings else None
        self._detokenizer = tokenizer.detokenizer(prompt)
        # One by one, since `min_tokens` counts them.
        for token in resumed:
            self._match(token)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """EOS tokens of the model that end the output."""
        return tuple(self._eos)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the output, forbidden before `min_tokens`."""
        return tuple(self._eos | self._stop_tokens)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        room = self._max_context_tokens - self._length
        if self._options.max_tokens is not None:
            room = min(room, self._options.max_tokens - self._num_output)
        return room

    def push(self, token: int) -> SequenceFinish | None:
        """Add the next token of the output; returns the finish if it is the last."""
        self._length += 1
        if token in self._eos:
            return SequenceFinish(FinishReason.EOS)
        if token in self._stop_tokens:
            return SequenceFinish(FinishReason.STOP, self._tokenizer.token_text(token))
        if (match := self._match(token)) is not None:
            return SequenceFinish(FinishReason.STOP, match)
        if self._num_output == self._options.max_tokens:
            return SequenceFinish(FinishReason.LENGTH)
        if self._length >= self._max_context_tokens:
            return SequenceFinish(FinishReason.CONTEXT_LENGTH)
        return None

    def _match(self, token: int) -> str | None:
        """Count the next token of the output; returns the stop string that it completes, if any."""
        index = self._num_output
        self._num_output += 1
        if self._matcher is None:
            return None
        self._matcher.push_token(token, index, self._options.min_tokens, self._detokenizer)
        return self._matcher.match
