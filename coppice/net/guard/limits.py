"""Bounds of the guard, and the room that all its connections share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

# A large message that has taken so many seconds to come in has to make room for others if there is none left.
_SLOW_S = 2.0


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Bounds of the guard. Times are seconds."""

    # Largest message of our methods.
    max_message_bytes: int
    # Calls at once on one connection, held ones counted.
    max_streams: int
    # Paths of methods that are called long before the first message comes; a connection may have `max_streaming` such
    # calls at once. And of those that have one request message alone.
    streaming: frozenset[bytes] = frozenset()
    max_streaming: int = 32
    unary: frozenset[bytes] = frozenset()
    # Calls at once on one connection of other methods, health and reflection: they may last for ever.
    max_other: int = 8
    # Until the preface and SETTINGS; and until a call's first message is complete.
    preface_s: float = 10.0
    first_message_s: float = 10.0
    # All large first messages that come in at once, and those of one connection; one of any size finds room alone.
    max_large_bytes: int = 64 << 20
    max_large_bytes_of_one: int = 16 << 20
    # DATA of calls that are held, of all connections; beyond it, the connection that has most loses a call.
    max_held_bytes: int = 48 << 20
    # Connections at once, those that have shown a preface or not.
    max_connections: int = 1024
    max_handshakes: int = 256


class Holder(Protocol):
    """What the room asks of a connection's calls."""

    def end_held_call(self) -> bool:
        """End the held call that came last; False if there is none."""

    def end_slow_message(self, since_s: float) -> bool:
        """End the call whose large message has been coming in for longest, if that began before `since_s`."""

    def room_is_free(self) -> None:
        """There may be room now for a message that found none."""


class Room:
    """Bytes of large messages that are coming in, and those of calls that are held, over all connections."""

    def __init__(self, limits: GuardLimits) -> None:
        self._limits = limits
        self._used: dict[Holder, int] = {}
        # Connections with a message that found no room.
        self._waiting: dict[Holder, None] = {}
        self._held: Counter[Holder] = Counter()
        self._num_held = 0

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Count what a connection holds: more, or less."""
        self._held[holder] += num_bytes
        self._num_held += num_bytes
        if not self._held[holder]:
            del self._held[holder]
        while num_bytes > 0 and self._num_held > self._limits.max_held_bytes:
            most = max(self._held, key=self._held.__getitem__)
            if not most.end_held_call():
                break

    def take(self, holder: Holder, num_bytes: int, now_s: float) -> bool:
        """Whether there is room for another message; a connection that has none may take a slow one's of another's."""
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
        """A message is complete or given up."""
        if num_bytes:
            self._used[holder] -= num_bytes
            if not self._used[holder]:
                del self._used[holder]
            waiting, self._waiting = self._waiting, {}
            for other in waiting:
                other.room_is_free()
