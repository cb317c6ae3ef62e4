"""What the scripted peers agree on: the text that the target says, and how much of it drafters know."""

from __future__ import annotations

import functools
import random

from coppice.core.tree import TokenTree
from coppice.lab.bench.overhead.draft_trees import best_first_tree

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
        """What the drafter sends behind `length` tokens: the likeliest children are right for some levels."""
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
