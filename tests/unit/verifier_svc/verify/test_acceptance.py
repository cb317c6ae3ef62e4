"""Sample and follow is lossless: exact enumeration on a toy vocabulary, for every tree of a small family."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

import pytest

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree, chain
from verifier_svc.verify.acceptance import Acceptance, sample_and_follow

VOCAB = 3
LENGTH = 3
Path = tuple[int, ...]


def probability(context: Path, token: int) -> Fraction:
    """A target's next-token probabilities: arbitrary, different in every context."""
    weights = [1 + (7 * sum((3 + i) * t for i, t in enumerate(context)) + 5 * v * v + v) % 6 for v in range(VOCAB)]
    return Fraction(weights[token], sum(weights))


def all_small_trees() -> Iterator[TokenTree]:
    """Every tree whose paths are drawn from up to three paths of length two."""
    paths = list(itertools.product(range(VOCAB), repeat=2))
    for size in range(4):
        for chosen in itertools.combinations(paths, size):
            yield union(chosen)


def union(paths: tuple[Path, ...]) -> TokenTree:
    nodes: dict[Path, int] = {}
    parents: list[int] = []
    for path in paths:
        for end in range(1, len(path) + 1):
            if path[:end] not in nodes:
                nodes[path[:end]] = len(parents)
                parents.append(nodes.get(path[: end - 1], ROOT))
    return TokenTree(tuple(path[-1] for path in nodes), tuple(parents), (0.0,) * len(parents))


def law_of_output(tree: TokenTree) -> dict[Path, Fraction]:
    """The exact law of the first LENGTH tokens: every outcome of every draw, weighted by its probability."""
    law: dict[Path, Fraction] = defaultdict(Fraction)

    def explore(forced: Path, weight: Fraction) -> None:
        """Run rounds whose draws are `forced`, then branch over the next draw."""
        committed: list[int] = []
        used = 0

        class NeedsDrawError(Exception):
            pass

        def draw(node: int, depth: int) -> int:
            nonlocal used
            if used == len(forced):
                raise NeedsDrawError
            used += 1
            return forced[used - 1]

        try:
            while len(committed) < LENGTH:
                # The first round has the tree; later ones are plain.
                accepted = sample_and_follow(tree if not committed else EMPTY_TREE, draw, lambda token: False)
                committed.extend(accepted.token_ids)
        except NeedsDrawError:
            context = forced
            for token in range(VOCAB):
                explore((*forced, token), weight * probability(context, token))
        else:
            law[tuple(committed[:LENGTH])] += weight

    explore((), Fraction(1))
    return law


def test_output_has_the_targets_own_law_whatever_the_tree() -> None:
    expected = {
        path: probability((), path[0]) * probability(path[:1], path[1]) * probability(path[:2], path[2])
        for path in itertools.product(range(VOCAB), repeat=LENGTH)
    }
    for tree in all_small_trees():
        assert law_of_output(tree) == expected


def follow(tree: TokenTree, tokens: list[int], last: int | None = None) -> Acceptance:
    drawn = iter(tokens)
    return sample_and_follow(tree, lambda node, depth: next(drawn), lambda token: token == last)


def test_accepts_the_path_that_the_target_takes_and_adds_the_bonus_token() -> None:
    tree = TokenTree((4, 5, 6, 7), (-1, -1, 1, 2), (0.0,) * 4)
    assert follow(tree, [5, 6, 9]) == Acceptance((5, 6, 9), (1, 2))
    assert follow(tree, [8]) == Acceptance((8,), ())
    assert follow(tree, [5, 6, 7, 1]) == Acceptance((5, 6, 7, 1), (1, 2, 3))


def test_output_ends_inside_an_accepted_block() -> None:
    assert follow(chain([4, 5, 6]), [4, 5, 6, 7], last=5) == Acceptance((4, 5), (0, 1))


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_draws_are_asked_for_by_node_and_depth(depth: int) -> None:
    asked: list[tuple[int, int]] = []
    tree = chain(list(range(depth)))

    def draw(node: int, at: int) -> int:
        asked.append((node, at))
        return at

    sample_and_follow(tree, draw, lambda token: False)
    assert asked == [(node, node + 1) for node in range(-1, depth)]
