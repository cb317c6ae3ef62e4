"""Grammars that wait to be compiled, served fairly."""

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

# Short texts go first; one that has waited goes before shorter ones by so many bytes for each second.
_BYTES_PER_S = 2048


@dataclass(eq=False)
class Job:
    """A sequence's wish for the state of a grammar behind `output`."""

    grammar: Grammar
    output: Sequence[int]
    end_token_ids: Sequence[int]
    deliver: Deliver
    # Whoever has the same shares their turns.
    payer: str = ""
    came_s: float = field(default_factory=time.monotonic)

    @property
    def rank(self) -> float:
        """The lowest among a payer's goes first. Times cancel out, so that it never changes."""
        return len(self.grammar.text) + _BYTES_PER_S * self.came_s


class GrammarQueue:
    """Waiting jobs by payer. All methods may be called from any thread.

    The payer that has had the least time goes first. One that comes anew starts level with the least among those that
    wait: whoever asked for nothing has saved up nothing.
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
        """Queue a job; nothing happens once the queue is closed."""
        with self._changed:
            if self._closed:
                return
            if job.payer not in self._waiting:
                self._waiting[job.payer] = []
                self._spent_s[job.payer] = max(self._spent_s.get(job.payer, 0.0), self._level_s)
            self._waiting[job.payer].append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Take a job out, if it still waits."""
        with self._changed:
            self._remove([job])

    def take(self) -> list[Job] | None:
        """Wait for the next job; with it come all that wait for the same grammar. None once the queue is closed."""
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
        """Count the time that a payer's job has taken."""
        with self._changed:
            self._spent_s[payer] = self._spent_s.get(payer, self._level_s) + seconds
            # Those that are behind the level have nothing to be remembered for.
            for name in [name for name, spent_s in self._spent_s.items() if spent_s <= self._level_s]:
                if name not in self._waiting:
                    del self._spent_s[name]

    def close(self) -> None:
        """Forget all jobs; whoever waits for one is told that there will be none."""
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
