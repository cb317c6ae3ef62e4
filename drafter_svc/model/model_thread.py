"""The one thread that runs the model: jobs in order, long readings piece by piece, idle work when nothing waits."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]
# Idle work begins after this pause: the event loop shares the interpreter with us, and has an answer to send first.
QUIET_S = 0.0005
# Jobs that may go before a piece of a reading that waits: verifiers wait for drafts, but prompts must be read, too.
JOBS_PER_PIECE = 4


class ModelThread:
    """Runs jobs one after the other, first in first out; idle work only while no job waits.

    What takes long is submitted piece by piece. A piece has its turn when no job waits or `JOBS_PER_PIECE` have gone
    before it. The shortest reading comes first; one that came later does so only while fewer pieces were run between
    the two than it is shorter by: long prompts have their turn however many short ones come.

    A job that raises is logged; it must report its own failure to whoever waits for it.
    """

    def __init__(self, set_up: Job | None = None) -> None:
        """`set_up` is what the thread does first."""
        self._set_up = set_up
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle: deque[Job] = deque()
        # By when a reading came and what is left of it, both in pieces and added up; then in order.
        self._pieces: list[tuple[int, int, Job]] = []
        self._numbers = itertools.count()
        self._jobs_before_piece = 0
        # Pieces that had their turn so far.
        self.num_pieces = 0
        # Whether the last thing done was a job, whose answer the event loop may still be sending.
        self._just_answered = True
        self._thread = threading.Thread(target=self._run, name="drafter-model", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Jobs and pieces that wait, idle work left out."""
        return self._jobs.qsize() + len(self._pieces)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run a job after those that were submitted before it. Any thread may call this."""
        self._jobs.put(job)

    def submit_idle(self, job: Job) -> None:
        """Run a job when no other waits. Only a job, on this thread, may call this."""
        self._idle.append(job)

    def submit_piece(self, job: Job, came: int, num_left: int) -> None:
        """Run the next piece of a reading in its turn. Only a job or a piece, on this thread, may call this.

        `num_left` pieces are left of it, this one included; `came` is what `num_pieces` was when it was new.
        """
        heapq.heappush(self._pieces, (came + num_left, next(self._numbers), job))

    def stop(self) -> None:
        """Finish the submitted jobs, drop pieces and idle work, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._set_up is not None:
            self._set_up()
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # a bug in one job must not end the thread of all
                logger.exception("a job of the model thread failed")

    def _next(self) -> Job | None:
        if self._pieces:
            return self._next_beside_pieces()
        if not self._idle:
            job = self._jobs.get()
        else:
            try:
                job = self._jobs.get(timeout=QUIET_S) if self._just_answered else self._jobs.get_nowait()
            except queue.Empty:
                self._just_answered = False
                return self._idle.popleft()
        self._just_answered = True
        return job

    def _next_beside_pieces(self) -> Job | None:
        if self._jobs_before_piece < JOBS_PER_PIECE:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                pass
            else:
                self._jobs_before_piece += 1
                self._just_answered = True
                return job
        self._jobs_before_piece = 0
        self.num_pieces += 1
        return heapq.heappop(self._pieces)[2]
