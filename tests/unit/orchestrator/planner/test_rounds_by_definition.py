"""Random rounds through the planner and through the same thing written down in full, with nothing kept or left out."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from orchestrator.planner.adaptive import FLOOR_SHARE, AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import UNKNOWN_LOAD, RoundContext, RoundPlan, VerifierLoad
from orchestrator.planner.draft_plans import CLEARLY, DraftPlans
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome

MAX_NODES, LINGER_US = 16, 40_000


class PlainPlanner(AdaptivePlanner):
    """Keeps every round of a pass until it is over, and works every plan out anew."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(MAX_NODES, LINGER_US, clock=clock)
        self._rounds: list[tuple[Outcome, bool, bool, int | None]] = []

    @property
    def draft_plans(self) -> DraftPlans:
        return DraftPlans(self.snapshot, self.num_running, LINGER_US)

    def follow(self, is_greedy: bool, priority: int = 0) -> PlainRequest:
        return PlainRequest(self, is_greedy, priority)

    def round_over(self, outcome: Outcome, last_pass: int, asked: bool, is_newcomer: bool) -> int:
        passes = self._passes
        pass_of_last = (self._rounds[-1][0].pass_us, self._rounds[-1][0].pass_rows) if self._rounds else None
        if last_pass == passes.pass_number or (outcome.pass_us, outcome.pass_rows) != pass_of_last:
            passes.num_rounds = len(self._rounds)
            passes.num_asked = sum(had_asked for _, _, had_asked, _ in self._rounds)
            passes.num_first = sum(was_first for _, was_first, _, _ in self._rounds)
            passes.num_tokens = sum(len(one.token_ids) for one, *_ in self._rounds)
            passes.context = sum(one.base_length for one, *_ in self._rounds)
            waits = [waited for *_, waited in self._rounds if waited is not None]
            self._missed.num_rounds = len(waits)
            for waited in waits:
                self._missed.count(waited)
            self._rounds = []
            record = passes.begin(outcome)
            if record is not None:
                self._pass_over(record)
        waited = passes.pass_number - last_pass if asked and not is_newcomer else None
        self._rounds.append((outcome, not last_pass, asked, waited))
        return passes.pass_number


class PlainRequest(AdaptiveRequest):
    """Plans as if every plan were the first, looks at every node, and learns by the formulas."""

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        self._planner.load = None
        return self._plan_anew(round_context, load)

    def select(self, tree: TokenTree) -> TokenTree:
        snapshot, values = self._planner.snapshot, self._planner.values
        self._at_hand = tree
        if snapshot.price <= 0:
            return tree
        own = self._weight / self._planner.weights.mean * self._accepted / self._promised
        logs = values.path_logs(tree)
        kept = [node for node, log in enumerate(logs) if log >= math.log(CLEARLY * snapshot.price) - math.log(own)]
        if not kept:
            likeliest = max(range(len(tree)), key=lambda node: (tree.path_log_probs[node], -node))
            kept = [likeliest] if logs[likeliest] >= math.log(FLOOR_SHARE * snapshot.price) else []
        if self._row_multiple > 1 and kept:
            return tree.prune(math.ceil((1 + len(kept)) / self._row_multiple) * self._row_multiple - 1)
        return tree.select(kept)


class Twins:
    """The same request at both planners."""

    def __init__(self, quick: AdaptivePlanner, plain: PlainPlanner, rng: random.Random) -> None:
        is_greedy, priority = rng.random() < 0.7, rng.choice([0, 0, 0, 1])
        self.quick, self.plain = quick.follow(is_greedy, priority), plain.follow(is_greedy, priority)
        self.length = rng.randrange(50, 500)
        self.requested = rng.choice([None, None, None, 6])
        self.asked = False

    def plan(self, round_context: RoundContext, load: VerifierLoad) -> RoundPlan:
        plan = self.quick.plan(round_context, load)
        assert plan == self.plain.plan(round_context, load)
        return plan

    def select(self, tree: TokenTree) -> TokenTree:
        self.quick.tree_arrived()
        self.plain.tree_arrived()
        selected = self.quick.select(tree)
        assert selected == self.plain.select(tree)
        return selected

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree]) -> None:
        self.quick.round_over(outcome, sent, self.asked)
        self.plain.round_over(outcome, sent, self.asked)
        assert self.quick.gain == self.plain.gain
        self.length += len(outcome.token_ids)

    def close(self) -> None:
        self.quick.close()
        self.plain.close()


@pytest.mark.parametrize(("num_requests", "num_passes"), [(3, 480), (24, 160)])
@pytest.mark.parametrize("seed", range(2))
def test_plans_and_cuts_of_random_rounds_are_those_of_the_definition(
    seed: int, num_requests: int, num_passes: int
) -> None:
    rng = random.Random(seed)
    now_s = 0.0
    quick, plain = AdaptivePlanner(MAX_NODES, LINGER_US, clock=lambda: now_s), PlainPlanner(lambda: now_s)
    drafts = [best_first_tree(rng, rng.randrange(4, MAX_NODES + 1)).labelled("a") for _ in range(48)]
    # The first of them are merged with others, so that nodes of these trees come in no order.
    drafts[:8] = [merge([one, best_first_tree(rng, 3).labelled("b")]) for one in drafts[:8]]
    running = [Twins(quick, plain, rng) for _ in range(num_requests)]
    seen: Counter[str] = Counter()
    for number in range(num_passes):
        # Rows become dear for a while, and many prompts wait.
        row_us = 40 if number % 80 < 50 else 1500
        queued = 6 if number % 100 < 4 else 0
        trees = [rng.choice(drafts) if one.asked else EMPTY_TREE for one in running]
        chosen = [one.select(tree) if len(tree) else tree for one, tree in zip(running, trees, strict=True)]
        seen["cut"] += sum(len(tree) < len(whole) for tree, whole in zip(chosen, trees, strict=True))
        rows = len(running) + sum(map(len, chosen))
        pass_us = round((20_000 + row_us * rows) * rng.uniform(0.98, 1.04))
        now_s += pass_us / 1e6
        load = VerifierLoad(len(running), rows, pass_us, queued)
        for one, tree in zip(running, chosen, strict=True):
            # Some wait for their drafts, and miss the pass.
            if one.asked and rng.random() < 0.1:
                continue
            path = drawn_path(rng, tree)
            outcome = Outcome(one.length, (*path, 0), len(path), len(tree), tree.depth, 0, b"", rows, pass_us, 0, 0)
            has_drafter, forced, row_multiple = rng.random() < 0.98, rng.random() < 0.01, rng.choice([1, 4])
            plan = one.plan(RoundContext(has_drafter, one.requested, forced, row_multiple), load)
            one.round_over(outcome, [tree] if len(tree) else [])
            one.asked = plan.max_nodes > 0
            seen["asks" if one.asked else "does not"] += 1
            seen["looked up"] += quick.common is not None and quick.common.hold
        assert quick.snapshot == plain.snapshot
        for one in [one for one in running if rng.random() < 0.01]:
            one.close()
            running[running.index(one)] = Twins(quick, plain, rng)
    assert min(seen["asks"], seen["does not"], seen["cut"], seen["looked up"]) > 50
