"""The overhead suite from end to end: planner, rounds, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import Ratios
from coppice.lab.bench.harness.report import Report, Row, Shown, document
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.overhead.peers import DRAFT_IN, DRAFT_ON, OUTCOME_IN, OUTCOME_ON
from coppice.lab.bench.overhead.planner_cost import planner_cost
from coppice.lab.bench.overhead.rounds import heard, measure_rounds, scripted_peers
from coppice.net.rpc import run

# Trees whose messages are counted, whatever `num_nodes` is.
COUNTED_NODES = 64
PEERS = {"verifier": (OUTCOME_IN, DRAFT_ON), "drafter": (OUTCOME_ON, DRAFT_IN)}
NOTES = (
    "No model runs. Requests are FORCED in the rounds, so that every round has a draft. Where the planner is measured, "
    "it decides as ever.",
    "Planner: CPU time of everything that planning one pass takes, one round of each request. Sources 2: half of the "
    "trees are merged ones. Trees are always as large as the settings say, also where the plan asks for fewer nodes.",
    "Inside: from a message's arrival at the orchestrator to the leaving of what follows from it, both halves of a "
    "round together, with the keeping of its timeline.",
    "Outside: the same as the peers see it, with the network, gRPC on both sides and the time that messages wait for "
    "each other. These peers answer at once, so that many requests always saturate the orchestrator.",
    "CPU time per round is that of the orchestrator's whole process, gRPC and client streams included.",
)


SHOWN = Shown(
    tables=(
        Table(
            "Planner: microseconds of CPU per pass, trees of {num_nodes} nodes",
            "us_p50 us_p90 us_p99 asked_share",
            where=lambda row: row["kind"] == "planner",
        ),
        Table(
            "Orchestrator: microseconds per round, its peers answer at once",
            "inside_us_p50 inside_us_p99 outside_us_p50 outside_us_p99 cpu_us_per_round verifier_messages "
            "verifier_largest_bytes drafter_messages drafter_largest_bytes",
            where=lambda row: row["kind"] == "rounds",
        ),
    ),
    ratio_title="",
)


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """What is measured: at each number of requests so many passes, and about so many rounds in all."""

    requests: tuple[int, ...] = (1, 16, 64)
    num_nodes: int = 32
    num_passes: int = 1000
    num_rounds: int = 6400
    seed: int = 0

    def rounds_of_each(self, num_requests: int) -> int:
        return max(2, self.num_rounds // num_requests)


def measure_overhead(plan: OverheadPlan) -> Report:
    """Measure and return the report. Raises BenchmarkError if the process of the scripted peers failed."""
    machine = describe_machine()
    rows = [_planner_row(plan, num_requests, mixed) for num_requests in plan.requests for mixed in (False, True)]
    run(lambda: _add_round_rows(plan, rows))
    settings = {**asdict(plan), "requests": list(plan.requests)}
    return document("overhead", machine, settings, rows, Ratios(figures(rows), {}), notes=NOTES)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What is promised, by number of requests: milliseconds of a pass and of a round; messages and bytes of a round."""
    found: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "planner":
            found[f"{row['name']}.pass-ms"] = row["us_p50"] / 1000
            continue
        for side in ("inside", "outside"):
            found[f"{row['name']}.{side}-ms.p50"] = row[f"{side}_us_p50"] / 1000
        for peer in PEERS:
            found[f"{row['name']}.{peer}.messages"] = row[f"{peer}_messages"]
            found[f"{row['name']}.{peer}.largest-bytes"] = row[f"{peer}_largest_bytes"]
    return found


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Fields of a row: the values that 50, 90 and 99 % of the values do not exceed."""
    ordered = sorted(values)
    return {f"{name}_p{part}": round(ordered[round(part / 100 * (len(values) - 1))], 2) for part in (50, 90, 99)}


def _planner_row(plan: OverheadPlan, num_requests: int, mixed: bool) -> Row:
    # Until the planner knows costs, it has less to do.
    warm_up = max(8, plan.num_passes // 5)
    pass_us, asked_share = planner_cost(num_requests, plan.num_nodes, plan.num_passes, warm_up, mixed, plan.seed)
    return {
        "name": f"planner x{num_requests} sources={1 + mixed}",
        "kind": "planner",
        "requests": num_requests,
        "sources": 1 + mixed,
        "passes": len(pass_us),
        "asked_share": round(asked_share, 4),
        **quantiles("us", pass_us),
    }


async def _add_round_rows(plan: OverheadPlan, rows: list[Row]) -> None:
    runs = [(count, plan.rounds_of_each(count), plan.num_nodes, "") for count in plan.requests]
    runs.append((1, plan.rounds_of_each(plan.requests[-1]), COUNTED_NODES, f" nodes={COUNTED_NODES}"))
    with scripted_peers() as peers:
        addresses = await heard(peers)
        for num_requests, num_rounds, num_nodes, label in runs:
            for cache in (False, True):
                seen = await measure_rounds(peers, addresses, num_requests, num_rounds, num_nodes, cache)
                name = f"rounds x{num_requests}{label}{' cache' if cache else ''}"
                rows.append(_round_row(name, seen, num_requests, cache))


def _round_row(name: str, seen: Mapping[str, Any], num_requests: int, cache: bool) -> Row:
    ways, rounds = [way for of_peer in PEERS.values() for way in of_peer], seen["num_rounds"]
    return {
        "name": name,
        "kind": "rounds",
        "requests": num_requests,
        "cache": cache,
        "rounds": rounds,
        "timed_rounds": len(seen["inside_us"]),
        **quantiles("inside_us", seen["inside_us"]),
        **quantiles("outside_us", seen["round_us"]),
        "cpu_us_per_round": round(seen["cpu_us"], 1),
        "messages_per_round": {way: round(seen["messages"][way] / rounds, 4) for way in ways},
        "bytes_per_round": {way: round(seen["bytes"][way] / rounds, 1) for way in ways},
        "largest_message": {way: seen["largest"][way] for way in ways},
        **{f"{peer}_messages": sum(seen["messages"][way] for way in of) / rounds for peer, of in PEERS.items()},
        **{f"{peer}_largest_bytes": max(seen["largest"][way] for way in of) for peer, of in PEERS.items()},
    }
