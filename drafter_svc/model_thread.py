"""The one thread that runs the model: jobs in order, and idle work when no job waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]
# Idle work begins after this pause: the event loop shares the interpreter with us, and has an answer to send first.
QUIET_S = 0.0005


class ModelThread:
    """Runs jobs one after the other, first in first out; idle work only while no job waits.

    A job that raises is logged; it must report its own failure to whoever waits for it.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle: deque[Job] = deque()
        # Whether the last thing done was a job, whose answer the event loop may still be sending.
        self._just_answered = True
        self._thread = threading.Thread(target=self._run, name="drafter-model", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait, idle ones left out."""
        return self._jobs.qsize()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run a job after those that were submitted before it. Any thread may call this."""
        self._jobs.put(job)

    def submit_idle(self, job: Job) -> None:
        """Run a job when no other waits. Only a job, on this thread, may call this."""
        self._idle.append(job)

    def stop(self) -> None:
        """Finish the submitted jobs, drop the idle ones and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of the model thread failed")

    def _next(self) -> Job | None:
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
