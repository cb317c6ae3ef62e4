"""What is counted of rounds, against counting node by node."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from coppice.v1 import tree_pb2
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome
from orchestrator.request.statistics import OriginTotals, Statistics


@pytest.mark.parametrize("seed", range(4))
def test_every_source_of_a_node_is_credited_with_it(seed: int) -> None:
    rng = random.Random(seed)
    statistics = Statistics()
    proposed: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for number in range(30):
        trees = [
            best_first_tree(rng, rng.randrange(1, 20)).labelled(name)
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


def test_rounds_are_counted_by_when_their_drafts_were_made() -> None:
    late, fresh = tree_pb2.DRAFT_ORIGIN_REROOTED, tree_pb2.DRAFT_ORIGIN_FRESH
    one, other = Statistics(), Statistics()
    for statistics, origin, accepted, nodes in (
        (one, late, 2, 5),
        (one, late, 0, 3),
        (other, late, 1, 4),
        (one, fresh, 1, 6),
    ):
        outcome = Outcome(
            7, (1,) * (accepted + 1), accepted, nodes, 2, 0, b"", 9, 5, 0, 0, draft_origin=origin, bubble_us=30
        )
        statistics.record(outcome, [])
    plain = Outcome(7, (1,), 0, 0, 0, 0, b"", 1, 5, 0, 0, bubble_us=30)
    one.record(plain, [])
    assert one.origins == {late: OriginTotals(2, 8, 2), fresh: OriginTotals(1, 6, 1)}
    assert one.bubble_us == 120
    one.add(other)
    assert one.origins[late] == OriginTotals(3, 12, 3)
