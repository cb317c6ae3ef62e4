"""The CPU time of the adaptive planner per pass, on a verifier that is a formula."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from orchestrator.planner.adaptive import AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import RoundContext, RoundPlan, VerifierLoad
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome

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
