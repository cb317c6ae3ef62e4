"""The overhead suite: the planner alone, the orchestrator between scripted peers in another process, the report."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios
from coppice.lab.bench.harness.report import Report, Row, Shown, document
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from coppice.lab.bench.overhead.peers import DRAFT_IN, DRAFT_ON, OUTCOME_IN, OUTCOME_ON, RunSettings, run_peers
from coppice.net.rpc import run
from coppice.obs.timeline import Timeline, TimelineEvent
from orchestrator.app import running
from orchestrator.config import Config
from orchestrator.planner.adaptive import AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import RoundContext, RoundPlan
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome, VerifierLoad

# A pass of an accelerator: what it takes at least, and for each row. Drafting pays at every number of requests, so
# that all that the planner may have to do is done.
PASS_S = 0.02
ROW_S = 0.00002
LINGER_US = 40_000
# Different trees; each pass takes some of them as new objects, of which nothing is known yet.
NUM_TREES = 256
# Every second tree has nodes of a second source where sources are mixed.
MIXED_EVERY = 2


def planner_cost(
    num_requests: int, num_nodes: int, num_passes: int, warm_up: int, mixed: bool, seed: int
) -> tuple[list[float], float]:
    """Run passes of `num_requests` rounds and time everything that their planner does, called as `Drafting` calls it.

    Returns the microseconds of each measured pass, and the share of its rounds that asked for drafts.

    Trees have `num_nodes` nodes, those of two sources merged where `mixed` says so. CPU time of this thread: what else
    runs on the machine is not the planner's.
    """
    rng = random.Random(seed)
    now_s = 0.0
    planner = AdaptivePlanner(num_nodes, LINGER_US, clock=lambda: now_s)
    requests = [planner.follow(is_greedy=True) for _ in range(num_requests)]
    lengths = [rng.randrange(100, 800) for _ in requests]
    drafts = _endless_drafts(rng, num_nodes, mixed)
    asked = [False] * num_requests
    # As `Drafting` does it, which makes another one when something has changed.
    round_context = RoundContext(has_drafter=True)
    costs: list[float] = []
    num_asked = 0
    for number in range(warm_up + num_passes):
        trees = [next(drafts) if asks else None for asks in asked]
        started_s = time.thread_time()
        chosen = [_chosen(request, tree) for request, tree in zip(requests, trees, strict=True)]
        spent_s = time.thread_time() - started_s

        rows = num_requests + sum(map(len, chosen))
        pass_s = (PASS_S + ROW_S * rows) * rng.uniform(0.98, 1.04)
        now_s += pass_s
        outcomes = [_outcome(rng, length, tree, rows, pass_s) for length, tree in zip(lengths, chosen, strict=True)]
        sent = [[tree] if len(tree) else [] for tree in chosen]
        lengths = [length + len(outcome.token_ids) for length, outcome in zip(lengths, outcomes, strict=True)]
        load = VerifierLoad(num_requests, rows, round(1e6 * pass_s))

        started_s = time.thread_time()
        plans: list[RoundPlan] = []
        for request, outcome, trees_sent, asks in zip(requests, outcomes, sent, asked, strict=True):
            # The next round is planned before this one is learned from: drafters wait for it.
            plans.append(request.plan(round_context, load))
            request.round_over(outcome, trees_sent, asks)
        spent_s += time.thread_time() - started_s
        if number >= warm_up:
            costs.append(1e6 * spent_s)
            num_asked += sum(asked)
        asked = [plan.max_nodes > 0 for plan in plans]
    return costs, num_asked / (num_passes * num_requests)


def _chosen(request: AdaptiveRequest, tree: TokenTree | None) -> TokenTree:
    if tree is None:
        return EMPTY_TREE
    request.tree_arrived()
    return request.select(tree)


def _endless_drafts(rng: random.Random, num_nodes: int, mixed: bool) -> Iterator[TokenTree]:
    trees = [replace(best_first_tree(rng, num_nodes), source_names=("small-lm",)) for _ in range(NUM_TREES)]
    if mixed:
        cached = TokenTree((0, 1_000_001, 1_000_002), (-1, 0, 1), (-0.2, -0.5, -0.9), ("cache",))
        trees[::MIXED_EVERY] = [merge([tree.prune(num_nodes - 2), cached]) for tree in trees[::MIXED_EVERY]]
    while True:
        for tree in trees:
            # The planner is the first to ask how deep its nodes lie, unless an output is about to end.
            yield replace(tree)


def _outcome(rng: random.Random, length: int, tree: TokenTree, rows: int, pass_s: float) -> Outcome:
    path = drawn_path(rng, tree)
    return Outcome(
        base_length=length,
        token_ids=(*path, 0),
        num_accepted=len(path),
        draft_nodes=len(tree),
        draft_depth=tree.depth,
        redraft_nodes=0,
        features=b"",
        pass_rows=rows,
        pass_us=round(1e6 * pass_s),
        linger_us=0,
        stale_drafts=0,
    )


CONNECT_S = 20.0
# A run that takes longer than this hangs.
RUN_S = 600.0


def inside_us(events: Iterable[TimelineEvent]) -> list[float]:
    """Microseconds of each round that had a draft, from an orchestrator's timeline.

    A round's time is that from an outcome's arrival until the drafter's message has been written, and from the tree's
    arrival until the draft for the verifier has been. Each half is the handling of one message.
    """
    found: list[float] = []
    # By the drafter's sequence: the first half of a round.
    first_half_us: dict[int, float] = {}
    came_us, tree_of = 0.0, -1
    for event in events:
        match event.what:
            case "verifier.outcome.in":
                came_us, tree_of = event.at_us, -1
            case "drafter.outcome.out":
                first_half_us[event.sequence] = event.at_us - came_us
            case "drafter.tree.in":
                came_us, tree_of = event.at_us, event.sequence
            case "verifier.draft.out" if tree_of in first_half_us:
                found.append(first_half_us.pop(tree_of) + event.at_us - came_us)
    return found


@contextlib.contextmanager
def scripted_peers() -> Iterator[Connection]:
    """A connection to the peers' process, which runs while the context is open. The process first tells addresses."""
    # A fork would break gRPC in both processes.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_peers, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


