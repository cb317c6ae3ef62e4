"""Calls that wait for a place: turns of clients, and calls that end."""

from __future__ import annotations

from coppice.net.loop.call import LoopCall
from coppice.net.loop.waiting import AnyCall, WaitingCalls


def added(waiting: WaitingCalls, client: str) -> AnyCall:
    call: AnyCall = LoopCall([], (), bytes, client)
    waiting.add(call)
    return call


def test_clients_take_turns_and_those_that_may_not_begin_keep_theirs() -> None:
    waiting = WaitingCalls()
    many = [added(waiting, "many") for _ in range(64)]
    one, two = added(waiting, "one"), added(waiting, "two")
    assert waiting.take(lambda _: True) is many[0]
    assert waiting.take(lambda client: client != "one") is two
    assert waiting.take(lambda _: True) is one
    assert waiting.take(lambda client: client == "one") is None
    assert waiting.take_all() == many[1:]
    assert not waiting


def test_a_call_that_ends_while_it_waits_leaves_at_once() -> None:
    waiting = WaitingCalls()
    calls = [added(waiting, "a") for _ in range(3)]
    calls[1].cancel()
    assert len(waiting) == 2
    for call in calls:
        call.cancel()
    assert not waiting
    assert waiting.take(lambda _: True) is None
