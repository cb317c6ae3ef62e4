"""One question to the simulator, and the answer as rows; or the loads of a measured run, and how far off it is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coppice.lab.simulator.deployment import Deployment, Fleet
from coppice.lab.simulator.loads import ClosedLoad, Load, Window, Workload, percentile
from coppice.lab.simulator.machine import Machine
from coppice.lab.simulator.policies import LINGER_US, MAX_NODES, Policy
from coppice.lab.simulator.profile import Profile

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


ERROR = "simulator.error"


class ValidationError(ValueError):
    """A report that cannot be compared with; the message says what it lacks."""


def read_load_report(path: Path) -> dict[str, Any]:
    """The report of `coppice bench load` in a file.

    Raises ValidationError if it cannot be read, or lacks what a simulation needs.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValidationError(f"{path.name}: {error}") from error
    if not isinstance(report, dict) or report.get("suite") != "load":
        raise ValidationError(f"{path.name}: not a report of coppice bench load")
    settings = report["settings"]
    missing = [name for name in ("policies", "prompt_tokens") if name not in settings]
    if missing:
        raise ValidationError(f"{path.name}: its settings lack {' and '.join(missing)}; measure it anew")
    if settings["temperature"] != 0:
        raise ValidationError(f"{path.name}: measured at T={settings['temperature']:g}, and records are greedy")
    if not any(row["part"] == "closed" for row in report["rows"]):
        raise ValidationError(f"{path.name}: holds no closed load")
    return report


def compare(profile: Profile, report: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Any]]:
    """For each closed load and policy of a report: tokens per second as measured and as simulated."""
    settings = report["settings"]
    shortest, longest = settings["output_tokens"]
    workload = Workload(profile.traces, shortest, longest, tuple(settings["prompt_tokens"]), settings["seed"])
    scenario = Scenario(profile.machine, workload, max_nodes=settings["server_max_nodes"], seed=seed)
    for row in report["rows"]:
        if row["part"] != "closed":
            continue
        load = ClosedLoad(row["concurrency"], settings["duration_s"])
        window = scenario.run(Policy.parse(settings["policies"][row["policy"]]), load)
        measured, simulated = row["tokens_per_s"], window.tokens_per_s
        figures = _figures(window)
        yield {
            "name": row["name"],
            "measured_tokens_per_s": measured,
            "tokens_per_s": round(simulated, 3),
            "simulated/measured": round(simulated / measured, 4),
            # Whether the machine was fitted to such a load, in other windows.
            "is_fitted": row["name"] in settings.get("fitted", ()),
            # Where one of these is off, it tells which part of the model is.
            **{f"measured_{name}": row.get(name) for name in figures},
            **figures,
        }


def _figures(window: Window) -> dict[str, float | None]:
    """What the tokens per second come from, by the names that measured rows have for it."""
    counts, seconds = window.counts, window.duration_s
    rounds = max(1, counts.rounds)
    return {
        "mean_acceptance_length": round(counts.tokens / rounds, 3),
        "rows_per_pass": round(counts.row_passes / rounds, 3),
        "nodes_per_round": round(counts.nodes / rounds, 3),
        "passes_per_s": round(counts.passes / seconds, 3),
        "pass_ms": round(1000 * counts.pass_s / max(1, counts.passes), 3),
        "rounds_per_s": round(counts.rounds / seconds, 3),
        "drafted_share": round(counts.drafted / rounds, 4),
        "drafts_per_s": round(counts.drafts / seconds, 3),
    }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median and the largest of the absolute relative errors of what was predicted."""
    sizes = [abs(row["simulated/measured"] - 1) for row in rows if not row["is_fitted"]]
    if not sizes:
        return {}
    return {ERROR: round(statistics.median(sizes), 4), f"{ERROR}.max": round(max(sizes), 4)}
