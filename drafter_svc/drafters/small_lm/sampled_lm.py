"""Sampled trees of a small language model: draws from its own distribution, for traversal verification.

A tree's shape follows from the budget and the calibrated acceptance alone (`tree_widths`), since its size must not
depend on what is drawn; the draws are then made level by level (`sample_tree`).
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
from coppice.search.tree_limits import TreeLimits
from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PrefixKey
from drafter_svc.model.read_context import ReadContext
from drafter_svc.model.tree_cache import FloatArray, Forward
from drafter_svc.search.coupling import Coupling

# Tokens that a distribution is truncated to; each costs about six bytes on the wire for every node with children.
MAX_TOKENS = 16


Path = tuple[int, ...]
# The distributions behind the tokens of several paths, in one forward pass.
Predict = Callable[[Sequence[Path]], Sequence[DraftDistribution]]


def sample_tree(
    widths: Sequence[int], predict: Predict, chance: Chance, *, with_replacement: bool = False
) -> SampledTree:
    """A tree of `len(widths)` levels; every node of level i (the root is level 0) gets `widths[i]` children.

    Without replacement, a node whose distribution has fewer tokens gets them all.
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
    """Tokens drawn from a distribution one after another."""
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


# Most children of one node, levels and nodes. Larger shapes take long to plan, and hardly a draft reaches so deep.
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
    """The widths, one per level, whose expected accepted tokens less `node_cost` for each node are the most.

    A node's w children are taken to hold the right token as often as the first w of `acceptance_by_rank` together. A
    level below the first costs a forward pass, and has to be reached with probability `min_level_gain` at least.
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
    """One sequence: a cache whose trunk follows the committed tokens, and the tokens that it has not read yet.

    Trees of one budget and committed length have the same size, whatever is drawn: who drops one for its size must not
    choose by that what the drafts say.
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
        # The coupling is used for the request's parameters, never for its noise.
        super().__init__(forward, context, coupling, beginning)
        self._sampling = sampling
        self._limits = limits
        self._acceptance_by_rank = tuple(acceptance_by_rank)
        self._source = source
        # Of paths behind the committed tokens: their rows, and what their children are drawn from.
        self._rows: dict[Path, int] = {}
        self._behind: dict[Path, DraftDistribution] = {}

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """A tree of at most `max_nodes` nodes, drawn with the seed's own numbers for this committed length.

        `row_multiple` changes nothing: which nodes a sampled tree has must not depend on how likely they turned out.
        """
        widths = self._widths(max_nodes)
        if not widths:
            return EMPTY_TREE
        self._read()
        chance = seeded_chance(self._sampling.seed, self._context.length, Purpose.DRAFT)
        return sample_tree(widths, self._predict, chance).token_tree(self._source)

    def prepare(self) -> bool:
        """Read a piece of a long prompt. A node that is drawn ahead would have to wait for its parent's draw."""
        return self.read(max_pieces=1) > 0

    def _widths(self, max_nodes: int) -> tuple[int, ...]:
        limits = self._limits
        # A node at depth d is read at position length + d - 1; the deepest need no reading.
        deepest = self._max_positions - self._context.size + 1
        # Without a step there is one level: the root's children come with the committed tokens' own pass.
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
        """Bring the cache up to the last committed token, which is always read anew for its logits."""
        if self._context.unread:
            self._follow()
            logits = self._cache.extend(self._context.unread)
            self._context.unread.clear()
            self._rows = {(): ROOT}
            self._behind = {(): self._distribution(logits)}

    def _follow(self) -> None:
        del self._context.unread[: self._cache.follow(self._context.unread[:-1]).num_tokens]

    def _predict(self, paths: Sequence[Path]) -> list[DraftDistribution]:
        """What the tokens behind paths are drawn from; one forward pass where a path was not read before."""
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
