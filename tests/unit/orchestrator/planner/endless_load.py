"""The simulator under a load for tests of the planner: requests without end, of texts that are drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.lab.simulator.deployment import Deployment, Fleet, MakePlanner
from coppice.lab.simulator.machine import Contention, Curve, DrafterCosts, Machine, VerifierCosts
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.requests import SimulatedRequest
from orchestrator.planner.base import Planner
from tests.unit.orchestrator.planner.drawn_text import DrawnText, Predictability

# Measured for the bundled target behind 256 tokens: rows, and seconds of the pass. A prompt's rows cost what others do.
# Prompts are short: these loads begin all at once. From an outcome to the next tree there are four messages.
MACHINE = Machine(
    VerifierCosts(
        Curve((1, 8, 16, 32, 64, 128, 256), (0.0051, 0.0065, 0.008, 0.0118, 0.0147, 0.028, 0.05)),
        gap_sequence_s=0.0001,
        row_multiple=4,
    ),
    DrafterCosts(Curve((0, 64), (0.002, 0.0084)), read_token_s=0.0001),
    message_s=0.00015,
    contention=Contention(pass_per_draft=0.5),
    noise=0.05,
)
NUM_PROMPT = 1
ENDLESS = 1 << 20


@dataclass(frozen=True)
class Seen:
    """Where a request is."""

    rounds: int
    tokens: int
    # How long its first token took; None before.
    first_token_s: float | None


class EndlessLoad:
    """One verifier, one drafter, and so many requests at once."""

    def __init__(
        self,
        planner: MakePlanner,
        policy: Policy,
        text: Predictability,
        seed: int = 0,
        machine: Machine = MACHINE,
        num_prompt: int = NUM_PROMPT,
    ) -> None:
        self.deployment = Deployment(planner, policy, machine, Fleet(), seed)
        self._text = text
        self._num_prompt = num_prompt
        self._random = random.Random(seed)
        self._requests: list[SimulatedRequest] = []
        self._texts: list[DrawnText] = []
        self._all: list[SimulatedRequest] = []

    @property
    def planner(self) -> Planner:
        """The verifier's."""
        [planner] = self.deployment.planners
        return planner

    @property
    def passes(self) -> int:
        """Passes so far."""
        return self.deployment.counts.passes

    @property
    def num_asked(self) -> int:
        """Messages that asked drafters for a draft."""
        return sum(request.num_asked for request in self._all)

    @property
    def seen(self) -> Sequence[Seen]:
        """Where each running request is."""
        return [_seen(request) for request in self._requests]

    def set_load(self, num_requests: int, text: Predictability | None = None) -> None:
        """Start or end requests until so many run."""
        for request in self._requests[num_requests:]:
            request.close()
        del self._requests[num_requests:], self._texts[num_requests:]
        while len(self._requests) < num_requests:
            self._texts.append(DrawnText(text or self._text, self._random.getrandbits(32)))
            self._requests.append(self.deployment.open(self._texts[-1], self._num_prompt, ENDLESS))
            self._all.append(self._requests[-1])

    def change_text(self, number: int, text: Predictability) -> None:
        """Let a running request's text go on otherwise."""
        self._texts[number].change(text)

    def run(self, seconds: float) -> float:
        """Go on for so long; returns tokens per second."""
        return self.deployment.run(seconds)


def _seen(request: SimulatedRequest) -> Seen:
    first_token_s = None if request.first_s is None else request.first_s - request.opened_s
    return Seen(request.num_rounds, request.num_tokens, first_token_s)
