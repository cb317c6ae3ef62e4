"""Who comes while a server is overloaded: requests at random, some of which are given up or read slowly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from coppice.lab.bench.load.arrivals import Arrival, poisson_arrivals
from coppice.lab.bench.load.manner import ATTENTIVE, Manner

# Those who leave do so at any moment up to this long after they have asked.
LEAVE_WITHIN_S = 2.0
# How long a slow reader rests after each delta.
SLOW_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Visitors:
    """Shares of requests whose clients leave early, and of those whose clients read slowly."""

    leaving: float = 0.05
    slow: float = 0.05

    def manner(self, rng: random.Random) -> Manner:
        """What the next client is like."""
        chance = rng.random()
        if chance < self.leaving:
            return Manner(leave_after_s=rng.uniform(0.0, LEAVE_WITHIN_S))
        return Manner(pause_s=SLOW_PAUSE_S) if chance < self.leaving + self.slow else ATTENTIVE


def visits(visitors: Visitors, rate_per_s: float, begin_s: float, duration_s: float, seed: str) -> list[Arrival]:
    """Poisson arrivals of such clients for so long from `begin_s` on."""
    rng = random.Random(f"{seed} manners")
    return [
        replace(arrival, at_s=begin_s + arrival.at_s, manner=visitors.manner(rng))
        for arrival in poisson_arrivals(rate_per_s, duration_s, seed)
    ]
