"""Paces what costs work, so that a connection that asks for much slows itself and not the others.

Each connection has a budget of its own that fills steadily, and all of them share another. While the shared one is used
up, connections wait and take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996): hosts first, then the
connections of a host. One that has used little goes before those that have used much. The same holds while the server
has not begun with the calls that it was given. Nothing is refused: a connection that has to wait is not read from
meanwhile.
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
    """Budgets in units of work (`client_frames.py` says what costs how much); rates are units per second.

    `of_one` and `burst_of_one` are those of a connection, `of_all` and `burst_of_all` those of all together.
    """

    of_one: float = 1000.0
    burst_of_one: float = 3000.0
    of_all: float = 2000.0
    burst_of_all: float = 1000.0


DEFAULT_RATES = Rates()
# How often connections that wait are let through, and how much one of them may use in its turn.
_TICK_S = 0.004
_TURN_UNITS = 6.0
# What a connection that has been there for a while may have used less than others, and makes up for later.
_CREDIT_UNITS = 60.0


class _Budget:
    """Fills steadily; may be in debt by as much as it holds."""

    __slots__ = ("_filled_s", "_most", "_per_s", "level")

    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = self.level = most
        self._filled_s = now_s

    def fill(self, now_s: float) -> float:
        """What there is now."""
        self.level = min(self._most, self.level + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        return self.level

    def spend(self, units: float) -> None:
        """Take out, into debt if need be."""
        self.level = max(self.level - units, -self._most)

    def wait_s(self, units: float) -> float:
        """Seconds until it has so many."""
        return (units - self.level) / self._per_s


class _Host:
    """Connections of one host: those that wait, by their start tags, and the tags of fair queueing."""

    __slots__ = ("finish", "num_accounts", "virtual", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, HostAccount]] = []
        # Of the host among hosts, and of the connection that was served last among its own.
        self.finish = 0.0
        self.virtual = 0.0
        self.num_accounts = 0


class HostAccount:
    """What one connection may use. `resume` is called when it had to wait and may go on."""

    __slots__ = ("budget", "finish", "host", "of_host", "resume", "turn")

    def __init__(self, host: str, of_host: _Host, budget: _Budget, finish: float, resume: Callable[[], object]) -> None:
        self.host = host
        self.of_host = of_host
        self.budget = budget
        # The tag after everything that it has used.
        self.finish = finish
        self.resume = resume
        # Units that it may use because its turn has come.
        self.turn = 0.0


class Turnstile:
    """Used on one event loop."""

    def __init__(self, rates: Rates = DEFAULT_RATES, pending: PendingCalls | None = None) -> None:
        self._rates = rates
        self.pending = PendingCalls() if pending is None else pending
        self._loop = asyncio.get_running_loop()
        self._shared = _Budget(rates.of_all, rates.burst_of_all, self._loop.time())
        self._hosts: dict[str, _Host] = {}
        # Hosts with connections that wait, by their start tags; and the tag of the one that was served last.
        self._waiting: list[tuple[float, int, _Host]] = []
        self._virtual = 0.0
        self._arrivals = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, host: str, resume: Callable[[], object]) -> HostAccount:
        """An account for a new connection."""
        if host not in self._hosts:
            self._hosts[host] = _Host()
        of_host = self._hosts[host]
        of_host.num_accounts += 1
        budget = _Budget(self._rates.of_one, self._rates.burst_of_one, self._loop.time())
        return HostAccount(host, of_host, budget, of_host.virtual, resume)

    def close(self, account: HostAccount) -> None:
        """The connection is gone: it is called no more."""
        account.resume = _nothing
        account.of_host.num_accounts -= 1
        # Others have had their turns since: it is not remembered what the host has used.
        if not account.of_host.num_accounts and account.of_host.finish <= self._virtual:
            del self._hosts[account.host]

    def take(self, account: HostAccount, units: float, *, passes_calls: bool = False) -> bool:
        """Whether the connection may do what costs so many units now; else it is called when it may.

        What passes calls on waits for the server, too.
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
        """Count work that was done without asking, since its size was not known before."""
        account.budget.spend(units)
        self._shared.spend(units)
        host = account.of_host
        account.finish = max(account.finish, host.virtual - _CREDIT_UNITS) + units
        host.finish = max(host.finish, self._virtual - _CREDIT_UNITS) + units
        if not self._waiting:
            # Nobody has to make up for what was used while there was enough.
            host.virtual = max(host.virtual, account.finish)
            self._virtual = max(self._virtual, host.finish)

    def _wait(self, account: HostAccount) -> None:
        host = account.of_host
        if not host.waiting:
            self._queue(host)
        heapq.heappush(host.waiting, (max(host.virtual - _CREDIT_UNITS, account.finish), next(self._arrivals), account))
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._let_through)

    def _queue(self, host: _Host) -> None:
        heapq.heappush(self._waiting, (max(self._virtual - _CREDIT_UNITS, host.finish), next(self._arrivals), host))

    def _let_through(self) -> None:
        """Let connections through as far as the shared budget goes, the least start tag first."""
        self._timer = None
        now_s = self._loop.time()
        while self._waiting and self._shared.fill(now_s) >= _TURN_UNITS and not self.pending.is_full:
            start, _, host = heapq.heappop(self._waiting)
            self._virtual = max(self._virtual, start)
            start, _, account = heapq.heappop(host.waiting)
            host.virtual = max(host.virtual, start)
            has_more = bool(host.waiting)
            account.turn = _TURN_UNITS
            account.resume()
            if has_more:
                self._queue(host)
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._let_through)


def _nothing() -> None:
    pass
