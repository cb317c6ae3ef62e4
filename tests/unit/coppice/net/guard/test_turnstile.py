"""Pacing by units of work: no connection is refused, and one that uses little does not wait for those that use much."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from coppice.net.guard.pending import PendingCalls
from coppice.net.guard.turnstile import HostAccount, Rates, Turnstile

RATES = Rates(of_one=1000, burst_of_one=300, of_all=1000, burst_of_all=300)


class Greedy:
    """Takes as much as it may, for as long as it is there."""

    def __init__(self, turnstile: Turnstile, host: str = "10.0.0.1") -> None:
        self.num_units = 0.0
        self.turnstile = turnstile
        self.account: HostAccount = turnstile.open(host, self.use)

    def use(self) -> None:
        while self.turnstile.take(self.account, 1.0):
            self.num_units += 1.0


def crowd(turnstile: Turnstile, size: int, host: str = "10.0.0.1") -> list[Greedy]:
    some = [Greedy(turnstile, host) for _ in range(size)]
    for greedy in some:
        greedy.use()
    return some


def leave(*some: Greedy) -> None:
    for greedy in some:
        greedy.turnstile.close(greedy.account)


async def admitted_s(turnstile: Turnstile, account: HostAccount, units: float, resumed: asyncio.Event) -> float:
    """How long a connection waits until it may use so many units."""
    started_s = time.monotonic()
    while not turnstile.take(account, units):
        resumed.clear()
        await asyncio.wait_for(resumed.wait(), 5.0)
    return time.monotonic() - started_s


async def test_one_connection_gets_its_burst_and_then_its_rate() -> None:
    greedy = Greedy(Turnstile(RATES))
    greedy.use()
    assert 290 <= greedy.num_units <= 330
    await asyncio.sleep(0.5)
    leave(greedy)
    assert 500 <= greedy.num_units <= 1000


async def test_while_the_server_has_enough_calls_a_newcomer_is_next() -> None:
    pending = PendingCalls(4)
    turnstile = Turnstile(RATES, pending)
    order: list[str] = []

    def client(host: str) -> HostAccount:
        def resume() -> None:
            while turnstile.take(account, 1.0, passes_calls=True):
                order.append(host)
                pending.passed(host, len(order))

        account = turnstile.open(host, resume)
        resume()
        return account

    accounts = [client("10.0.0.1"), client("10.0.0.1")]
    await asyncio.sleep(0.05)
    assert order == ["10.0.0.1"] * 4
    accounts.append(client("10.0.0.2"))
    # What passes no call on does not wait for the server.
    assert turnstile.take(accounts[0], 0.0)
    for _ in range(4):
        pending.begun("10.0.0.1")
    await asyncio.sleep(0.05)
    assert order[4] == "10.0.0.2"
    assert len(order) == 8
    for account in accounts:
        turnstile.close(account)


async def test_greedy_connections_share_what_there_is_alike() -> None:
    some = crowd(Turnstile(RATES), 10)
    at_once = [greedy.num_units for greedy in some]
    await asyncio.sleep(1.0)
    leave(*some)
    assert sum(at_once) <= 310
    later = [greedy.num_units for greedy in some[1:]]
    assert 700 <= sum(later) <= 1300
    assert max(later) <= 1.5 * min(later)


async def test_hosts_share_alike_however_many_connections_they_have() -> None:
    turnstile = Turnstile(RATES)
    many = crowd(turnstile, 30)
    (alone,) = crowd(turnstile, 1, "10.0.0.2")
    before = sum(greedy.num_units for greedy in many)
    await asyncio.sleep(0.6)
    leave(*many, alone)
    assert alone.num_units > 0.7 * (sum(greedy.num_units for greedy in many) - before)


async def test_a_modest_connection_of_the_same_host_goes_first() -> None:
    turnstile, resumed = Turnstile(RATES), asyncio.Event()
    modest = turnstile.open("10.0.0.1", resumed.set)
    # What it has used while there was enough does not count.
    for _ in range(50):
        assert turnstile.take(modest, 3.0)
    some = crowd(turnstile, 30)
    await asyncio.sleep(1.0)
    waits_s = [await admitted_s(turnstile, modest, 3.0, resumed) for _ in range(4)]
    leave(*some)
    # Where turns go round, it waits twice for 30 turns of 6 ms each time, 1.4 s in all.
    assert sum(waits_s) < 0.7


async def test_newcomers_queue_after_those_that_are_there() -> None:
    turnstile, resumed = Turnstile(RATES), asyncio.Event()
    settled = turnstile.open("10.0.0.1", resumed.set)
    some = crowd(turnstile, 20)
    await asyncio.sleep(0.3)
    flood = crowd(turnstile, 500)
    assert await admitted_s(turnstile, settled, 3.0, resumed) < 1.0
    leave(*some, *flood)


async def test_a_newcomer_does_not_wait_for_all_that_its_host_s_connections_have_saved() -> None:
    turnstile, resumed = Turnstile(RATES), asyncio.Event()
    others = [Greedy(turnstile) for _ in range(40)]
    first = Greedy(turnstile)
    first.use()
    for greedy in others:
        greedy.use()
    newcomer = turnstile.open("10.0.0.1", resumed.set)
    took_s = await admitted_s(turnstile, newcomer, 3.0, resumed)
    turnstile.close(newcomer)
    leave(first, *others)
    # With 60 units of credit each they would go first for 2.4 s.
    assert took_s < 1.5


async def test_work_that_is_counted_afterwards_is_paid_for() -> None:
    turnstile = Turnstile(RATES)
    account = turnstile.open("10.0.0.1", lambda: None)
    turnstile.charge(account, 500.0)
    assert not turnstile.take(account, 1.0)
    turnstile.close(account)


async def test_a_connection_that_fails_in_its_turn_takes_no_others_from_its_host() -> None:
    turnstile, order, is_done = Turnstile(RATES), list[str](), asyncio.Event()
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

    def failing() -> None:
        order.append("failing")
        raise MemoryError

    def next_one() -> None:
        order.append("next")
        is_done.set()

    some = [turnstile.open("10.0.0.1", resume) for resume in (failing, next_one)]
    for account in some:
        turnstile._wait(account)
    await asyncio.wait_for(is_done.wait(), 5.0)
    assert order == ["failing", "next"]
    assert [type(error) for error in told] == [MemoryError]
