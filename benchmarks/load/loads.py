"""What is done to a server in one window: so many requests at once, arrivals at random or of a trace, a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from benchmarks.load.arrivals import Arrival, poisson_arrivals
from benchmarks.load.figures import Span
from benchmarks.load.loops import Level, closed_loop, open_loop
from benchmarks.load.window import Window
from benchmarks.load.workload import Workload

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
    """So many requests at once; what comes before `warm_up_s` does not count."""

    concurrency: int
    warm_up_s: float
    duration_s: float

    @property
    def name(self) -> str:
        """For example c16."""
        return f"c{self.concurrency}"

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """The same requests in every run."""
        end_s = self.warm_up_s + self.duration_s
        await closed_loop(window, workload, [Level(self.concurrency, end_s)])
        return Span(self.warm_up_s, end_s)


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
class StepLoad:
    """One request at a time, then many, then one again, each for so long."""

    concurrency: int
    level_s: float
    name: str = "step"

    @property
    def levels(self) -> tuple[Level, ...]:
        """In order."""
        return tuple(Level(concurrency, self.level_s) for concurrency in (1, self.concurrency, 1))

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        """The same requests in every run."""
        await closed_loop(window, workload, self.levels)
        return Span(0.0, self.level_s * len(self.levels))


OpenLoad = PoissonLoad | TraceLoad


def _whole(window: Window, duration_s: float) -> Span:
    """Once the last answer has come."""
    return Span(0.0, max(duration_s, window.now()))
