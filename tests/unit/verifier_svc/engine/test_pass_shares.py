"""Which nodes of all trees a pass keeps when there is no room for all: against every choice that there is."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import ROOT, TokenTree, chain
from tests.unit.verifier_svc.closed_loop import INFO, TOKENIZER
from verifier_svc.engine.pass_shares import RowAllotment, keep_likeliest
from verifier_svc.engine.sequence import Draft, Sequence, SequenceKey, SequenceSpec

MAX_NODES = 16
# Ties are likely.
LOG_PROBS = (0.0, -0.1, -0.1, -0.3, -1.0, -2.5)


def share(number: int, tree: TokenTree, *, budget: int = MAX_NODES, traverses: bool = False) -> RowAllotment:
    spec = SequenceSpec((1,), SamplingParams(), StoppingOptions(max_tokens=50), traverses=traverses)
    sequence = Sequence(spec, INFO, TOKENIZER, max_nodes=MAX_NODES, opened_s=0.0)
    sequence.submit(Draft(1, tree, budget))
    return RowAllotment(SequenceKey(0, number), sequence, 1, sequence.num_nodes)


def sampled(num_nodes: int) -> TokenTree:
    """A chain that says what it was drawn from."""
    distributions = (*(DraftDistribution((0, 1), (0.5, 0.5)) for _ in range(num_nodes)), None)
    tokens, parents = tuple([0] * num_nodes), tuple(range(-1, num_nodes - 1))
    return TokenTree(tokens, parents, (math.log(0.5),) * num_nodes, distributions=distributions)


@st.composite
def small_tree(draw: st.DrawFn) -> TokenTree:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 4)))]
    log_probs = [draw(st.sampled_from(LOG_PROBS)) for _ in parents]
    return TokenTree(tuple(range(len(parents))), tuple(parents), tuple(log_probs))


def most_expected(trees: list[TokenTree], room: int) -> float:
    """The most tokens that at most `room` nodes of all trees can promise, by trying all sets that are trees."""
    best = {0: 0.0}
    for tree in trees:
        worth: dict[int, float] = {}
        for size in range(len(tree) + 1):
            for nodes in itertools.combinations(range(len(tree)), size):
                if all(tree.parents[node] in (ROOT, *nodes) for node in nodes):
                    worth[size] = max(worth.get(size, 0.0), tree.select(nodes).expected_tokens)
        sums: dict[int, float] = {}
        for (used, value), (size, more) in itertools.product(best.items(), worth.items()):
            if used + size <= room:
                sums[used + size] = max(sums.get(used + size, 0.0), value + more)
        best = sums
    return max(best.values())


@settings(max_examples=150, deadline=None)
@given(st.lists(small_tree(), min_size=1, max_size=4), st.integers(0, 16))
def test_no_other_choice_of_nodes_promises_more_tokens(trees: list[TokenTree], room: int) -> None:
    kept = keep_likeliest([share(number, tree) for number, tree in enumerate(trees)], room)
    assert [one.key.sequence_id for one in kept] == list(range(len(trees)))
    counts = [one.max_nodes for one in kept]
    assert sum(counts) == min(room, sum(map(len, trees)))
    pruned = sum(tree.prune(count).expected_tokens for tree, count in zip(trees, counts, strict=True))
    assert pruned == pytest.approx(most_expected(trees, room))


def test_of_equal_nodes_every_tree_keeps_as_many() -> None:
    shares = [share(number, chain([0] * size)) for number, size in enumerate((2, 16, 16, 0, 9))]
    assert [one.max_nodes for one in keep_likeliest(shares, 30)] == [2, 10, 9, 0, 9]
    assert [one.max_nodes for one in keep_likeliest(shares, 3)] == [1, 1, 1, 0, 0]


def test_nodes_beyond_a_budget_take_no_room() -> None:
    shares = [share(0, chain([0] * 12), budget=3), share(1, chain([0] * 12, [-1.0] * 12))]
    assert [one.max_nodes for one in keep_likeliest(shares, 8)] == [3, 5]


def test_sampled_trees_are_kept_whole_or_not_at_all() -> None:
    alone = [share(number, sampled(6), traverses=True) for number in range(4)]
    assert [one.max_nodes for one in keep_likeliest(alone, 20)] == [6, 6, 6, 0]
    mixed = [*alone, share(4, chain([0] * 16)), share(5, sampled(3), traverses=True)]
    # Half of the room is for them, and what they leave of it is for the other.
    assert [one.max_nodes for one in keep_likeliest(mixed, 20)] == [6, 0, 0, 0, 11, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(LOG_PROBS), min_size=5, max_size=5), st.integers(0, 30))
def test_what_was_drawn_does_not_decide_whether_a_sampled_tree_is_kept(log_probs: list[float], room: int) -> None:
    others = [share(0, chain([0] * 9, [-0.2] * 9)), share(1, sampled(4), traverses=True)]
    plain = sampled(5)
    other_draw = TokenTree((1,) * 5, plain.parents, tuple(log_probs), distributions=plain.distributions)
    kept = [
        [one.max_nodes for one in keep_likeliest([*others, share(2, tree, traverses=True)], room)]
        for tree in (plain, other_draw)
    ]
    assert kept[0] == kept[1]
    assert kept[0][2] in (0, 5)


def test_a_sampled_tree_beyond_its_budget_takes_no_room() -> None:
    assert share(0, sampled(6), budget=5, traverses=True).max_nodes == 0
