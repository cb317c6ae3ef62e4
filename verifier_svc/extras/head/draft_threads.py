"""Drafts of a pass's sequences at the same time: compiled drafts do not hold the GIL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from coppice.core.tree import TokenTree

# Weight of a group of drafts in the mean time.
_RATE = 1 / 64
# A draft may take so many usual ones, else something else delayed it.
_OUTLIER = 3.0

DraftJob = Callable[[], TokenTree]


class DraftThreads:
    """The caller's thread and `count` - 1 further ones, and what a draft takes. For one caller."""

    def __init__(self, count: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._count = count
        self._clock = clock
        # Torch counts its threads per thread.
        begin = partial(torch.set_num_threads, 1)
        self._pool = ThreadPoolExecutor(max(1, count - 1), "verifier-draft", initializer=begin)
        self._draft_s = 0.0
        self._num_timed = 0

    def seconds(self, num_drafts: int) -> float:
        """Seconds of so many drafts at the same time; 0 before the first."""
        return -(-num_drafts // self._count) * self._draft_s

    def run(self, jobs: Sequence[DraftJob]) -> list[Future[TokenTree]]:
        """Results or errors of jobs, all of them done."""
        begun_s = self._clock()
        first, *others = jobs
        results = [self._pool.submit(job) if self._count > 1 else _done(job) for job in others]
        results.insert(0, _done(first))
        # The last ones first: the other threads take them in order.
        for number in reversed(range(1, len(jobs))):
            if results[number].cancel():
                results[number] = _done(jobs[number])
        wait(results)
        # Without a tree, a piece of a prompt was read.
        if all(result.exception() is None and len(result.result()) for result in results):
            self._add(len(jobs), self._clock() - begun_s)
        return results

    def _add(self, num_drafts: int, seconds: float) -> None:
        """Learn from drafts that took so long together."""
        self._num_timed += 1
        draft_s = seconds / -(-num_drafts // self._count)
        if self._num_timed > 1:
            draft_s = min(draft_s, _OUTLIER * self._draft_s)
        self._draft_s += max(_RATE, 1 / self._num_timed) * (draft_s - self._draft_s)


def _done(job: DraftJob) -> Future[TokenTree]:
    """A job's result, made here."""
    result: Future[TokenTree] = Future()
    try:
        result.set_result(job())
    except Exception as error:  # noqa: BLE001  it ends one sequence
        result.set_exception(error)
    return result
