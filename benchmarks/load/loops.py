"""Two ways to load a server: so many requests at once, and requests that come when they come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.arrivals import Arrival
from benchmarks.load.window import Fate, Window
from benchmarks.load.workload import Workload

# A client that was turned away comes again after this long, as a polite one would.
PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Level:
    """So many requests at once, for so long."""

    concurrency: int
    duration_s: float


async def closed_loop(window: Window, workload: Workload, levels: Sequence[Level]) -> None:
    """Keep each level's number of requests running, the next one sent when one ends; then cancel what is left.

    Where a level has fewer than the one before, those too many are cancelled at once.
    """
    numbers = itertools.count()
    end_s = 0.0
    async with asyncio.TaskGroup() as group:
        workers: list[asyncio.Task[None]] = []
        for level in levels:
            end_s += level.duration_s
            while len(workers) < level.concurrency:
                workers.append(group.create_task(_work(window, workload, numbers)))
            _cancel(workers[level.concurrency :])
            del workers[level.concurrency :]
            await window.wait_until(end_s)
        _cancel(workers)


async def open_loop(window: Window, workload: Workload, arrivals: Sequence[Arrival], drain_s: float) -> None:
    """Send every request at its time, however slow the answers to others; cancel those that last too long.

    Requests may take until `drain_s` after the last arrival.
    """
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, arrival in enumerate(arrivals):
            await window.wait_until(arrival.at_s)
            request = workload.request(number, arrival.num_tokens)
            tasks.append(group.create_task(window.ask(request, intended_s=arrival.at_s)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            _cancel(late)


async def _work(window: Window, workload: Workload, numbers: Iterator[int]) -> None:
    while True:
        if await window.ask(workload.request(next(numbers))) is not Fate.COMPLETED:
            await asyncio.sleep(PAUSE_S)


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
