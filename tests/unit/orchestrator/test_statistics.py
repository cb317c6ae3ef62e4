"""What is counted of rounds, against counting node by node."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.overhead.draft_trees import best_first_tree, drawn_path
from orchestrator.merge import labelled, merge
from orchestrator.rounds import Outcome
from orchestrator.statistics import Statistics


@pytest.mark.parametrize("seed", range(4))
def test_every_source_of_a_node_is_credited_with_it(seed: int) -> None:
    rng = random.Random(seed)
    statistics = Statistics()
    proposed: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for number in range(30):
        trees = [
            labelled(best_first_tree(rng, rng.randrange(1, 20)), name)
            for name in rng.sample(["a", "b", "c"], rng.randrange(1, 4))
        ]
        tree = merge(trees)
        path = drawn_path(rng, tree)
        for node in range(len(tree)):
            proposed.update(tree.sources_of(node))
        for tokens in (path[: end + 1] for end in range(len(path))):
            accepted.update(name for one in trees if tokens in set(one.paths()) for name in one.source_names)
        outcome = Outcome(
            number,
            (*path, 0),
            len(path),
            len(tree),
            tree.depth,
            0,
            b"",
            pass_rows=9,
            pass_us=5,
            linger_us=0,
            stale_drafts=0,
        )
        statistics.record(outcome, [tree])
    assert {name: counts.proposed for name, counts in statistics.sources.items()} == dict(proposed)
    assert {name: counts.accepted for name, counts in statistics.sources.items() if counts.accepted} == dict(accepted)
    assert (statistics.rounds, statistics.passes[9].count, statistics.passes[9].total_us) == (30, 30, 150)
    assert statistics.accepted_tokens > 0
