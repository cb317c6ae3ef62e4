"""Looks at how many outputs run and wait at an orchestrator, through its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coppice.lab.bench.contenders import BenchmarkError

INTERVAL_S = 0.2
TIMEOUT_S = 5.0
RUNNING = "coppice_orchestrator_num_requests_running"
WAITING = "coppice_orchestrator_num_requests_waiting"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Outputs that run and that wait."""

    num_running: int
    num_waiting: int


@dataclass(frozen=True)
class CrowdWatch:
    """The metrics at a URL; without one nothing is looked at."""

    url: str | None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[list[Crowd]]:
        """What is seen every 200 ms while the context is open, in order.

        Raises:
            BenchmarkError: the metrics cannot be had.
        """
        seen: list[Crowd] = []
        task = asyncio.create_task(self._watch(seen))
        try:
            yield seen
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()):
            raise BenchmarkError(f"no metrics at {self.url}: {error}") from error

    async def _watch(self, seen: list[Crowd]) -> None:
        while self.url is not None:
            seen.append(await asyncio.to_thread(read_crowd, self.url))
            await asyncio.sleep(INTERVAL_S)


def read_crowd(url: str) -> Crowd:
    """What an orchestrator's metrics say now.

    Raises:
        OSError: they cannot be read.
        ValueError: they are those of something else.
    """
    # Only ever of our own orchestrator on this machine.
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith((RUNNING, WAITING)))
    if RUNNING not in values or WAITING not in values:
        raise ValueError("they are not an orchestrator's")
    return Crowd(int(float(values[RUNNING])), int(float(values[WAITING])))
