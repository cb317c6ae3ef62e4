"""Finding stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.tokenizer import Detokenizer


class StopStringMatcher:
    """Passes text through, holding back what may be the beginning of a stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        # Characters at the beginning of `_held` in which no match may end.
        self._exempt = 0
        self.match: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Text that is safe to show now; ends before the match, after which `match` is set.

        The match is the stop string that is complete first, the longest where several end together. How the text
        was cut into pieces makes no difference. In text that is pushed without `may_end` a match may begin, and none
        ends: that of the first `min_tokens` tokens.
        """
        if self.match is not None:
            return ""
        self._held += text
        if not may_end:
            self._exempt = len(self._held)
        found = [(start, stop) for stop in self._stop_strings if (start := self._find(stop)) >= 0]
        if found:
            start, self.match = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._longest_partial()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        self._exempt = max(0, self._exempt - len(shown))
        return shown

    def push_token(self, token_id: int, index: int, min_tokens: int, detokenizer: Detokenizer) -> str:
        """Push the text that token `index` of the output, from 0, completes; see `push`.

        A match that ends in text of the first `min_tokens` tokens does not count. A character that is spread over
        tokens is text of the last of them.
        """
        return self.push(detokenizer.push((token_id,)), may_end=index >= min_tokens)

    def flush(self) -> str:
        """What is held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str) -> int:
        """Where the first occurrence begins that counts; -1 where there is none."""
        return self._held.find(stop, max(0, self._exempt + 1 - len(stop)))

    def _longest_partial(self) -> int:
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            # A stop string that is complete and does not count is held for a longer one alone.
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stop_strings):
                return size
        return 0
