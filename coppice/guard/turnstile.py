"""Paces what costs work, so that a connection that asks for much slows itself and not the others.

Each connection has a budget of its own that fills steadily, and all of them share another. When the shared one is used
up, connections wait, and hosts take turns. A connection that has been there for a while and has used little lately
never waits for the shared budget; new ones need not as long as their host has had few. Nothing is refused: whoever has
to wait is not read from meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Budgets in units of work (`connection.py` says what costs how much): rates are units per second.

    `of_one` and `burst_of_one` are those of a connection, `of_all` and `burst_of_all` those of all together, `of_new`
    and `burst_of_new` what new connections of a host may use beside. With at most `modest` units of its burst used, a
    connection of `settled_s` seconds does not wait for the shared budget.
    """

    of_one: float = 1000.0
    burst_of_one: float = 3000.0
    of_all: float = 2000.0
    burst_of_all: float = 2000.0
    of_new: float = 300.0
    burst_of_new: float = 600.0
    modest: float = 300.0
    settled_s: float = 2.0


DEFAULT_RATES = Rates()
# How often connections that wait are let through, and how much one of them may use in its turn.
_TICK_S = 0.005
_TURN_UNITS = 6.0


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
    """Connections of one host that wait, and what its new ones may use."""

    def __init__(self, rates: Rates, now_s: float) -> None:
        self.new = _Budget(rates.of_new, rates.burst_of_new, now_s)
        self.waiting: deque[Account] = deque()
        self.num_accounts = 0


class Account:
    """What one connection may use. `resume` is called when it had to wait and may go on."""

    __slots__ = ("budget", "host", "opened_s", "resume", "turn")

    def __init__(self, host: str, budget: _Budget, opened_s: float, resume: Callable[[], object]) -> None:
        self.host = host
        self.budget = budget
        self.opened_s = opened_s
        self.resume = resume
        # Units that it may use because its turn has come.
        self.turn = 0.0


class Turnstile:
    """Used on one event loop."""

    def __init__(self, rates: Rates = DEFAULT_RATES) -> None:
        self._rates = rates
        self._loop = asyncio.get_running_loop()
        self._shared = _Budget(rates.of_all, rates.burst_of_all, self._loop.time())
        self._hosts: dict[str, _Host] = {}
        # Hosts with connections that wait, the one whose turn it is first.
        self._turns: OrderedDict[str, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, host: str, resume: Callable[[], object]) -> Account:
        """An account for a new connection."""
        now_s = self._loop.time()
        if host not in self._hosts:
            self._forget_hosts(now_s)
            self._hosts[host] = _Host(self._rates, now_s)
        self._hosts[host].num_accounts += 1
        budget = _Budget(self._rates.of_one, self._rates.burst_of_one, now_s)
        return Account(host, budget, now_s, resume)

    def close(self, account: Account) -> None:
        """The connection is gone: it is called no more."""
        account.resume = _nothing
        self._hosts[account.host].num_accounts -= 1

    def take(self, account: Account, units: float) -> bool:
        """Whether the connection may do what costs so many units now; else it is called when it may."""
        now_s = self._loop.time()
        own = account.budget
        if own.fill(now_s) < units:
            self._loop.call_later(own.wait_s(units), self._wait, account)
            return False
        has_turn = account.turn >= units or self._is_exempt(account, units, now_s)
        if not has_turn and (self._turns or self._shared.fill(now_s) < units):
            self._wait(account)
            return False
        account.turn = max(0.0, account.turn - units)
        self.charge(account, units)
        return True

    def charge(self, account: Account, units: float) -> None:
        """Count work that was done without asking, since its size was not known before."""
        account.budget.spend(units)
        self._shared.spend(units)
        self._hosts[account.host].new.spend(units)

    def _is_exempt(self, account: Account, units: float, now_s: float) -> bool:
        rates = self._rates
        if account.budget.level <= rates.burst_of_one - rates.modest:
            return False
        if now_s - account.opened_s > rates.settled_s:
            return True
        return self._hosts[account.host].new.fill(now_s) >= units

    def _wait(self, account: Account) -> None:
        self._hosts[account.host].waiting.append(account)
        self._turns.setdefault(account.host)
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._turn)

    def _turn(self) -> None:
        """Let connections through as far as the shared budget goes: one of each host, then another."""
        self._timer = None
        now_s = self._loop.time()
        # Not those that come to wait meanwhile.
        num_waiting = sum(len(self._hosts[host].waiting) for host in self._turns)
        for _ in range(num_waiting):
            if self._shared.fill(now_s) < _TURN_UNITS:
                break
            host, _ = self._turns.popitem(last=False)
            waiting = self._hosts[host].waiting
            account = waiting.popleft()
            if waiting:
                self._turns[host] = None
            account.turn = _TURN_UNITS
            account.resume()
        if self._turns and self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._turn)

    def _forget_hosts(self, now_s: float) -> None:
        """Forget hosts that have no connection and whose budget is full again: that is what a new one has."""
        full = self._rates.burst_of_new
        gone = [
            name
            for name, host in self._hosts.items()
            if not host.num_accounts and not host.waiting and host.new.fill(now_s) >= full
        ]
        for name in gone:
            del self._hosts[name]


def _nothing() -> None:
    pass
