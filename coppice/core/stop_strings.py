"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.tokenizer import Detokenizer


class StopStringMatcher:
    """Passes text through, holding back a possible beginning of a stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        # Characters at the start of `_held` in which no match may end.
        self._exempt = 0
        self.match: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Text that can be shown now; once `match` is set, it ends before the match.

        The match is the stop string that is complete first, the longest of those that end together, however the text is
        split into pieces. In text pushed without `may_end` (the first `min_tokens` tokens) a match may begin but not
        end.
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
        """Push the text of the output's token `index`, from 0; see `push`.

        Matches that end in the first `min_tokens` tokens do not count. A character split over tokens belongs to the
        last.
        """
        return self.push(detokenizer.push((token_id,)), may_end=index >= min_tokens)

    def flush(self) -> str:
        """Text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str) -> int:
        """Start of the first match that counts; -1 without one."""
        return self._held.find(stop, max(0, self._exempt + 1 - len(stop)))

    def _longest_partial(self) -> int:
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            # A complete stop string that does not count is only held as the beginning of a longer one.
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stop_strings):
                return size
        return 0
