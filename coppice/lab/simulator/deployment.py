"""Verifiers, drafters and the requests of one orchestrator, in one time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from coppice.lab.simulator.drafters import DrafterLink, SimulatedDrafter, least_busy
from coppice.lab.simulator.machine import Machine
from coppice.lab.simulator.orchestrators import Clock, SimulatedOrchestrator
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.profile import Text
from coppice.lab.simulator.requests import SimulatedRequest
from coppice.lab.simulator.verifiers import Counts, SimulatedVerifier
from orchestrator.planner.base import Planner

MakePlanner = Callable[[Callable[[], float]], Planner]


@dataclass(frozen=True)
class Fleet:
    """How many there are of each. Where no more than one machine's worth of each is there, they may share one.

    Raises ValueError if there is no verifier, or less than no drafter.
    """

    verifiers: int = 1
    drafters: int = 1

    def __post_init__(self) -> None:
        if self.verifiers < 1 or self.drafters < 0:
            raise ValueError("a fleet needs a verifier, and not fewer than 0 drafters")


class Deployment:
    """Runs requests under one policy; each verifier has a planner of its own.

    Drafters share verifiers' machines in turns: what contention there is, is between those of one machine.
    """

    def __init__(self, planner: MakePlanner, policy: Policy, machine: Machine, fleet: Fleet, seed: int = 0) -> None:
        self.clock = Clock()
        self.policy = policy
        self._machine = machine
        self._orchestrator = SimulatedOrchestrator(self.clock, machine)
        self.drafters = [self._drafter(number % fleet.verifiers) for number in range(fleet.drafters)]
        generator = random.Random(seed)
        self.verifiers = [
            self._verifier(number, fleet.verifiers, generator.getrandbits(32)) for number in range(fleet.verifiers)
        ]
        self.planners = [planner(lambda: self.clock.now_s) for _ in self.verifiers]

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @property
    def turnaround_s(self) -> float:
        """From the end of a request to when its client's next one is here."""
        return self._machine.orchestrator.turnaround_s

    @property
    def counts(self) -> Counts:
        """What the passes of all verifiers and the drafts of all drafters came to."""
        total = Counts(
            drafts=sum(drafter.num_drafts for drafter in self.drafters),
            drafting_s=sum(drafter.busy_s for drafter in self.drafters),
        )
        for verifier in self.verifiers:
            for name, value in vars(verifier.counts).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def open(
        self, text: Text, num_prompt: int, max_tokens: int, on_end: Callable[[SimulatedRequest], None] = lambda _: None
    ) -> SimulatedRequest:
        """Begin a request at the verifier, and the drafter, that have the fewest."""
        number = min(range(len(self.verifiers)), key=lambda index: self.verifiers[index].num_sequences)
        links = []
        if self.policy.speculates and self.drafters:
            drafter = least_busy(self.drafters)
            links = [DrafterLink(self._orchestrator, drafter, text, num_prompt)]
        return SimulatedRequest(
            self._orchestrator,
            self.verifiers[number],
            self.planners[number],
            self.policy,
            text,
            links,
            num_prompt,
            max_tokens,
            on_end,
        )

    def run(self, seconds: float) -> float:
        """Go on for so long; returns tokens per second."""
        before = self.counts.tokens
        self.clock.run_until(self.now_s + seconds)
        return (self.counts.tokens - before) / seconds

    def _drafter(self, beside: int) -> SimulatedDrafter:
        return SimulatedDrafter(self._orchestrator, lambda: self.verifiers[beside].is_computing)

    def _verifier(self, number: int, count: int, seed: int) -> SimulatedVerifier:
        beside = self.drafters[number::count]

        def on_pace() -> None:
            for drafter in beside:
                drafter.pace_changed()

        return SimulatedVerifier(
            self.clock, self._machine, seed, lambda: sum(drafter.drafted_s for drafter in beside), on_pace
        )
