"""Finding stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through, holding back what may be the beginning of a stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show now; ends before the match, after which `match` is set.

        The match is the stop string that is complete first, the longest where several end together. How the text
        was cut into pieces makes no difference.
        """
        if self.match is not None:
            return ""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stop_strings if stop in self._held]
        if found:
            start, self.match = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._longest_partial()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What is held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _longest_partial(self) -> int:
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return size
        return 0
