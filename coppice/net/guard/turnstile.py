"""Fair scheduling of work, so that a demanding connection only slows itself.

Each connection has a token bucket, and all share another. While the shared one is empty, connections take turns by
start-time fair queueing (Goyal, Vin and Cheng, 1996): hosts first, then a host's connections, those that have used
little first. The same applies while the server has too many pending calls. Work is never refused: a waiting
connection is not read from.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from coppice.net.guard.pending import PendingCalls


@dataclass(frozen=True, slots=True)
class Rates:
    """Token buckets in units of work (costs: `client_frames.py`); rates are units per second.

    `of_one` and `burst_of_one` are per connection, `of_all` and `burst_of_all` for all together.
    """

    of_one: float = 1000.0
    burst_of_one: float = 3000.0
    of_all: float = 2000.0
    burst_of_all: float = 1000.0


DEFAULT_RATES = Rates()
# Interval of turns in seconds, and units per turn: who needs more pays in several.
_TICK_S = 0.004
TURN_UNITS = 6.0
# Units that a host, and one of its connections, may lag behind in fair queueing and catch up on later. A newcomer may
# wait for the credit of all connections of its host.
_CREDIT_UNITS = 60.0
_CREDIT_UNITS_OF_ONE = 12.0


class _Budget:
    """Token bucket whose level may be negative, down to minus its capacity."""

    __slots__ = ("_filled_s", "_most", "_per_s", "level")

    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = self.level = most
        self._filled_s = now_s

    def fill(self, now_s: float) -> float:
        """Refill; returns the level."""
        self.level = min(self._most, self.level + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        return self.level

    def spend(self, units: float) -> None:
        """Take units, below zero if need be."""
        self.level = max(self.level - units, -self._most)

    def wait_s(self, units: float) -> float:
        """Seconds until the level is `units`."""
        return (units - self.level) / self._per_s


class _Host:
    """Connections of one host: a queue by start tags, and tags of fair queueing."""

    __slots__ = ("finish", "num_accounts", "virtual", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, HostAccount]] = []
        # Finish tag of the host; start tag of its connection served last.
        self.finish = 0.0
        self.virtual = 0.0
        self.num_accounts = 0


class HostAccount:
    """Budget of one connection. `resume` is called when its wait is over."""

    __slots__ = ("budget", "finish", "host", "of_host", "resume", "turn")

    def __init__(self, host: str, of_host: _Host, budget: _Budget, finish: float, resume: Callable[[], object]) -> None:
        self.host = host
        self.of_host = of_host
        self.budget = budget
        # Finish tag of all its work.
        self.finish = finish
        self.resume = resume
        # Units left in its turn.
        self.turn = 0.0


class Turnstile:
    """Scheduler for one event loop."""

    def __init__(self, rates: Rates = DEFAULT_RATES, pending: PendingCalls | None = None) -> None:
        self._rates = rates
        self.pending = PendingCalls() if pending is None else pending
        self._loop = asyncio.get_running_loop()
        self._shared = _Budget(rates.of_all, rates.burst_of_all, self._loop.time())
        self._hosts: dict[str, _Host] = {}
        # Hosts with waiting connections, by start tag; and start tag of the one served last.
        self._waiting: list[tuple[float, int, _Host]] = []
        self._virtual = 0.0
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, host: str, resume: Callable[[], object]) -> HostAccount:
        """Account for a new connection."""
        if host not in self._hosts:
            self._hosts[host] = _Host()
        of_host = self._hosts[host]
        of_host.num_accounts += 1
        budget = _Budget(self._rates.of_one, self._rates.burst_of_one, self._loop.time())
        return HostAccount(host, of_host, budget, of_host.virtual, resume)

    def close(self, account: HostAccount) -> None:
        """Close an account: it is not resumed any more."""
        account.resume = _nothing
        account.of_host.num_accounts -= 1
        # Forget the host's usage once others have caught up.
        if not account.of_host.num_accounts and account.of_host.finish <= self._virtual:
            del self._hosts[account.host]

    def take(self, account: HostAccount, units: float, *, passes_calls: bool = False) -> bool:
        """Whether the connection may do work of `units` now; if not, it is resumed when it may.

        Work that forwards calls also waits for the server.
        """
        now_s = self._loop.time()
        if account.budget.fill(now_s) < units:
            self._loop.call_later(account.budget.wait_s(units), self._wait, account)
            return False
        is_due = account.turn >= units or not (self._waiting or self._shared.fill(now_s) < units)
        if not is_due or (passes_calls and self.pending.is_full):
            self._wait(account)
            return False
        account.turn = max(0.0, account.turn - units)
        self.charge(account, units)
        return True

    def charge(self, account: HostAccount, units: float) -> None:
        """Charge work whose cost was not known before it was done."""
        account.budget.spend(units)
        self._shared.spend(units)
        host = account.of_host
        account.finish = max(account.finish, host.virtual - _CREDIT_UNITS_OF_ONE) + units
        host.finish = max(host.finish, self._virtual - _CREDIT_UNITS) + units
        if not self._waiting:
            # Usage without contention is not held against it.
            host.virtual = max(host.virtual, account.finish)
            self._virtual = max(self._virtual, host.finish)

    def _wait(self, account: HostAccount) -> None:
        host = account.of_host
        if not host.waiting:
            self._queue(host)
        heapq.heappush(
            host.waiting, (max(host.virtual - _CREDIT_UNITS_OF_ONE, account.finish), next(self._arrivals), account)
        )
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._let_through)

    def _queue(self, host: _Host) -> None:
        heapq.heappush(self._waiting, (max(self._virtual - _CREDIT_UNITS, host.finish), next(self._arrivals), host))

    def _let_through(self) -> None:
        """Resume connections in order of start tags, as far as the shared budget goes."""
        self._timer = None
        now_s = self._loop.time()
        try:
            while self._waiting and self._shared.fill(now_s) >= TURN_UNITS and not self.pending.is_full:
                start, _, host = heapq.heappop(self._waiting)
                self._virtual = max(self._virtual, start)
                start, _, account = heapq.heappop(host.waiting)
                host.virtual = max(host.virtual, start)
                self._resume(account, has_more=bool(host.waiting))
        finally:
            if self._waiting and self._timer is None:
                self._timer = self._loop.call_later(_TICK_S, self._let_through)

    def _resume(self, account: HostAccount, *, has_more: bool) -> None:
        """Give a connection its turn. If it fails, as without memory, others of its host still have theirs."""
        account.turn = TURN_UNITS
        try:
            account.resume()
        finally:
            if has_more:
                self._queue(account.of_host)


def _nothing() -> None:
    pass
