"""Protocol of passive observers of a service's stream."""

from __future__ import annotations

from typing import Any, Protocol


class StreamObserver(Protocol):
    """Called for every message of one stream, on the event loop, before or after it is handled."""

    def heard(self, message: Any) -> None:
        """The peer sent a message."""

    def told(self, message: Any) -> None:
        """The peer was sent a message."""

    def over(self) -> None:
        """The stream has ended."""