async def heard(peers: Connection) -> Any:
    """What the peers say next. Raises BenchmarkError if their process has ended, or says nothing."""
    if not await asyncio.to_thread(peers.poll, RUN_S):
        raise BenchmarkError(f"the scripted peers have said nothing for {RUN_S:g} s")
    try:
        return peers.recv()
    except EOFError as error:
        raise BenchmarkError("the scripted peers have ended") from error


async def measure_rounds(
    peers: Connection, addresses: dict[str, str], num_requests: int, num_rounds: int, num_nodes: int, cache: bool
) -> dict[str, Any]:
    """One run, as the peers saw it: so many requests at once, each of about so many rounds with such trees.

    Also `inside_us` of each round, and `cpu_us`, the orchestrator's CPU time for one. With `cache` the text is one that
    the prefix cache knows, so that its tree is merged into every draft.
    """
    config = Config(
        verifier_address=addresses["verifier"],
        drafter_addresses=(addresses["drafter"],),
        require_drafters=True,
        max_nodes=num_nodes,
        cache_drafter=cache,
        connect_timeout_s=CONNECT_S,
        grace_s=0.0,
    )
    timeline = Timeline(Path("unused"))
    async with running(config, timeline=timeline) as orchestrator:
        warm_up = max(2, num_rounds // 5)
        settings = RunSettings(orchestrator.address, num_requests, num_rounds, warm_up, num_nodes, cache)
        peers.send(settings)
        await heard(peers)
        began_us, started_s = 1e6 * time.monotonic(), time.process_time()
        peers.send("go on")
        seen = await heard(peers)
        spent_s = time.process_time() - started_s
    events = [event for event in timeline.events() if event.at_us >= began_us]
    return {**seen, "inside_us": inside_us(events), "cpu_us": 1e6 * spent_s / seen["num_rounds"]}


# Trees whose messages are counted, whatever `num_nodes` is.
COUNTED_NODES = 64
PEERS = {"verifier": (OUTCOME_IN, DRAFT_ON), "drafter": (OUTCOME_ON, DRAFT_IN)}


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
    return document("overhead", machine, settings, rows, Ratios(figures(rows), {}))


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
