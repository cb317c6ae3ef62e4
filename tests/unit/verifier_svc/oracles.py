"""Slow, obvious versions of what the verifier does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from coppice.core.tree import TokenTree


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] after `token_ids`, by one plain forward without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
    return logits


def random_tree(generator: np.random.Generator, vocab_size: int, num_nodes: int) -> TokenTree:
    """A tree of random shape; siblings have different tokens because all tokens differ."""
    tokens = generator.choice(vocab_size, num_nodes, replace=False)
    parents = tuple(int(generator.integers(-1, node)) if node else -1 for node in range(num_nodes))
    return TokenTree(tuple(int(token) for token in tokens), parents, (0.0,) * num_nodes)


def tree_around(generator: np.random.Generator, path: Sequence[int], vocab_size: int, num_decoys: int) -> TokenTree:
    """A tree that holds `path` among random decoys, in random topological order."""
    tokens: list[int] = []
    parents: list[int] = []
    used: set[tuple[int, int]] = set()

    def add(parent: int, token: int) -> int:
        tokens.append(token)
        parents.append(parent)
        used.add((parent, token))
        return len(tokens) - 1

    last = -1
    for token in path:
        for _ in range(int(generator.integers(0, num_decoys + 1))):
            parent = int(generator.integers(-1, len(tokens))) if tokens else -1
            decoy = int(generator.integers(vocab_size))
            if (parent, decoy) not in used and not (parent == last and decoy == token):
                add(parent, decoy)
        if (last, token) in used:
            break
        last = add(last, token)
    return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


def multiply_add(total: np.ndarray, factor: np.ndarray, number: np.ndarray, *, is_fused: bool) -> np.ndarray:
    """total + factor * number in single precision: rounded once if it is fused, else twice.

    A product of two such numbers is exact in double precision; their sum is, with what it lacks, and is rounded to odd
    there, so that rounding it again is as good as rounding once.
    """
    if not is_fused:
        return (total + (factor * number).astype(np.float32)).astype(np.float32)
    products, totals = factor.astype(np.float64) * number.astype(np.float64), total.astype(np.float64)
    sums = np.asarray(products + totals)
    back = sums - products
    lacking = (products - (sums - back)) + (totals - back)
    bits = sums.view(np.int64)
    is_even = (lacking != 0) & (bits & 1 == 0)
    bits += np.where(is_even, np.where((lacking > 0) == (sums > 0), 1, -1), 0)
    return sums.astype(np.float32)
