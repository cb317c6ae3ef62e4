"""Pacing by units of work: no connection is refused, and one that uses little does not wait for those that use much."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coppice.guard.turnstile import Account, Rates, Turnstile

RATES = Rates(
    of_one=1000, burst_of_one=300, of_all=1000, burst_of_all=300, of_new=30, burst_of_new=60, modest=100, settled_s=0.1
)


class Greedy:
    """Takes as much as it may, for as long as it is there."""

    def __init__(self, turnstile: Turnstile, host: str = "10.0.0.1") -> None:
        self.num_units = 0.0
        self._turnstile = turnstile
        self.account: Account = turnstile.open(host, self.use)

    def use(self) -> None:
        while self._turnstile.take(self.account, 1.0):
            self.num_units += 1.0


async def test_one_connection_gets_its_burst_and_then_its_rate() -> None:
    greedy = Greedy(Turnstile(RATES))
    greedy.use()
    assert 300 <= greedy.num_units <= 330
    await asyncio.sleep(0.5)
    greedy._turnstile.close(greedy.account)
    assert 500 <= greedy.num_units <= 1000


async def test_greedy_connections_take_turns() -> None:
    turnstile = Turnstile(replace(RATES, settled_s=60.0))
    some = [Greedy(turnstile) for _ in range(10)]
    for greedy in some:
        greedy.use()
    at_once = [greedy.num_units for greedy in some]
    await asyncio.sleep(1.0)
    for greedy in some:
        turnstile.close(greedy.account)
    later = [greedy.num_units - first for greedy, first in zip(some, at_once, strict=True)]
    # The shared budget and its debt; then what it fills with.
    assert sum(at_once) <= 300 + 300 + 60
    assert sum(later) <= 1000 * 1.3
    assert max(later) <= 2 * min(later)


async def test_hosts_take_turns_however_many_connections_they_have() -> None:
    turnstile = Turnstile(RATES)
    crowd = [Greedy(turnstile) for _ in range(30)]
    for greedy in crowd:
        greedy.use()
    alone = Greedy(turnstile, "10.0.0.2")
    alone.use()
    before = sum(greedy.num_units for greedy in crowd)
    await asyncio.sleep(0.5)
    for greedy in (*crowd, alone):
        turnstile.close(greedy.account)
    # What it had at once aside, as much as the crowd together, give or take a turn.
    assert alone.num_units > 0.7 * (sum(greedy.num_units for greedy in crowd) - before)


async def test_a_settled_connection_that_uses_little_does_not_wait() -> None:
    turnstile = Turnstile(RATES)
    modest = turnstile.open("10.0.0.1", lambda: None)
    await asyncio.sleep(0.2)
    some = [Greedy(turnstile) for _ in range(50)]
    for greedy in some:
        greedy.use()
    for _ in range(20):
        assert turnstile.take(modest, 3.0)
        await asyncio.sleep(0.01)
    for greedy in some:
        turnstile.close(greedy.account)


async def test_new_connections_need_not_wait_where_their_host_has_had_few() -> None:
    turnstile = Turnstile(RATES)
    some = [Greedy(turnstile) for _ in range(50)]
    for greedy in some:
        greedy.use()
    assert turnstile.take(turnstile.open("10.0.0.2", lambda: None), 6.0)
    assert not turnstile.take(turnstile.open("10.0.0.1", lambda: None), 6.0)
    for greedy in some:
        turnstile.close(greedy.account)


async def test_work_that_is_counted_afterwards_is_paid_for() -> None:
    turnstile = Turnstile(RATES)
    account = turnstile.open("10.0.0.1", lambda: None)
    turnstile.charge(account, 500.0)
    assert not turnstile.take(account, 1.0)
    turnstile.close(account)
