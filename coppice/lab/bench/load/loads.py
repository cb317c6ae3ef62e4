"""What is done to a server in one window: so many requests at once, arrivals at random or of a trace, a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from coppice.lab.bench.load.arrivals import Arrival, poisson_arrivals
from coppice.lab.bench.load.figures import Span
from coppice.lab.bench.load.loops import closed_loop, open_loop
from coppice.lab.bench.load.window import Window
from coppice.lab.bench.load.workload import Workload

# A warm-up that has not ended by then ends.
WARM_UP_LIMIT_S = 60.0
# How long requests may take after the last arrival; an overload of 1.2 leaves a fifth of a window's work over.
DRAIN_S = 60.0


class Load(Protocol):
    """Something to do to a server."""

    @property
    def name(self) -> str:
        """Short and unique within a benchmark."""
        ...

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """Send the requests; returns the part of the window that counts."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """So many requests at once, for so long after a warm-up.

    The warm-up ends when as many requests have ended as run at once: prompts that began together are behind then, and
    outputs of different lengths have pulled the requests apart.
    """

    concurrency: int
    duration_s: float

    @property
    def name(self) -> str:
        """For example c16."""
        return f"c{self.concurrency}"

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """The same requests in every run."""
        async with closed_loop(window, workload) as crowd:
            crowd.resize(self.concurrency)
            await window.wait_for_ended(self.concurrency, WARM_UP_LIMIT_S)
            span = Span(start_s := window.now(), start_s + self.duration_s)
            await window.wait_until(span.end_s)
        return span


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Requests that arrive at random: `rate` is a share of what saturates the server without speculation."""

    rate: float
    rate_per_s: float
    duration_s: float
    seed: int

    @property
    def name(self) -> str:
        """For example r0.6."""
        return f"r{self.rate:g}"

    def arrivals(self, run: int) -> list[Arrival]:
        """The same for every policy, others in every run."""
        return poisson_arrivals(self.rate_per_s, self.duration_s, f"{self.seed} {self.rate:g} {run}")

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """All of it counts: until the last answer, but not less than the time of arrivals."""
        await open_loop(window, workload, self.arrivals(run), DRAIN_S)
        return _whole(window, self.duration_s)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Requests that arrive when those of a trace did."""

    arrivals: tuple[Arrival, ...]
    duration_s: float
    name: str = "trace"

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """As for arrivals at random."""
        await open_loop(window, workload, self.arrivals, DRAIN_S)
        return _whole(window, self.duration_s)


@dataclass(frozen=True, slots=True)
class Level:
    """So many requests at once, in a part of a window."""

    concurrency: int
    span: Span


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One request at a time for `duration_s`, then many for twice as long, then one again."""

    concurrency: int
    duration_s: float
    name: str = "step"

    @property
    def levels(self) -> tuple[Level, Level, Level]:
        """In order. Many requests take a while to begin, all at once."""
        ends_s = [count * self.duration_s for count in (0, 1, 3, 4)]
        before, at, after = (Span(start_s, end_s) for start_s, end_s in pairwise(ends_s))
        return Level(1, before), Level(self.concurrency, at), Level(1, after)

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """The same requests in every run."""
        async with closed_loop(window, workload) as crowd:
            for level in self.levels:
                crowd.resize(level.concurrency)
                await window.wait_until(level.span.end_s)
        return Span(0.0, self.levels[-1].span.end_s)


OpenLoad = PoissonLoad | TraceLoad


def _whole(window: Window, duration_s: float) -> Span:
    """Once the last answer has come."""
    return Span(0.0, max(duration_s, window.now()))
