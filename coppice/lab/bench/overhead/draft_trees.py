"""Trees as a small language model drafts them: best-first, with probabilities that fall by rank."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

from coppice.core.tree import ROOT, TokenTree

# Mean probability of a node's children by rank; each is more or less by up to this factor.
PROBABILITIES = (0.62, 0.14, 0.07, 0.04)
SPREAD = 1.4

# (depth from 1, rank from 0, node) -> token id; the children of one node must have different ones.
Tokens = Callable[[int, int, int], int]


def number_tokens(depth: int, rank: int, node: int) -> int:
    """Tokens for trees that nobody reads: the node's own number."""
    return node


def best_first_tree(rng: random.Random, num_nodes: int, tokens: Tokens = number_tokens) -> TokenTree:
    """The `num_nodes` likeliest nodes of an endless tree, likeliest first."""
    token_ids: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    # Minus the path's log-probability, an order for equals, the node's own log-probability, parent, depth, rank.
    waiting: list[tuple[float, int, float, int, int, int]] = []
    num_seen = 0

    def expand(parent: int, depth: int, path: float) -> None:
        nonlocal num_seen
        probabilities = [mean * SPREAD ** rng.uniform(-1, 1) for mean in PROBABILITIES]
        total = max(1.0, sum(probabilities))
        for rank, probability in enumerate(probabilities):
            own = math.log(probability / total)
            num_seen += 1
            heapq.heappush(waiting, (-(path + own), num_seen, own, parent, depth, rank))

    expand(ROOT, 1, 0.0)
    while len(token_ids) < num_nodes:
        cost, _, own, parent, depth, rank = heapq.heappop(waiting)
        node = len(token_ids)
        token_ids.append(tokens(depth, rank, node))
        parents.append(parent)
        log_probs.append(own)
        expand(node, depth + 1, -cost)
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))


def drawn_path(rng: random.Random, tree: TokenTree) -> tuple[int, ...]:
    """Tokens that the target accepts of a tree if its probabilities are right."""
    path: list[int] = []
    node = ROOT
    while True:
        draw = rng.random()
        for child, parent in enumerate(tree.parents):
            if parent == node:
                draw -= math.exp(tree.log_probs[child])
                if draw < 0:
                    path.append(tree.token_ids[child])
                    node = child
                    break
        else:
            return tuple(path)
