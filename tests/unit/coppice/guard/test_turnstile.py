"""Pacing by units of work: no connection is refused, and one that uses little does not wait for those that use much."""

from __future__ import annotations

import asyncio

from coppice.guard.turnstile import Account, Rates, Turnstile

RATES = Rates(units_per_s=1000, burst=300, shared_units_per_s=1000, shared_burst=300, free_units=30)


class Greedy:
    """Takes as much as it may, for as long as it is there."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.num_units = 0.0
        self._turnstile = turnstile
        self.account: Account = turnstile.open(self.use)

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
    turnstile = Turnstile(RATES)
    some = [Greedy(turnstile) for _ in range(10)]
    for greedy in some:
        greedy.use()
    await asyncio.sleep(1.0)
    for greedy in some:
        turnstile.close(greedy.account)
    used = [greedy.num_units for greedy in some]
    # All of them together are far above the shared budget: 300 at once and 1,000 a second.
    assert sum(used) <= 300 + 10 * 30 + 1000 * 1.3
    # Beside the first, which found the shared burst.
    assert max(used[1:]) <= 2 * min(used[1:])


async def test_a_connection_that_uses_little_does_not_wait() -> None:
    turnstile = Turnstile(RATES)
    some = [Greedy(turnstile) for _ in range(50)]
    for greedy in some:
        greedy.use()
    modest = turnstile.open(lambda: None)
    for _ in range(20):
        assert turnstile.take(modest, 3.0)
        await asyncio.sleep(0.01)
    for greedy in some:
        turnstile.close(greedy.account)
