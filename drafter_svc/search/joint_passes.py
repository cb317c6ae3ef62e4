"""Drafts of several sequences at a time: what each of them asks of the model next is computed in one pass.

A drafter's time is mostly that of reading its weights, or of starting kernels on a GPU, and a pass over the rows of
many sequences does so once. Drafts are written as if each were alone; here each is a coroutine that stops where it
wants a pass. Where each has stopped or is done, the passes are made as one, and all go on.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from drafter_svc.kernels.base import Found, WholeSearch
from drafter_svc.model.prefix_blocks import KvBlock
from drafter_svc.model.tree_cache import FloatArray, Forward, Rows

logger = logging.getLogger(__name__)

Store = TypeVar("Store")
Job: TypeAlias = Callable[[], None]

# Sequences of a pass that are tried, and how often each number is timed behind a prompt of so many tokens.
SIZES = (2, 4, 8, 16, 32)
_TIMES = 5
_PROMPT_ROWS = 64
# Drafts together have to be this much sooner than one after another on average, which differs a little by chance.
_CLEARLY = 0.9


@runtime_checkable
class JoiningForward(Forward[Store], Protocol):
    """A forward pass that can be one for several sequences."""

    def run_many(self, passes: Sequence[tuple[Store, Rows]]) -> list[FloatArray]:
        """What `run` does for each of them, which have stores of their own: logits [num_logits, vocab] for each.

        Where it raises, no store has got rows.
        """
        ...


class JointPasses(Generic[Store]):
    """A forward pass whose passes are joined while `together` runs. The model thread's own."""

    def __init__(self, forward: JoiningForward[Store], most: int = 0) -> None:
        """At most `most` drafts are made together; with 0 `measure` finds out, and until then there is one.

        Raises:
            ImportError: there are no coroutines to do it with.
        """
        from greenlet import getcurrent, greenlet

        self._forward = forward
        self._coroutine, self._current = greenlet, getcurrent
        self._most = most
        # The coroutine that makes the passes, while drafts are made together.
        self._hub: Any = None
        self.vocab_size = forward.vocab_size
        self.max_positions = forward.max_positions
        self.max_unread = forward.max_unread
        # Passes that were made for several drafts.
        self.num_joint = 0

    @property
    def most(self) -> int:
        """Most drafts that are made together."""
        return self._most or 1

    def measure(self, num_rows: int) -> None:
        """Join as many passes of so many rows as are sooner done together, on average, than one after another."""
        if self._most:
            return
        alone_s, found = self._seconds(1, num_rows), 1
        for count in SIZES:
            # One after another, the first waits for one pass and the last for all.
            if self._seconds(count, num_rows) > _CLEARLY * (count + 1) / 2 * alone_s:
                break
            found = count
        self._most = found
        logger.info("drafts that are made together: up to %d", found)

    def together(self, jobs: Sequence[Job]) -> None:
        """Run jobs that draft, each for another sequence.

        A pass that fails is made for each alone; what it raises then is that job's. A job that raises is logged.
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
        """Append the rows, with those of the other drafts that are being made; returns logits [num_logits, vocab]."""
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
        """What one pass for all finds, or each alone where that fails; for each its logits, or what was raised."""
        if len(asked) > 1:
            try:
                logits = self._forward.run_many(asked)
            except Exception as error:  # noqa: BLE001  whoever fails alone, too, is told
                logger.warning("a pass for %d drafts failed, each has its own: %s", len(asked), error)
            else:
                self.num_joint += 1
                return logits
        return [self._alone(*one) for one in asked]

    def _alone(self, store: Store, rows: Rows) -> FloatArray | Exception:
        try:
            return self._forward.run(store, rows)
        except Exception as error:  # noqa: BLE001  it is the job's own to handle
            return error

    def _seconds(self, count: int, num_rows: int) -> float:
        """What a pass of `num_rows` rows for each of `count` sequences takes."""
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
    """The pass with drafts made together, at most so many (0: as many as pay); as it is where it cannot be joined."""
    if most == 1 or not isinstance(forward, JoiningForward):
        return forward
    try:
        return JointPasses(forward, most)
    except ImportError:
        logger.warning("drafts are made one after another: greenlet is not installed")
        return forward


def _chain(before: int, count: int) -> Rows:
    """Rows of a chain behind so many others."""
    mask = np.zeros((count, before + count), np.float32)
    mask[:, before:][np.triu_indices(count, 1)] = -np.inf
    return Rows(np.zeros(count, np.int64), np.arange(before, before + count), mask, count)


def _logged(job: Job) -> Job:
    def run() -> None:
        try:
            job()
        except Exception:  # a bug in one job must not end the others
            logger.exception("a draft failed beside others")

    return run
