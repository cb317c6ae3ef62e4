"""Loads: requests, their beginnings, and what is counted of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coppice.lab.simulator.deployment import Deployment
from coppice.lab.simulator.profile import Trace, TracedText
from coppice.lab.simulator.requests import SimulatedRequest
from coppice.lab.simulator.verifiers import Counts

# As in `coppice/lab/bench/load`: a warm-up that has not ended by then ends, and so do requests open after the last one.
WARM_UP_LIMIT_S = 60.0
DRAIN_S = 60.0


@dataclass(frozen=True)
class Workload:
    """Recorded outputs in turn, with lengths of outputs drawn as `coppice/lab/bench/load/loads.py` draws them.

    `prompt_tokens`: lengths of prompts in turn; those of the records where it is empty.
    """

    traces: tuple[Trace, ...]
    min_tokens: int = 32
    max_tokens: int = 128
    prompt_tokens: tuple[int, ...] = ()
    seed: int = 0

    def num_tokens(self, number: int) -> int:
        return random.Random(f"{self.seed} {number}").randint(self.min_tokens, self.max_tokens)

    def num_prompt(self, number: int) -> int:
        if self.prompt_tokens:
            return self.prompt_tokens[number % len(self.prompt_tokens)]
        return self.trace(number).num_prompt

    def trace(self, number: int) -> Trace:
        """What a request's output is taken from."""
        return self.traces[number % len(self.traces)]


@dataclass(frozen=True)
class Window:
    """What happened in the part of a run that counts."""

    duration_s: float
    counts: Counts
    requests: tuple[SimulatedRequest, ...]
    start_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.counts.tokens / self.duration_s

    @property
    def ttfts_s(self) -> list[float]:
        """Times to the first token, of requests whose first one came in the window."""
        return [
            one.first_s - one.opened_s for one in self.requests if one.first_s is not None and self._has(one.first_s)
        ]

    @property
    def tpots_s(self) -> list[float]:
        """Times per token after the first round, of requests that ended in the window."""
        return [
            (one.ended_s - one.first_s) / max(1, one.num_tokens - 1)
            for one in self.requests
            if one.ended_s is not None and one.first_s is not None and self._has(one.ended_s)
        ]

    def _has(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.start_s + self.duration_s


@dataclass(frozen=True)
class ClosedLoad:
    """So many requests at once, for so long after as many have ended."""

    concurrency: int
    duration_s: float = 10.0

    @property
    def name(self) -> str:
        """For example c16."""
        return f"c{self.concurrency}"

    def run(self, deployment: Deployment, workload: Workload) -> Window:
        """Whenever one ends, the next begins."""
        arrivals = _Arrivals(deployment, workload)
        for _ in range(self.concurrency):
            arrivals.begin(again=True)
        while arrivals.num_ended < self.concurrency and deployment.clock.step(WARM_UP_LIMIT_S):
            pass
        return _counted(deployment, arrivals, deployment.now_s + self.duration_s)


@dataclass(frozen=True)
class PoissonLoad:
    """Requests that arrive at random, so many a second, however slow the answers are."""

    rate_per_s: float
    duration_s: float = 10.0
    seed: int = 0

    @property
    def name(self) -> str:
        """For example r3/s."""
        return f"r{self.rate_per_s:g}/s"

    def run(self, deployment: Deployment, workload: Workload) -> Window:
        """All of it counts, until the last answer."""
        arrivals = _Arrivals(deployment, workload)
        generator, at_s = random.Random(f"{self.seed} {self.rate_per_s:g}"), 0.0
        while (at_s := at_s + generator.expovariate(self.rate_per_s)) < self.duration_s:
            deployment.clock.later(at_s, arrivals.begin)
        return _counted(deployment, arrivals, self.duration_s, self.duration_s + DRAIN_S)


Load = ClosedLoad | PoissonLoad


class _Arrivals:
    """The requests of a run, numbered as they begin."""

    def __init__(self, deployment: Deployment, workload: Workload) -> None:
        self._deployment = deployment
        self._workload = workload
        self.requests: list[SimulatedRequest] = []
        self.num_ended = 0

    def begin(self, *, again: bool = False) -> None:
        """The next request, and another one after it if `again`."""
        deployment, number, workload = self._deployment, len(self.requests), self._workload

        def ended(_: SimulatedRequest) -> None:
            self.num_ended += 1
            if again:
                deployment.clock.later(deployment.turnaround_s, lambda: self.begin(again=True))

        text = TracedText(workload.trace(number))
        self.requests.append(deployment.open(text, workload.num_prompt(number), workload.num_tokens(number), ended))


def _counted(deployment: Deployment, arrivals: _Arrivals, end_s: float, drained_s: float = 0.0) -> Window:
    """Go on to a time, then until all requests have ended or `drained_s` has come."""
    start_s, before = deployment.now_s, deployment.counts
    deployment.clock.run_until(end_s)
    while len(arrivals.requests) > arrivals.num_ended and deployment.clock.step(drained_s):
        pass
    counts = {name: value - getattr(before, name) for name, value in vars(deployment.counts).items()}
    return Window(deployment.now_s - start_s, Counts(**counts), tuple(arrivals.requests), start_s)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least so large a share is not above; None where there is none."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None
