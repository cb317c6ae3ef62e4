"""What is measured: loads that a machine is fitted to, and others that are predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coppice.lab.bench.load.loads import ClosedLoad
from coppice.lab.bench.load.policies import OFF, Mode, Policy, policies


@dataclass(frozen=True, slots=True)
class Turn:
    """One closed load under one policy; the machine is fitted to it, or it is predicted."""

    load: ClosedLoad
    policy: Policy
    calibrates: bool


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """So many runs of each load under each policy, as far as `max_s` allows: one run at the least.

    No policy that drafts is the same in both kinds of loads, so that what is predicted was not fitted.
    """

    calibration: tuple[int, ...] = (1, 8, 64)
    budgets: tuple[int, ...] = (2, 8)
    validation: tuple[int, ...] = ()
    num_runs: int = 3
    duration_s: float = 5.0
    max_s: float = 2400.0
    recorded_tokens: int = 128
    recorded_nodes: int = 64

    def turns(self, server_max_nodes: int, run: int) -> Iterator[Turn]:
        """Of one run, in order: few requests first, both kinds side by side.

        Whose turn comes first rotates, so that both kinds see the same hours of the machine.
        """
        fitted = [Policy(OFF, Mode.MODE_OFF)]
        for budget in self.budgets:
            name = Policy("fixed", Mode.MODE_FORCED, min(budget, server_max_nodes)).simulated
            fitted.append(Policy(name, Mode.MODE_FORCED, min(budget, server_max_nodes)))
        for concurrency in sorted({*self.calibration, *self.validation}):
            load = ClosedLoad(concurrency, self.duration_s)
            turns = [Turn(load, policy, True) for policy in fitted if concurrency in self.calibration]
            if concurrency in self.validation:
                turns += [Turn(load, policy, False) for policy in policies(server_max_nodes)]
            first = run % len(turns)
            yield from (*turns[first:], *turns[:first])

    def num_turns(self) -> int:
        """Of all runs."""
        return self.num_runs * sum(1 for _ in self.turns(max(*self.budgets, 1), 0))
