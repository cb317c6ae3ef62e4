"""Token trees: plain immutable data, valid by construction."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError

# Parent of the root's children. The root is the last committed token, not a node.
ROOT = -1
# Limit on nodes of any budget and of a message.
MAX_TREE_NODES = 4096
# Marks nodes that are dropped.
_NOWHERE = -2


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens, parents before children, as parallel arrays of one entry per node.

    `log_probs[i]` estimates log P(the target's token is `token_ids[i]` | the parent is right).
    `sources[i]` has bit j set when `source_names[j]` proposed the node.
    `distributions`, of a sampled tree, are those of the root and then of each node; `SampledTree` checks them.
    Selecting nodes drops them, so only a complete draw carries them.

    Raises:
        InvalidTreeError: arrays of different lengths, a parent that is not an earlier node, a positive or
            non-finite log-probability, two children of one parent with the same token, or an unknown source.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    source_names: tuple[str, ...] = ()
    sources: tuple[int, ...] = ()
    distributions: tuple[DraftDistribution | None, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.parents) != count or len(self.log_probs) != count:
            raise InvalidTreeError(
                f"{count} token ids, {len(self.parents)} parents and {len(self.log_probs)} log-probabilities"
            )
        if self.sources and len(self.sources) != count:
            raise InvalidTreeError(f"{count} nodes but {len(self.sources)} source masks")
        # Every round makes several trees: check whole arrays first, and loop only to find the error.
        if not self._looks_valid():
            self._check_nodes()
        if any(mask >> len(self.source_names) for mask in self.sources):
            raise InvalidTreeError("a source mask names an unknown source")

    def _looks_valid(self) -> bool:
        """Whether the arrays are valid for certain."""
        count = len(self.token_ids)
        return (
            min(self.parents, default=ROOT) >= ROOT
            and all(map(operator.lt, self.parents, range(count)))
            and len(set(zip(self.parents, self.token_ids, strict=True))) == count
            and max(self.log_probs, default=0.0) <= 0
            # A sum propagates infinities and NaN.
            and math.isfinite(sum(self.log_probs))
        )

    def _check_nodes(self) -> None:
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not ROOT <= parent < node:
                raise InvalidTreeError(f"node {node} names parent {parent}, not an earlier node")
            if (parent, token) in seen:
                raise InvalidTreeError(f"node {node} repeats token {token} of a sibling")
            seen.add((parent, token))
        for node, value in enumerate(self.log_probs):
            if not (value <= 0 and math.isfinite(value)):
                raise InvalidTreeError(f"node {node} has log-probability {value}, not a finite number up to 0")

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for the empty tree."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """Children by (parent, token id)."""
        return {key: node for node, key in enumerate(zip(self.parents, self.token_ids, strict=True))}

    @cached_property
    def path_log_probs(self) -> tuple[float, ...]:
        """Sum of log-probabilities along each node's path."""
        # The root's entry is last, at index -1.
        sums = [0.0] * (len(self.parents) + 1)
        for node, (parent, value) in enumerate(zip(self.parents, self.log_probs, strict=True)):
            sums[node] = value + sums[parent]
        sums.pop()
        return tuple(sums)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def sources_of(self, node: int) -> tuple[str, ...]:
        """Names of the sources of a node; all sources if the tree has no masks."""
        if not self.sources:
            return self.source_names
        return tuple(name for bit, name in enumerate(self.source_names) if self.sources[node] >> bit & 1)

    def select(self, nodes: Iterable[int]) -> TokenTree:
        """The tree reduced to the given nodes.

        Raises:
            InvalidTreeError: a node's parent is not selected, or the node does not exist.
        """
        kept = sorted(set(nodes))
        if kept and not 0 <= kept[0] <= kept[-1] < len(self):
            raise InvalidTreeError(f"a selected node is not one of the tree's {len(self)}")
        if kept and kept[-1] == len(kept) - 1:
            # A prefix of the nodes is a tree by itself.
            return self.first(len(kept))
        # The root's entry is last, at index -1.
        places = [_NOWHERE] * len(self) + [ROOT]
        for new, old in enumerate(kept):
            places[old] = new
        parents = tuple([places[self.parents[old]] for old in kept])
        if _NOWHERE in parents:
            raise InvalidTreeError("a selected node has a parent that is not selected")
        return self._take(kept, parents)

    def take(self, nodes: Sequence[int]) -> TokenTree:
        """Like `select`, for nodes known to be in order and to include their parents."""
        count = len(nodes)
        # A leading run keeps its indices; usually few nodes follow.
        while count and nodes[count - 1] >= count:
            count -= 1
        if count == len(nodes):
            return self.first(count)
        if len(nodes) == 1:
            return self._take(nodes, (ROOT,))
        taken = operator.itemgetter(*nodes)
        parents = taken(self.parents)
        if max(parents) >= count:
            places = dict(zip(nodes[count:], range(count, len(nodes)), strict=True))
            parents = tuple([places.get(parent, parent) for parent in parents])
        return _valid_tree(
            taken(self.token_ids),
            parents,
            taken(self.log_probs),
            self.source_names,
            taken(self.sources) if self.sources else (),
        )

    def first(self, count: int) -> TokenTree:
        """The first `count` nodes, a tree because parents precede children."""
        tree = object.__new__(TokenTree)
        # On the path of every pruned draft: `_valid_tree` inlined, leaving empty fields to the class defaults.
        fields = tree.__dict__
        fields["token_ids"] = self.token_ids[:count]
        fields["parents"] = self.parents[:count]
        fields["log_probs"] = self.log_probs[:count]
        fields["source_names"] = self.source_names
        if self.sources:
            fields["sources"] = self.sources[:count]
        return tree

    def up_to_depth(self, depth: int) -> TokenTree:
        """The tree without nodes deeper than `depth`.

        A sampled tree stays one, since depth does not depend on the draws.
        """
        # With so few nodes, depths need not be computed.
        if len(self.parents) <= depth or self.depth <= depth:
            return self
        kept = [node for node, value in enumerate(self.depths) if value <= depth]
        cut = self.select(kept)
        if not self.distributions:
            return cut
        root = self.distributions[0] if depth > 0 else None
        others = (self.distributions[node + 1] if self.depths[node] < depth else None for node in kept)
        return replace(cut, distributions=(root, *others))

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Node that these tokens lead to (ROOT for none); None if they leave the tree."""
        node = ROOT
        for token in token_ids:
            child = self.children.get((node, token))
            if child is None:
                return None
            node = child
        return node

    def descend(self, token_ids: Sequence[int]) -> TokenTree:
        """Subtree after these tokens, re-rooted at the node that they lead to.

        Empty if they leave the tree.
        """
        top = self.find(token_ids)
        if top is None:
            return EMPTY_TREE
        if top == ROOT:
            return self
        renumbered = {top: ROOT}
        kept: list[int] = []
        parents: list[int] = []
        for node in range(top + 1, len(self)):
            parent = renumbered.get(self.parents[node])
            if parent is not None:
                renumbered[node] = len(kept)
                kept.append(node)
                parents.append(parent)
        return self._take(kept, tuple(parents))

    def labelled(self, source: str) -> TokenTree:
        """The tree with `source` as the only source of every node."""
        if self.source_names == (source,) and not self.sources:
            return self
        return _valid_tree(self.token_ids, self.parents, self.log_probs, (source,), (), self.distributions)

    def _take(self, kept: Sequence[int], parents: tuple[int, ...]) -> TokenTree:
        """The nodes `kept`, in order, with renumbered parents."""
        return _valid_tree(
            tuple([self.token_ids[old] for old in kept]),
            parents,
            tuple([self.log_probs[old] for old in kept]),
            self.source_names,
            tuple([self.sources[old] for old in kept]) if self.sources else (),
        )

    @cached_property
    def expected_tokens(self) -> float:
        """Expected number of accepted nodes, by the tree's own probabilities."""
        return sum(math.exp(value) for value in self.path_log_probs)

    def prune(self, max_nodes: int) -> TokenTree:
        """Keep the `max_nodes` likeliest nodes by path probability.

        A node is never likelier than its parent, and ties go to the earlier node, so the result is a tree.
        """
        if len(self) <= max_nodes:
            return self
        ranked = sorted(range(len(self)), key=lambda node: (-self.path_log_probs[node], node))
        return self.select(ranked[: max(0, max_nodes)])

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Token ids along each root-to-node path, in node order."""
        for node in range(len(self)):
            yield tuple(self.token_ids[step] for step in self.path(node))


def _valid_tree(
    token_ids: tuple[int, ...],
    parents: tuple[int, ...],
    log_probs: tuple[float, ...],
    source_names: tuple[str, ...],
    sources: tuple[int, ...],
    distributions: tuple[DraftDistribution | None, ...] = (),
) -> TokenTree:
    """A tree from arrays that stem from a valid tree, unchecked."""
    tree = object.__new__(TokenTree)
    # Setting entries one by one is fastest; every pruned draft is built here.
    fields = tree.__dict__
    fields["token_ids"] = token_ids
    fields["parents"] = parents
    fields["log_probs"] = log_probs
    fields["source_names"] = source_names
    fields["sources"] = sources
    fields["distributions"] = distributions
    return tree


EMPTY_TREE = TokenTree((), (), ())


def chain(token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> TokenTree:
    """A tree that is a single path."""
    values = tuple(log_probs) if log_probs is not None else (0.0,) * len(token_ids)
    return TokenTree(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), values)
