"""Sampled trees of a small language model: draws from its distribution, for traversal verification.

A tree's shape depends only on the budget and the calibrated acceptance (`tree_widths`), since its size must not depend
on the draws, which are then made level by level (`sample_tree`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from coppice.core.chance import Chance, Purpose, seeded_chance
from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.draft_models.coupling import Coupling
from coppice.search.tree_limits import TreeLimits
from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PrefixKey
from drafter_svc.model.read_context import ReadContext
from drafter_svc.model.tree_cache import FloatArray, Forward

# Tokens kept in a distribution; each costs about six bytes on the wire per inner node.
MAX_TOKENS = 16


Path = tuple[int, ...]
# Distributions after several paths, in one forward pass.
Predict = Callable[[Sequence[Path]], Sequence[DraftDistribution]]


def sample_tree(
    widths: Sequence[int], predict: Predict, chance: Chance, *, with_replacement: bool = False
) -> SampledTree:
    """A tree of `len(widths)` levels; every node of level i (the root is level 0) gets `widths[i]` children.

    Without replacement, a node with fewer tokens in its distribution gets them all.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    distributions: list[DraftDistribution | None] = [None]
    level: list[tuple[int, Path]] = [(ROOT, ())]
    for width in widths:
        below: list[tuple[int, Path]] = []
        for (node, path), distribution in zip(level, predict([path for _, path in level]), strict=True):
            distributions[node + 1] = distribution
            for token in sample_children(distribution, width, chance, with_replacement=with_replacement):
                below.append((len(token_ids), (*path, token)))
                token_ids.append(token)
                parents.append(node)
                distributions.append(None)
        level = below
    return SampledTree(tuple(token_ids), tuple(parents), tuple(distributions), with_replacement)


def sample_children(
    distribution: DraftDistribution, count: int, chance: Chance, *, with_replacement: bool
) -> tuple[int, ...]:
    """Tokens drawn successively from a distribution."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = distribution.token_ids[chance.choice(distribution.probabilities)]
        tokens.append(token)
        if with_replacement:
            continue
        if len(distribution) == 1:
            break
        distribution = distribution.without(token)
    return tuple(tokens)


# Limits on children per node, levels and nodes. Larger shapes take long to plan, and drafts rarely reach so deep.
MAX_WIDTH = 4
MAX_LEVELS = 12
MAX_NODES = 64


class _Plan(NamedTuple):
    gain: float
    widths: tuple[int, ...]


@lru_cache(maxsize=256)
def tree_widths(
    max_nodes: int, max_levels: int, acceptance_by_rank: tuple[float, ...], node_cost: float, min_level_gain: float
) -> tuple[int, ...]:
    """Widths per level that maximise expected accepted tokens minus `node_cost` per node.

    A node's w children are assumed to include the right token with the sum of the first w of `acceptance_by_rank`.
    Levels below the first cost a forward pass and must be reached with probability of at least `min_level_gain`.
    """
    rates = tuple(accumulate(acceptance_by_rank[:MAX_WIDTH]))

    def best(parents: int, nodes_left: int, levels_left: int, reach: float) -> _Plan:
        found = _Plan(0.0, ())
        if levels_left == 0:
            return found
        for width, rate in enumerate(rates, start=1):
            nodes = parents * width
            if nodes > nodes_left:
                break
            reached = reach * min(rate, 1.0)
            below = _Plan(0.0, ())
            if reached >= min_level_gain:
                below = best(nodes, nodes_left - nodes, levels_left - 1, reached)
            gain = reached - node_cost * nodes + below.gain
            if gain > found.gain:
                found = _Plan(gain, (width, *below.widths))
        return found

    return best(1, min(max_nodes, MAX_NODES), min(max_levels, MAX_LEVELS), 1.0).widths


class SampledLmSequence(ReadContext):
    """One sequence: a cache whose trunk follows the committed tokens, and the unread tokens.

    Trees of one budget and committed length have the same size whatever is drawn: dropping one for its size must not
    select by its tokens.
    """

    def __init__(
        self,
        forward: Forward[Any],
        coupling: Coupling,
        sampling: SamplingParams,
        limits: TreeLimits,
        acceptance_by_rank: Sequence[float],
        source: str,
        context: DraftContext,
        beginning: PrefixKey | None = None,
    ) -> None:
        # Used for the request's parameters, not for its noise.
        super().__init__(forward, context, coupling, beginning)
        self._sampling = sampling
        self._limits = limits
        self._acceptance_by_rank = tuple(acceptance_by_rank)
        self._source = source
        # By path after the committed tokens: rows, and distributions of children.
        self._rows: dict[Path, int] = {}
        self._behind: dict[Path, DraftDistribution] = {}

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """A tree of at most `max_nodes` nodes, drawn with the seed's random numbers for this committed length.

        `row_multiple` is ignored: the nodes of a sampled tree must not depend on their probabilities.
        """
        widths = self._widths(max_nodes)
        if not widths:
            return EMPTY_TREE
        self._read()
        chance = seeded_chance(self._sampling.seed, self._context.length, Purpose.DRAFT)
        return sample_tree(widths, self._predict, chance).token_tree(self._source)

    def prepare(self) -> bool:
        """Read a piece of a long prompt. Drawing ahead is impossible: a node depends on its parent's draw."""
        return self.read(max_pieces=1) > 0

    def _widths(self, max_nodes: int) -> tuple[int, ...]:
        limits = self._limits
        # A node at depth d is read at position length + d - 1; the deepest are not read.
        deepest = self._max_positions - self._context.size + 1
        # Without steps there is one level: the root's children come from the committed tokens' pass.
        num_levels = min(limits.max_steps + 1, deepest)
        if max_nodes < 1 or num_levels < 1:
            return ()
        return tree_widths(
            min(max_nodes, limits.max_nodes),
            num_levels,
            self._acceptance_by_rank,
            math.exp(limits.min_path_log_prob),
            limits.min_step_gain,
        )

    def _read(self) -> None:
        """Read up to the last committed token, which is always recomputed for its logits."""
        if self._context.unread:
            self._follow()
            logits = self._cache.extend(self._context.unread)
            self._context.unread.clear()
            self._rows = {(): ROOT}
            self._behind = {(): self._distribution(logits)}

    def _follow(self) -> None:
        del self._context.unread[: self._cache.follow(self._context.unread[:-1]).num_tokens]

    def _predict(self, paths: Sequence[Path]) -> list[DraftDistribution]:
        """Distributions after paths; takes one forward pass if any path is unread."""
        missing = [path for path in paths if path not in self._behind]
        if missing:
            first = self._cache.num_rows
            logits = self._cache.grow(
                [path[-1] for path in missing],
                [self._rows[path[:-1]] for path in missing],
                [len(path) for path in missing],
            )
            for offset, path in enumerate(missing):
                self._rows[path] = first + offset
                self._behind[path] = self._distribution(logits[offset], path)
        return [self._behind[path] for path in paths]

    def _distribution(self, logits: FloatArray, path: Path = ()) -> DraftDistribution:
        [scores] = self._coupling.processed(logits[None], [path])
        return truncated(scores, self._sampling.temperature, MAX_TOKENS, min_tokens=MAX_WIDTH)
