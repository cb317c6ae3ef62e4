"""Turns that wait for the model thread are taken together, as many as the drafter makes drafts of at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from drafter_svc.model.cache_budget import CacheBudget
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.service import JointTurns
from tests.integration.test_drafter_metrics import ChainDrafter

LONG_S = 10.0


class Joint:
    """Notes how many jobs run together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []

    def together(self, jobs: Sequence[Callable[[], None]]) -> None:
        self.sizes.append(len(jobs))
        for job in jobs:
            job()


class JoiningDrafter(ChainDrafter):
    """Says that it makes so many drafts at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.joint = Joint(most)


class Kept:
    """A sequence that keeps ten tokens."""

    def __init__(self) -> None:
        self.num_cached = 10

    def forget(self) -> None:
        self.num_cached = 0


@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 5), (3, [3, 2]), (8, [5])])
def test_turns_that_wait_are_taken_together_and_in_order(most: int, sizes: list[int]) -> None:
    drafter, thread = JoiningDrafter(most), ModelThread()
    turns = JointTurns(drafter, thread, CacheBudget())
    may_begin, taken = threading.Event(), list[int]()
    thread.start()
    thread.submit(lambda: may_begin.wait(LONG_S) and None)
    for number in range(5):
        turns.submit(lambda number=number: taken.append(number))
    may_begin.set()
    thread.stop()
    assert drafter.joint.sizes == sizes
    assert taken == [0, 1, 2, 3, 4]


def test_a_drafter_that_joins_nothing_takes_one_turn_at_a_time() -> None:
    thread, taken = ModelThread(), list[int]()
    turns = JointTurns(ChainDrafter(), thread, CacheBudget())
    for number in range(3):
        turns.submit(lambda number=number: taken.append(number))
    thread.start()
    thread.stop()
    assert taken == [0, 1, 2]


def test_nobody_has_to_forget_while_drafts_are_made_together() -> None:
    """The one that was drafted for longest ago may be in the midst of its next draft."""
    thread, caches = ModelThread(), CacheBudget(max_tokens=25)
    turns = JointTurns(JoiningDrafter(3), thread, caches)
    sequences = [Kept() for _ in range(3)]
    in_the_midst: list[list[int]] = []

    def turn(sequence: Kept) -> Callable[[], None]:
        def draft() -> None:
            caches.note(sequence)
            in_the_midst.append([one.num_cached for one in sequences])

        return draft

    for sequence in sequences:
        turns.submit(turn(sequence))
    thread.start()
    thread.stop()
    assert in_the_midst == [[10, 10, 10]] * 3
    assert [one.num_cached for one in sequences] == [0, 10, 10]
    assert (caches.num_tokens, caches.num_forgotten) == (20, 1)
