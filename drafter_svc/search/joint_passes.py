"""Joint drafts of several sequences: their next forward passes are computed as one.

A drafter mostly spends time reading weights, or starting kernels on a GPU, which a joint pass does once. Drafts are
written as if alone; each runs as a coroutine that stops at a forward pass. When all have stopped or finished, the
passes are made as one, and all continue.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from coppice.draft_models.kernels.base import Found, Rows, WholeSearch
from drafter_svc.model.prefix_blocks import KvBlock
from drafter_svc.model.tree_cache import FloatArray, Forward

logger = logging.getLogger(__name__)

Store = TypeVar("Store")
Job: TypeAlias = Callable[[], None]

# Numbers of sequences tried, repetitions of each timing, and length of the prompt in tokens.
SIZES = (2, 4, 8, 16, 32)
_TIMES = 5
_PROMPT_ROWS = 64
# Required ratio to the mean time of successive drafts, to exclude chance.
_CLEARLY = 0.9


@runtime_checkable
class JoiningForward(Forward[Store], Protocol):
    """A forward pass that can be joined for several sequences."""

    def run_many(self, passes: Sequence[tuple[Store, Rows]]) -> list[FloatArray]:
        """`run` for each pass, with stores of their own: logits [num_logits, vocab] each.

        If it raises, no store has new rows.
        """


class JointPasses(Generic[Store]):
    """A forward pass whose calls are joined while `together` runs. For the model thread."""

    def __init__(self, forward: JoiningForward[Store], most: int = 0) -> None:
        """At most `most` drafts are joined; 0: `measure` chooses, and until then one.

        Raises:
            ImportError: greenlet is not installed.
        """
        from greenlet import getcurrent, greenlet

        self._forward = forward
        self._coroutine, self._current = greenlet, getcurrent
        self._most = most
        # The coroutine that runs the passes, during joint drafts.
        self._hub: Any = None
        self.vocab_size = forward.vocab_size
        self.max_positions = forward.max_positions
        self.max_unread = forward.max_unread
        # Passes shared by several drafts.
        self.num_joint = 0

    @property
    def most(self) -> int:
        """Most drafts made jointly."""
        return self._most or 1

    def measure(self, num_rows: int) -> None:
        """Join as many passes of `num_rows` rows as finish sooner together, on average, than one after another."""
        if self._most:
            return
        alone_s, found = self._seconds(1, num_rows), 1
        for count in SIZES:
            # One after another, the first waits for one pass and the last for all.
            if self._seconds(count, num_rows) > _CLEARLY * (count + 1) / 2 * alone_s:
                break
            found = count
        self._most = found
        logger.info("joint drafts: up to %d", found)

    def together(self, jobs: Sequence[Job]) -> None:
        """Run drafting jobs of different sequences.

        If a joint pass fails, each job's pass is run alone and raises its own error. A job that raises is logged.
        """
        if len(jobs) == 1:
            jobs[0]()
            return
        self._hub = self._current()
        try:
            waiting = [(job, job.switch()) for job in [self._coroutine(_logged(job)) for job in jobs]]
            while waiting := [(job, asked) for job, asked in waiting if not job.dead]:
                found = self._pass([asked for _, asked in waiting])
                waiting = [
                    (job, job.throw(one) if isinstance(one, Exception) else job.switch(one))
                    for (job, _), one in zip(waiting, found, strict=True)
                ]
        finally:
            self._hub = None

    def new_store(self) -> Store:
        """An empty store."""
        return self._forward.new_store()

    def run(self, store: Store, rows: Rows) -> FloatArray:
        """Append the rows, jointly with those of other drafts; returns logits [num_logits, vocab]."""
        if self._hub is None:
            return self._forward.run(store, rows)
        logits: FloatArray = self._hub.switch((store, rows))
        return logits

    def keep(self, store: Store, first: int, rows: Sequence[int]) -> None:
        """Keep rows up to `first` and the given ones."""
        self._forward.keep(store, first, rows)

    def take(self, store: Store, first: int, last: int) -> KvBlock:
        """A copy of rows."""
        return self._forward.take(store, first, last)

    def put(self, store: Store, block: KvBlock) -> None:
        """Append copied rows."""
        self._forward.put(store, block)

    def search(self, store: Store, search: WholeSearch) -> Found | None:
        """A whole search, which is never joined."""
        return self._forward.search(store, search)

    def _pass(self, asked: Sequence[tuple[Store, Rows]]) -> Sequence[FloatArray | Exception]:
        """Results of one joint pass, or of single passes if it fails: logits or exception each."""
        if len(asked) > 1:
            try:
                logits = self._forward.run_many(asked)
            except Exception as error:  # noqa: BLE001  single passes raise their own errors
                logger.warning("a joint pass of %d drafts failed, running them alone: %s", len(asked), error)
            else:
                self.num_joint += 1
                return logits
        return [self._alone(*one) for one in asked]

    def _alone(self, store: Store, rows: Rows) -> FloatArray | Exception:
        try:
            return self._forward.run(store, rows)
        except Exception as error:  # noqa: BLE001  for the job to handle
            return error

    def _seconds(self, count: int, num_rows: int) -> float:
        """Median seconds of a pass of `num_rows` rows for each of `count` sequences."""
        before = max(1, min(_PROMPT_ROWS, self.max_positions - num_rows))
        num_rows = min(num_rows, self.max_positions - before)
        stores = [self._forward.new_store() for _ in range(count)]
        for store in stores:
            self._forward.run(store, _chain(0, before))
        passes = [(store, _chain(before, num_rows)) for store in stores]
        times = []
        for _ in range(_TIMES):
            started = time.perf_counter()
            if count == 1:
                self._forward.run(*passes[0])
            else:
                self._forward.run_many(passes)
            times.append(time.perf_counter() - started)
            for store in stores:
                self._forward.keep(store, before, [])
        return statistics.median(times)


def joined(forward: Forward[Any], most: int) -> Forward[Any]:
    """The forward with joint drafts, at most `most` (0: as many as pay); unchanged if it cannot be joined."""
    if most == 1 or not isinstance(forward, JoiningForward):
        return forward
    try:
        return JointPasses(forward, most)
    except ImportError:
        logger.warning("no joint drafts: greenlet is not installed")
        return forward


def _chain(before: int, count: int) -> Rows:
    """Rows of a chain after `before` others."""
    mask = np.zeros((count, before + count), np.float32)
    mask[:, before:][np.triu_indices(count, 1)] = -np.inf
    return Rows(np.zeros(count, np.int64), np.arange(before, before + count), mask, count)


def _logged(job: Job) -> Job:
    def run() -> None:
        try:
            job()
        except Exception:  # one job's error must not end the others
            logger.exception("a draft in a joint search failed")

    return run
