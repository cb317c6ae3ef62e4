"""Model thread: jobs in order, long readings in pieces, idle work when nothing waits."""

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
# Pause before idle work: the event loop shares the GIL and has an answer to send first.
QUIET_S = 0.0005
# Jobs that may run before a waiting piece: verifiers wait for drafts, but prompts must be read too.
JOBS_PER_PIECE = 4


class ModelThread:
    """Runs jobs in order; idle work only while no job waits.

    Long work is submitted in pieces. A piece runs when no job waits or `JOBS_PER_PIECE` have run before it. The
    shortest reading goes first; a later one overtakes an earlier one only while fewer pieces have run between their
    arrivals than it is shorter, so long prompts are not starved by short ones.

    A job that raises is logged; it must report its failure to its caller itself.
    """

    def __init__(self, set_up: Job | None = None) -> None:
        """`set_up` runs first on the thread."""
        self._set_up = set_up
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle: deque[Job] = deque()
        # By arrival plus remaining length of the reading, in pieces; then in order.
        self._pieces: list[tuple[int, int, Job]] = []
        self._numbers = itertools.count()
        self._jobs_before_piece = 0
        # Pieces run so far.
        self.num_pieces = 0
        # Whether the last work was a job, whose answer the event loop may still be sending.
        self._just_answered = True
        self._thread = threading.Thread(target=self._run, name="drafter-model", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Waiting jobs and pieces, without idle work."""
        return self._jobs.qsize() + len(self._pieces)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run a job after those submitted before. Safe on any thread."""
        self._jobs.put(job)

    def submit_idle(self, job: Job) -> None:
        """Run a job when no other waits. Only to be called by jobs, on this thread."""
        self._idle.append(job)

    def submit_piece(self, job: Job, came: int, num_left: int) -> None:
        """Run the next piece of a reading in its turn. Only to be called by jobs and pieces, on this thread.

        `num_left` pieces are left, this one included; `came` is the value of `num_pieces` at its arrival.
        """
        heapq.heappush(self._pieces, (came + num_left, next(self._numbers), job))

    def stop(self) -> None:
        """Finish submitted jobs, drop pieces and idle work, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._set_up is not None:
            self._set_up()
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # one job's error must not end the thread
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
