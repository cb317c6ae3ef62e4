"""The value model against the same thing written down in full: every correction from every node, anew each time."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from coppice.core.tree import ROOT, TokenTree
from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from orchestrator.planner.value_model import DEEPEST, ValueModel
from orchestrator.request.merge import merge

FADE, PRIOR = 1 - 1 / 256, 4.0
LOWEST, HIGHEST = -3.0, 0.7


class SlowValues:
    """Keeps every verified tree, and looks at all of them for every question."""

    def __init__(self) -> None:
        # Of each tree that a source took part in: depth, path probability, whether accepted.
        self._trees: defaultdict[str, list[list[tuple[int, float, bool]]]] = defaultdict(list)

    def learn(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        for name in tree.source_names:
            self._trees[name].append(
                [
                    (min(len(tree.path(node)), DEEPEST), self._probability(tree, node), node in accepted)
                    for node in range(len(tree))
                    if name in tree.sources_of(node)
                ]
            )

    def log(self, tree: TokenTree, node: int) -> float:
        depth, names = min(len(tree.path(node)), DEEPEST), tree.sources_of(node)
        known = all(name in self._trees for name in names)
        correction = max(self._correction(name, depth) for name in names) if known else 0.0
        return math.log(self._probability(tree, node)) + correction

    def _correction(self, name: str, depth: int) -> float:
        return min(self._ratio_log(name, shallower) for shallower in range(1, depth + 1))

    def _ratio_log(self, name: str, depth: int) -> float:
        promised = accepted = PRIOR
        for age, nodes in enumerate(reversed(self._trees[name])):
            promised += FADE**age * sum(probability for at, probability, _ in nodes if at == depth)
            accepted += FADE**age * sum(taken for at, _, taken in nodes if at == depth)
        return min(HIGHEST, max(LOWEST, math.log(accepted / promised)))

    @staticmethod
    def _probability(tree: TokenTree, node: int) -> float:
        return math.prod(math.exp(tree.log_probs[step]) for step in tree.path(node))


def random_draft(rng: random.Random) -> TokenTree:
    """A tree of one source or of two."""
    drafted = best_first_tree(rng, rng.randrange(1, 24)).labelled(rng.choice(["a", "b"]))
    if rng.random() < 0.5:
        return drafted
    return merge([drafted, best_first_tree(rng, rng.randrange(1, 8)).labelled("c")])


@pytest.mark.parametrize("seed", range(4))
def test_worth_and_what_is_promised_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    fast, slow = ValueModel(), SlowValues()
    num_cut = 0
    for _ in range(40):
        tree = random_draft(rng)
        logs = [slow.log(tree, node) for node in range(len(tree))]
        assert fast.path_logs(tree) == pytest.approx(logs)
        # Between two values, so that rounding decides nothing.
        least = rng.choice(logs) + 1e-6
        kept = fast.worth(tree, least)
        assert (kept if isinstance(kept, list) else list(range(len(tree))[:kept])) == [
            node for node, log in enumerate(logs) if log >= least
        ]
        num_cut += kept is not None
        tokens = drawn_path(rng, tree)
        accepted, parent = [], ROOT
        for token in tokens:
            parent = tree.children[parent, token]
            accepted.append(parent)
        assert fast.learn(tree, tokens) == pytest.approx(sum(math.exp(min(0.0, log)) for log in logs))
        slow.learn(tree, accepted)
    assert num_cut > 20
