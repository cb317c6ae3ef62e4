"""The protocol of an observer of a service's stream, which takes no part in it."""

from __future__ import annotations

from typing import Any, Protocol


class StreamObserver(Protocol):
    """Sees every message of one stream, on the event loop. What it is told has been handled already, or will be."""

    def heard(self, message: Any) -> None:
        """The peer has sent a message."""

    def told(self, message: Any) -> None:
        """The peer is sent a message."""

    def over(self) -> None:
        """The stream has ended."""
