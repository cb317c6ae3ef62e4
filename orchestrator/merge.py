"""Merging drafts: the trie union of their paths (SpecInfer, section 4). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coppice.tree import EMPTY_TREE, ROOT, TokenTree


def labelled(tree: TokenTree, source: str) -> TokenTree:
    """The tree with `source` as the one that proposed every node, whatever the tree itself says."""
    if tree.source_names == (source,) and not tree.sources:
        return tree
    return replace(tree, source_names=(source,), sources=())


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree with exactly the paths of all trees.

    A node proposed by several sources keeps all of their names and the highest of their log-probabilities. The first
    tree's nodes keep their indices, so that indices into it stay valid in the merged tree.
    """
    filled = [tree for tree in trees if len(tree)]
    if len(filled) <= 1:
        return filled[0] if filled else EMPTY_TREE
    names = tuple(dict.fromkeys(name for tree in filled for name in tree.source_names))
    union = _Union({name: bit for bit, name in enumerate(names)})
    for tree in filled:
        union.add(tree)
    return TokenTree(
        token_ids=tuple(union.token_ids),
        parents=tuple(union.parents),
        log_probs=tuple(union.log_probs),
        source_names=names,
        sources=tuple(union.masks) if names else (),
    )


class _Union:
    """The growing union of trees over a fixed set of source names."""

    def __init__(self, bits: dict[str, int]) -> None:
        self._bits = bits
        self._children: dict[tuple[int, int], int] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.log_probs: list[float] = []
        self.masks: list[int] = []

    def add(self, tree: TokenTree) -> None:
        placed: dict[int, int] = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            mask = sum(1 << self._bits[name] for name in tree.sources_of(node))
            key = (placed[parent], token)
            here = self._children.get(key)
            if here is None:
                here = self._children[key] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(key[0])
                self.log_probs.append(tree.log_probs[node])
                self.masks.append(mask)
            else:
                self.log_probs[here] = max(self.log_probs[here], tree.log_probs[node])
                self.masks[here] |= mask
            placed[node] = here
