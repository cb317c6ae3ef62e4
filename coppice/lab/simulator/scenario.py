"""One question to the simulator: a fleet on machines under loads and policies, and the answer as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coppice.lab.simulator.deployment import Deployment, Fleet
from coppice.lab.simulator.loads import ClosedLoad, Load, Window, Workload, percentile
from coppice.lab.simulator.machine import Machine
from coppice.lab.simulator.policies import LINGER_US, MAX_NODES, Policy

# A fleet has drafters enough when more of them would add less than this share.
ENOUGH = 0.98
# Drafters that are plenty for one verifier.
PLENTY = 16


@dataclass(frozen=True)
class Scenario:
    """Machines, a fleet of them, and what its orchestrator may spend on a round."""

    machine: Machine
    workload: Workload
    fleet: Fleet = field(default_factory=Fleet)
    max_nodes: int = MAX_NODES
    linger_us: int = LINGER_US
    seed: int = 0

    def run(self, policy: Policy, load: Load) -> Window:
        """What a load comes to under a policy, from a fresh start."""
        planner = policy.planner(self.max_nodes, self.linger_us)
        return load.run(Deployment(planner, policy, self.machine, self.fleet, self.seed), self.workload)

    def rows(self, policies: Sequence[Policy], loads: Sequence[Load]) -> Iterator[dict[str, Any]]:
        for load in loads:
            for policy in policies:
                window = self.run(policy, load)
                needed = None
                if policy.speculates and isinstance(load, ClosedLoad):
                    needed = self.drafters_needed(policy, load, window)
                yield {**_row(policy, load, window, self.fleet), "drafters_needed": needed}

    def drafters_needed(self, policy: Policy, load: ClosedLoad, known: Window) -> int:
        """The fewest drafters for one verifier, with its share of the load, that give `ENOUGH` of what many give.

        `known` is what the load comes to with the fleet as it is.
        """
        share = replace(load, concurrency=-(-load.concurrency // self.fleet.verifiers))

        def speed(drafters: int) -> float:
            if (self.fleet.verifiers, self.fleet.drafters) == (1, drafters):
                return known.tokens_per_s
            return replace(self, fleet=Fleet(1, drafters)).run(policy, share).tokens_per_s

        most = min(PLENTY, share.concurrency)
        wanted = ENOUGH * speed(most)
        return next((count for count in range(1, most) if speed(count) >= wanted), most)


def _row(policy: Policy, load: Load, window: Window, fleet: Fleet) -> dict[str, Any]:
    counts = window.counts
    return {
        "name": f"{policy} {load.name}",
        "policy": str(policy),
        "load": load.name,
        "tokens_per_s": round(window.tokens_per_s, 3),
        "ttft_ms_p50": _ms(percentile(window.ttfts_s, 0.5)),
        "ttft_ms_p99": _ms(percentile(window.ttfts_s, 0.99)),
        "tpot_ms_p50": _ms(percentile(window.tpots_s, 0.5)),
        "tpot_ms_p99": _ms(percentile(window.tpots_s, 0.99)),
        # As the server counts it: a pass once for each round in it.
        "rows_per_pass": _ratio(counts.row_passes, counts.rounds),
        "mean_acceptance_length": _ratio(counts.tokens, counts.rounds),
        "nodes_per_round": _ratio(counts.nodes, counts.rounds),
        "drafters_busy": _ratio(counts.drafting_s, fleet.drafters * window.duration_s),
        "num_requests": len(window.requests),
        "num_completed": sum(one.ended_s is not None for one in window.requests),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _ratio(one: float, other: float) -> float | None:
    return round(one / other, 3) if other else None
