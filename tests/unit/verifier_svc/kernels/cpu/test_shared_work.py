"""Threads share the pieces of phases: each piece is computed once, and nobody waits for a thread that is late."""

from __future__ import annotations

import threading

import numba
import numpy as np

from verifier_svc.kernels.cpu.shared_work import CounterArray, SharedThreads, done, new_counters, take, wait_for

PIECES = 97


@numba.njit(nogil=True)
def count(before: np.ndarray, seen: np.ndarray, counters: CounterArray) -> None:
    """Count pieces that are computed, and note how many were before each."""
    for phase in range(len(seen)):
        piece = take(counters, phase)
        while piece < len(before):
            seen[phase, piece] = before.sum()
            before[piece] += 1
            done(counters, phase)
            piece = take(counters, phase)
        wait_for(counters, phase, len(before))


def test_every_piece_of_every_phase_is_computed_once_and_after_the_phase_before() -> None:
    num_phases = 300
    before, seen = np.zeros(PIECES, np.int64), np.zeros((num_phases, PIECES), np.int64)
    threads = SharedThreads()
    threads.call(count, 4, before, seen, new_counters(num_phases))
    first = np.arange(num_phases)[:, None] * PIECES
    assert ((seen >= first) & (seen < first + PIECES)).all()
    assert (before == num_phases).all()


def test_a_late_thread_finds_nothing_left() -> None:
    before, seen = np.zeros(PIECES, np.int64), np.zeros((3, PIECES), np.int64)
    counters = new_counters(3)
    SharedThreads().call(count, 1, before, seen, counters)
    late = threading.Thread(target=count, args=(before, seen, counters))
    late.start()
    late.join(10)
    assert not late.is_alive()
    assert (before == 3).all()
