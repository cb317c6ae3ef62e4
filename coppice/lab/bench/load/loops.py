"""Two ways to load a server: so many requests at once, and requests that come when they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from coppice.lab.bench.load.arrivals import Arrival
from coppice.lab.bench.load.window import Fate, Window
from coppice.lab.bench.load.workload import Workload

# A client that was turned away comes again after this long, as a polite one would.
PAUSE_S = 0.1


class Crowd:
    """So many workers, each of which sends its next request when its last one has ended."""

    def __init__(self, group: asyncio.TaskGroup, window: Window, workload: Workload) -> None:
        self._group, self._window, self._workload = group, window, workload
        self._numbers = itertools.count()
        self._workers: list[asyncio.Task[None]] = []

    def resize(self, num_workers: int) -> None:
        """Let workers join, or cancel the last ones and their requests."""
        while len(self._workers) < num_workers:
            self._workers.append(self._group.create_task(self._work()))
        _cancel(self._workers[num_workers:])
        del self._workers[num_workers:]

    async def _work(self) -> None:
        while True:
            request = self._workload.request(next(self._numbers))
            if await self._window.ask(request) is not Fate.COMPLETED:
                await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def closed_loop(window: Window, workload: Workload) -> AsyncIterator[Crowd]:
    """A crowd of nobody yet; at the end those who are left are cancelled."""
    async with asyncio.TaskGroup() as group:
        crowd = Crowd(group, window, workload)
        try:
            yield crowd
        finally:
            crowd.resize(0)


async def open_loop(window: Window, workload: Workload, arrivals: Sequence[Arrival], drain_s: float) -> None:
    """Send every request at its time, however slow the answers to others; cancel those that last too long.

    Requests may take until `drain_s` after the last arrival.
    """
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, arrival in enumerate(arrivals):
            await window.wait_until(arrival.at_s)
            request = workload.request(number, arrival.num_tokens)
            tasks.append(group.create_task(window.ask(request, arrival.at_s, arrival.manner)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            _cancel(late)


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
