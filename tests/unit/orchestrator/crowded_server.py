"""A server in a modelled clock: an admission before it, and a pace that outputs share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from coppice.core.errors import OverloadedError
from orchestrator.admission.admission import Admission, Ticket
from orchestrator.admission.fair_queue import AdmissionRequest

# Tokens per second with n outputs at once are n / (STEP_S + n * ROW_S): what the bundled pair does on two cores.
STEP_S = 0.003
ROW_S = 0.0013
# Reading a prompt takes as long as so many tokens.
MIN_PROMPT, MAX_PROMPT = 4, 20
MEDIAN_TOKENS, SPREAD, MIN_TOKENS, MAX_TOKENS = 48, 0.6, 16, 128


@dataclass
class Visit:
    """One request, from when it comes until it has ended or is sent away."""

    arrived_s: float
    num_tokens: int
    # Tokens to go, the prompt's included.
    left: float
    ticket: Ticket
    ended_s: float | None = None

    @property
    def token_s(self) -> float:
        """Seconds per token from arrival to end."""
        assert self.ended_s is not None
        return (self.ended_s - self.arrived_s) / self.num_tokens


class CrowdedServer:
    """Outputs share the server evenly; who waits longer than the admission lets anybody is gone."""

    def __init__(self, max_running: int, max_queued: int, **limits: float) -> None:
        self.now_s = 0.0
        self.admission = Admission(max_running, max_queued, clock=lambda: self.now_s, **limits)  # type: ignore[arg-type]
        self.most_waiting = 0
        self.num_refused = 0
        self.num_arrived = 0
        self.ended: list[Visit] = []
        self._visits: list[Visit] = []
        self._chooser = random.Random(0)

    def load(self, rate_per_s: float, duration_s: float) -> list[Visit]:
        """Random arrivals for so long; returns those that got in and have ended by then."""
        before, end_s = len(self.ended), self.now_s + duration_s
        for at_s in self._arrivals(rate_per_s, end_s):
            self._run_until(at_s)
            self._arrive()
        self._run_until(end_s)
        return self.ended[before:]

    def _arrivals(self, rate_per_s: float, end_s: float) -> Iterator[float]:
        at_s = self.now_s + self._chooser.expovariate(rate_per_s)
        while at_s < end_s:
            yield at_s
            at_s += self._chooser.expovariate(rate_per_s)

    def _arrive(self) -> None:
        self.num_arrived += 1
        tokens = round(min(max(self._chooser.lognormvariate(0, SPREAD) * MEDIAN_TOKENS, MIN_TOKENS), MAX_TOKENS))
        prompt = self._chooser.uniform(MIN_PROMPT, MAX_PROMPT)
        try:
            ticket = self.admission.enter(AdmissionRequest("", 1), 1e9, 1)
        except OverloadedError:
            self.num_refused += 1
        else:
            self._visits.append(Visit(self.now_s, tokens, tokens + prompt, ticket))
            self.most_waiting = max(self.most_waiting, self.admission.num_waiting)

    def _run_until(self, at_s: float) -> None:
        """From event to event: an output's end, or that of somebody's patience."""
        while self.now_s < at_s:
            running = [visit for visit in self._visits if visit.ticket.started_s is not None]
            each_s = STEP_S + ROW_S * len(running)
            ends_s = [self.now_s + visit.left * each_s for visit in running]
            gone_s = [self._gone_s(visit) for visit in self._visits if visit.ticket.started_s is None]
            until_s = max(min([at_s, *ends_s, *gone_s]), self.now_s)
            for visit in running:
                visit.left -= (until_s - self.now_s) / each_s
            self.now_s = until_s
            self._settle()

    def _gone_s(self, visit: Visit) -> float:
        longest_s = self.admission.max_wait_s
        return float("inf") if longest_s is None else visit.arrived_s + longest_s

    def _settle(self) -> None:
        for visit in list(self._visits):
            if visit.ticket.started_s is not None and visit.left <= 1e-9:
                visit.ended_s, visit.ticket.num_tokens = self.now_s, visit.num_tokens
                self.ended.append(visit)
            elif visit.ticket.started_s is None and self._gone_s(visit) <= self.now_s:
                self.num_refused += 1
            else:
                continue
            self._visits.remove(visit)
            self.admission.leave(visit.ticket)
