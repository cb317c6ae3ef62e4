"""How long drafts take to come back: a round that would wait for less than that waits in vain."""

from __future__ import annotations

from collections import deque

# Drafts that are looked back at. The quickest of them counts: a slow hour of the drafter's says little of the next.
_LATEST = 32
# Fewer say nothing.
_FEWEST = 4


class DraftTimes:
    """Seconds from when a drafter was told of an outcome to when its draft behind it was here."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)
        # What the quickest of the latest took; 0 while hardly any is known.
        self.quickest_s = 0.0

    def add(self, seconds: float) -> None:
        """A draft has come, in time or late."""
        self._latest.append(seconds)
        if len(self._latest) >= _FEWEST:
            self.quickest_s = min(self._latest)
