"""What is fed to the planner, and what is counted of a round."""

from __future__ import annotations

import math
import random

import pytest

from coppice.core.tree import ROOT
from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from coppice.lab.bench.overhead.peers import DRAFT_IN, OUTCOME_IN, Traffic
from coppice.lab.bench.overhead.suite import quantiles
from coppice.v1 import verifier_pb2


@pytest.mark.parametrize("seed", range(3))
def test_trees_come_likeliest_first_and_paths_are_accepted_as_their_probabilities_say(seed: int) -> None:
    rng = random.Random(seed)
    tree = best_first_tree(rng, 32)
    assert len(tree) == 32
    assert list(tree.path_log_probs) == sorted(tree.path_log_probs, reverse=True)
    paths = [drawn_path(rng, tree) for _ in range(4000)]
    for child in [node for node, parent in enumerate(tree.parents) if parent == ROOT]:
        taken = sum(path[:1] == (tree.token_ids[child],) for path in paths) / len(paths)
        assert taken == pytest.approx(math.exp(tree.log_probs[child]), abs=0.04)


def test_a_round_is_timed_once_both_its_halves_were_seen() -> None:
    traffic = Traffic()
    traffic.leaves(DRAFT_IN, 1, 10)
    traffic.draft_comes(1, 10)
    assert not traffic.round_us
    traffic.leaves(OUTCOME_IN, 1, 12)
    traffic.outcome_comes(1, 12)
    traffic.leaves(DRAFT_IN, 1, 12)
    traffic.draft_comes(2, 12)
    assert not traffic.round_us
    traffic.draft_comes(1, 12)
    assert (len(traffic.round_us), traffic.num_rounds) == (1, 1)
    for number in (300, 1):
        traffic.count("there", verifier_pb2.VerifyRequest(sequence_id=number))
    assert (traffic.messages, traffic.bytes, traffic.largest) == ({"there": 2}, {"there": 5}, {"there": 3})
    values = [float(value) for value in range(100, -1, -1)]
    assert quantiles("us", values) == {"us_p50": 50.0, "us_p90": 90.0, "us_p99": 99.0}
