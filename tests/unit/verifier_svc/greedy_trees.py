"""Greedy decoding by token trees, half of which hold the right path among decoys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.unit.verifier_svc.oracles import random_tree, tree_around
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.target_model import TargetModel


def greedy_by_trees(
    target: TargetModel, prompt: Sequence[int], expected: Sequence[int], vocab_size: int, seed: int = 1
) -> tuple[list[int], int]:
    """At least as many tokens as `expected`, which drafts know, and the number of passes."""
    generator = np.random.default_rng(seed)
    cache, pending, said, num_passes = SequenceCache(target.cache, 256), list(prompt), [], 0
    while len(said) < len(expected):
        right = expected[len(said) : len(said) + 5]
        is_right = num_passes % 2 == 1
        tree = tree_around(generator, right, vocab_size, 2) if is_right else random_tree(generator, vocab_size, 9)
        rows = target.forward(target.plan([SequenceRows(cache, pending, tree)])).argmax(-1).tolist()
        node, path = -1, []
        while (child := tree.children.get((node, rows[node + 1]))) is not None:
            path.append(child)
            node = child
        cache.keep([*range(len(pending)), *(len(pending) + step for step in path)])
        said += [*(tree.token_ids[step] for step in path), rows[node + 1]]
        pending, num_passes = said[-1:], num_passes + 1
    cache.release()
    return said, num_passes
