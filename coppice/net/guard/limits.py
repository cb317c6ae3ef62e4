"""Limits of the guard, and the memory budget shared by its connections."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

# Seconds after which a large message may be evicted for others.
_SLOW_S = 2.0


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Limits of the guard. Times are seconds."""

    # Largest message of our methods.
    max_message_bytes: int
    # Concurrent calls per connection, held ones included.
    max_streams: int
    # Paths of streaming methods, forwarded before their first message; a connection may have `max_streaming` such
    # calls. And paths of methods with a single request message.
    streaming: frozenset[bytes] = frozenset()
    max_streaming: int = 32
    unary: frozenset[bytes] = frozenset()
    # Concurrent calls per connection to foreign methods (health, reflection), which may be endless.
    max_other: int = 8
    # For the preface and SETTINGS; and for a call's first message.
    preface_s: float = 10.0
    first_message_s: float = 10.0
    # Large first messages under way in total and per connection; one of any size is admitted alone.
    max_large_bytes: int = 64 << 20
    max_large_bytes_of_one: int = 16 << 20
    # Held DATA of all connections; above it, the connection with most loses a call.
    max_held_bytes: int = 48 << 20
    # Concurrent connections, and connections without a preface.
    max_connections: int = 1024
    max_handshakes: int = 256


class Holder(Protocol):
    """A connection's calls, as the budget sees them."""

    def end_held_call(self) -> bool:
        """End the latest held call; False if there is none."""

    def end_slow_message(self, since_s: float) -> bool:
        """End the longest pending call with a large message, if it began before `since_s`."""

    def room_is_free(self) -> None:
        """Retry messages that found no room."""


class Room:
    """Bytes of large messages under way and of held calls, over all connections."""

    def __init__(self, limits: GuardLimits) -> None:
        self._limits = limits
        self._used: dict[Holder, int] = {}
        # Connections with a message that waits for room.
        self._waiting: dict[Holder, None] = {}
        self._held: Counter[Holder] = Counter()
        self._num_held = 0

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Add to (or subtract from) a connection's held bytes."""
        self._held[holder] += num_bytes
        self._num_held += num_bytes
        if not self._held[holder]:
            del self._held[holder]
        while num_bytes > 0 and self._num_held > self._limits.max_held_bytes:
            most = max(self._held, key=self._held.__getitem__)
            if not most.end_held_call():
                break

    def take(self, holder: Holder, num_bytes: int, now_s: float) -> bool:
        """Whether there is room for another message; a connection without any may evict a slow one of another's."""
        limits = self._limits
        own = self._used.get(holder, 0)
        total = sum(self._used.values())
        is_free = not own or own + num_bytes <= limits.max_large_bytes_of_one
        if is_free and total and total + num_bytes > limits.max_large_bytes:
            most = max(self._used, key=self._used.__getitem__)
            is_free = not own and most.end_slow_message(now_s - _SLOW_S)
        if is_free:
            self._used[holder] = self._used.get(holder, 0) + num_bytes
        else:
            self._waiting[holder] = None
        return is_free

    def give_back(self, holder: Holder, num_bytes: int) -> None:
        """Free the room of a message that is complete or dropped."""
        if num_bytes:
            self._used[holder] -= num_bytes
            if not self._used[holder]:
                del self._used[holder]
            waiting, self._waiting = self._waiting, {}
            for other in waiting:
                other.room_is_free()
