"""Fair queue of grammars to compile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from coppice.core.errors import CoppiceError
from coppice.core.grammar import Grammar

if TYPE_CHECKING:
    from verifier_svc.grammar.matcher import GrammarState

Deliver: TypeAlias = Callable[["GrammarState | CoppiceError"], None]

# Shortest texts first; a second of waiting counts as this many bytes.
_BYTES_PER_S = 2048


@dataclass(eq=False)
class Job:
    """Request of a sequence for the grammar's state after `output`."""

    grammar: Grammar
    output: Sequence[int]
    end_token_ids: Sequence[int]
    deliver: Deliver
    # Jobs with the same payer share their turns.
    payer: str = ""
    came_s: float = field(default_factory=time.monotonic)

    @property
    def rank(self) -> float:
        """Rank among a payer's jobs, lowest first. Time cancels out, so it is constant."""
        return len(self.grammar.text) + _BYTES_PER_S * self.came_s


class GrammarQueue:
    """Waiting jobs by payer. Thread-safe.

    The payer with the least compilation time goes first. A new payer starts level with the least among waiting ones:
    idle time earns no credit.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, list[Job]] = {}
        self._spent_s: dict[str, float] = {}
        self._level_s = 0.0
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(len(jobs) for jobs in self._waiting.values())

    def put(self, job: Job) -> None:
        """Queue a job; a no-op once the queue is closed."""
        with self._changed:
            if self._closed:
                return
            if job.payer not in self._waiting:
                self._waiting[job.payer] = []
                self._spent_s[job.payer] = max(self._spent_s.get(job.payer, 0.0), self._level_s)
            self._waiting[job.payer].append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Remove a job if it is still waiting."""
        with self._changed:
            self._remove([job])

    def take(self) -> list[Job] | None:
        """Wait for the next job and all others for the same grammar. None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            payer = min(self._waiting, key=lambda name: self._spent_s[name])
            self._level_s = self._spent_s[payer]
            first = min(self._waiting[payer], key=lambda job: job.rank)
            others = [job for jobs in self._waiting.values() for job in jobs if job.grammar == first.grammar]
            taken = [first, *(job for job in others if job is not first)]
            self._remove(taken)
            return taken

    def charge(self, payer: str, seconds: float) -> None:
        """Count time spent on a payer's job."""
        with self._changed:
            self._spent_s[payer] = self._spent_s.get(payer, self._level_s) + seconds
            # Payers at or below the level need no record.
            for name in [name for name, spent_s in self._spent_s.items() if spent_s <= self._level_s]:
                if name not in self._waiting:
                    del self._spent_s[name]

    def close(self) -> None:
        """Drop all jobs and wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _remove(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            waiting = self._waiting.get(job.payer, [])
            if job in waiting:
                waiting.remove(job)
                if not waiting:
                    del self._waiting[job.payer]
