"""Whose grammar is compiled next."""

from __future__ import annotations

import threading

import pytest

from coppice.core.grammar import Grammar, GrammarKind
from verifier_svc.grammar.queue import GrammarQueue, Job


def job(size: int, payer: str = "", came_s: float = 0.0, letter: str = "a") -> Job:
    return Job(Grammar(GrammarKind.REGEX, letter * size), (), (), lambda _: None, payer, came_s)


def order(queue: GrammarQueue, seconds: float = 1.0) -> list[Job]:
    """All jobs in the order of their turns, each of which takes so long."""
    jobs: list[Job] = []
    while len(queue):
        taken = queue.take()
        assert taken is not None
        queue.charge(taken[0].payer, seconds)
        jobs += taken
    return jobs


def test_short_texts_go_first_and_long_ones_do_not_wait_forever() -> None:
    queue = GrammarQueue()
    long, short = job(50_000), job(10)
    late = job(20, came_s=60.0)
    for one in (long, short, late):
        queue.put(one)
    assert order(queue) == [short, long, late]


def test_payers_take_turns_by_the_time_they_have_had() -> None:
    queue = GrammarQueue()
    for index in range(6):
        queue.put(job(100 + index, "flood"))
    for index in range(3):
        queue.put(job(200 + index, "one"))
    assert [one.payer for one in order(queue)][:6] == ["flood", "one"] * 3


def test_who_asked_for_nothing_has_saved_up_nothing() -> None:
    queue = GrammarQueue()
    for index in range(20):
        queue.put(job(100 + index, "early"))
    for _ in range(10):
        assert queue.take() is not None
        queue.charge("early", 1.0)
    for index in range(20):
        queue.put(job(200 + index, "late"))
    payers = [one.payer for one in order(queue)]
    assert payers[:10].count("early") in (4, 5, 6)


def test_all_that_wait_for_one_grammar_are_served_at_once() -> None:
    queue = GrammarQueue()
    same = [job(5, "x"), job(5, "y"), job(5, "x")]
    other = job(6, "x")
    for one in (*same, other):
        queue.put(one)
    taken = queue.take()
    assert taken is not None
    assert set(map(id, taken)) == set(map(id, same))
    assert queue.take() == [other]


def test_a_job_that_is_cancelled_is_not_taken() -> None:
    queue = GrammarQueue()
    first, second = job(1), job(2)
    queue.put(first)
    queue.put(second)
    queue.cancel(first)
    queue.cancel(first)
    assert queue.take() == [second]
    queue.cancel(second)
    assert len(queue) == 0


@pytest.mark.timeout(10)
def test_whoever_waits_is_told_that_it_is_closed() -> None:
    queue = GrammarQueue()
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    queue.close()
    thread.join()
    assert taken == [None]
    queue.put(job(1))
    assert len(queue) == 0
