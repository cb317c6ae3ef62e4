"""Merging drafts: the trie union of their paths (SpecInfer, section 4). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree with exactly the paths of all trees.

    A node proposed by several sources keeps all their names and the highest log-probability. Nodes of the first tree
    keep their indices.
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
    """Union under construction, over a fixed set of source names."""

    def __init__(self, bits: dict[str, int]) -> None:
        self._bits = bits
        self._children: dict[tuple[int, int], int] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.log_probs: list[float] = []
        self.masks: list[int] = []

    def add(self, tree: TokenTree) -> None:
        masks = self._masks(tree)
        # The root's entry is last, at index -1.
        places = [0] * len(tree) + [ROOT]
        nodes = zip(tree.token_ids, tree.parents, tree.log_probs, masks, strict=True)
        for node, (token, parent, log_prob, mask) in enumerate(nodes):
            key = (places[parent], token)
            here = self._children.get(key)
            if here is None:
                here = self._children[key] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(key[0])
                self.log_probs.append(log_prob)
                self.masks.append(mask)
            else:
                self.log_probs[here] = max(self.log_probs[here], log_prob)
                self.masks[here] |= mask
            places[node] = here

    def _masks(self, tree: TokenTree) -> Sequence[int]:
        """Source masks of the tree's nodes, in the union's bits."""
        bits = [1 << self._bits[name] for name in tree.source_names]
        if not tree.sources:
            return [sum(bits)] * len(tree)
        # Few masks are distinct: each is translated once.
        become = {mask: sum(bit for at, bit in enumerate(bits) if mask >> at & 1) for mask in set(tree.sources)}
        return [become[mask] for mask in tree.sources]
