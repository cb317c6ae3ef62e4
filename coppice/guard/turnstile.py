"""Paces what costs work, so that a connection that asks for much slows itself and not the others.

Each connection has a budget of its own that fills steadily, and all of them share another. A connection that has used
little of its own lately is let through at once, even when the shared budget is used up; the others then take turns.
Nothing is refused: whoever has to wait is not read from meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Budgets in units of work. Receiving a call costs 3, see `connection.py`.

    `units_per_s` and `burst` are those of one connection, `shared_units_per_s` and `shared_burst` those of all. With
    fewer than `free_units` of its burst used, a connection does not wait for the shared budget.
    """

    units_per_s: float = 1000.0
    burst: float = 3000.0
    shared_units_per_s: float = 2000.0
    shared_burst: float = 2000.0
    free_units: float = 300.0


# How often connections that wait are let through, and how much one of them may use in its turn.
_TICK_S = 0.005
_TURN_UNITS = 6.0


class Account:
    """What one connection may use. `resume` is called when it had to wait and may go on."""

    __slots__ = ("filled_s", "level", "resume", "turn")

    def __init__(self, level: float, now_s: float, resume: Callable[[], object]) -> None:
        self.level = level
        self.filled_s = now_s
        self.resume = resume
        # Units that it may use because its turn has come.
        self.turn = 0.0


class Turnstile:
    """Used on one event loop."""

    def __init__(self, rates: Rates = Rates()) -> None:
        self._rates = rates
        self._level = rates.shared_burst
        self._filled_s = 0.0
        self._queue: deque[Account] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def open(self, resume: Callable[[], object]) -> Account:
        """An account for a new connection."""
        return Account(self._rates.burst, self._loop.time(), resume)

    def close(self, account: Account) -> None:
        """The connection is gone: it is called no more."""
        account.resume = _nothing

    def take(self, account: Account, units: float) -> bool:
        """Whether the connection may do what costs so many units now; else it is called when it may."""
        now_s = self._loop.time()
        self._fill(account, now_s)
        rates = self._rates
        if account.level < units:
            wait_s = (units - account.level) / rates.units_per_s
            self._loop.call_later(wait_s, self._wait_for_turn, account)
            return False
        is_new = account.level > rates.burst - rates.free_units
        if not is_new and account.turn < units and (self._queue or self._level < units):
            self._wait_for_turn(account)
            return False
        account.turn = max(0.0, account.turn - units)
        account.level -= units
        # It may be in debt, to connections that need not wait for it, but not without end.
        self._level = max(self._level - units, -rates.shared_burst)
        return True

    def _fill(self, account: Account, now_s: float) -> None:
        rates = self._rates
        account.level = min(rates.burst, account.level + (now_s - account.filled_s) * rates.units_per_s)
        account.filled_s = now_s
        self._level = min(rates.shared_burst, self._level + (now_s - self._filled_s) * rates.shared_units_per_s)
        self._filled_s = now_s

    def _wait_for_turn(self, account: Account) -> None:
        self._queue.append(account)
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._turn)

    def _turn(self) -> None:
        """Let those through that have waited longest, as far as the shared budget goes."""
        self._timer = None
        now_s = self._loop.time()
        # Not those that come to wait meanwhile.
        for _ in range(len(self._queue)):
            account = self._queue[0]
            self._fill(account, now_s)
            if self._level < _TURN_UNITS:
                break
            self._queue.popleft()
            account.turn = _TURN_UNITS
            account.resume()
        if self._queue and self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._turn)


def _nothing() -> None:
    pass
