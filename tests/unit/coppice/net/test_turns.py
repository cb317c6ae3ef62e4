"""Work that waits: turns of hosts and of their connections, and items that leave."""

from __future__ import annotations

from coppice.net.turns import Turns


def anyone(host: str, connection: str) -> bool:
    return True


def test_hosts_take_turns_and_those_that_may_not_go_on_keep_theirs() -> None:
    turns = Turns[int]()
    for number in range(64):
        turns.add(number, "many", "")
    turns.add(100, "one", "")
    turns.add(200, "two", "")
    assert turns.take(anyone) == 0
    assert turns.take(lambda host, _: host != "one") == 200
    assert turns.take(anyone) == 100
    assert turns.take(lambda host, _: host == "one") is None
    assert turns.take_all() == list(range(1, 64))
    assert not turns


def test_connections_of_a_host_take_turns() -> None:
    turns = Turns[int]()
    for number in range(64):
        turns.add(number, "host", "many")
    turns.add(100, "host", "one")
    turns.add(200, "other", "")
    assert [turns.take(anyone) for _ in range(5)] == [0, 200, 100, 1, 2]
    turns.add(101, "host", "one")
    assert turns.take(lambda _, connection: connection == "one") == 101
    assert len(turns) == 61


def test_an_item_that_leaves_while_it_waits_is_not_taken() -> None:
    turns = Turns[int]()
    for number in range(3):
        turns.add(number, "a", "")
    turns.remove(1, "a", "")
    assert len(turns) == 2
    for number in range(3):
        turns.remove(number, "a", "")
    assert not turns
    assert turns.take(anyone) is None
