"""The script of scripted peers: the target's text, and trees as a small language model drafts them."""

from __future__ import annotations

import functools
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
    """Tokens for trees that are not read: the node's own number."""
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


# A text that repeats after so many tokens is one that the prefix cache knows all about.
PERIOD = 40
# Trees that a script goes through in turn.
NUM_SHAPES = 64
_MIXER = 0x9E3779B1


class ScriptedText:
    """One request's text, by position alone, so that verifier and drafter need no model and no word about it."""

    def __init__(self, seed: int, vocab_size: int, num_nodes: int, repeats: bool) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._repeats = repeats
        self._shapes = _shapes(num_nodes)

    def token(self, position: int) -> int:
        """The target's token at a position."""
        at = position % PERIOD if self._repeats else position
        mixed = ((at + 1) * _MIXER + self._seed * 40_503) & 0xFFFFFFFF
        return ((mixed >> 13) ^ mixed) % self._vocab_size

    def draft(self, length: int) -> TokenTree:
        """What the drafter sends after `length` tokens: the likeliest children are right for some levels."""
        shape = self._shapes[length % NUM_SHAPES]
        num_right = length % 4
        token_ids: list[int] = []
        # Whether each node, and last the root, lies on the text's own path.
        on_path = [False] * len(shape) + [True]
        for node, (rank, parent, depth) in enumerate(zip(shape.token_ids, shape.parents, shape.depths, strict=True)):
            right = self.token(length + depth - 1)
            on_path[node] = on_path[parent] and rank == 0 and depth <= num_right
            token_ids.append(right if on_path[node] else (right + 1 + rank) % self._vocab_size)
        return TokenTree(tuple(token_ids), shape.parents, shape.log_probs)


@functools.cache
def _shapes(num_nodes: int) -> tuple[TokenTree, ...]:
    """Trees whose tokens are the siblings' ranks, until a text puts its own in."""
    rng = random.Random(num_nodes)
    return tuple(best_first_tree(rng, num_nodes, lambda depth, rank, node: rank) for _ in range(NUM_SHAPES))
