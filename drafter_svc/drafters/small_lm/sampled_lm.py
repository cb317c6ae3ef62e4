"""Sampled trees of a small language model: draws from its own distribution, for traversal verification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from coppice.core.chance import Purpose, seeded_chance
from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.search.tree_limits import TreeLimits
from drafter_svc.drafters.small_lm.tree_sampler import Path, sample_tree
from drafter_svc.drafters.small_lm.tree_shape import MAX_WIDTH, tree_widths
from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixKey
from drafter_svc.model.read_context import ReadContext
from drafter_svc.model.tree_cache import FloatArray, Forward
from drafter_svc.search.coupling import Coupling

# Tokens that a distribution is truncated to; each costs about six bytes on the wire for every node with children.
MAX_TOKENS = 16


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
        super().__init__(forward, context, beginning)
        self._max_positions = forward.max_positions
        # Used for the request's parameters, never for its noise.
        self._coupling = coupling
        self._sampling = sampling
        self._limits = limits
        self._acceptance_by_rank = tuple(acceptance_by_rank)
        self._source = source
        # Of paths behind the committed tokens: their rows, and what their children are drawn from.
        self._rows: dict[Path, int] = {}
        self._behind: dict[Path, DraftDistribution] = {}

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Take in committed tokens; features are not needed."""
        self._coupling.commit(token_ids)
        if self._context.extend(token_ids):
            self._start_over()

    def read(self, max_pieces: int) -> int:
        """Read what costs nothing and at most `max_pieces` pieces; returns how many are left."""
        if len(self._context.unread) <= PIECE_ROWS or self._context.size > self._max_positions:
            return 0
        del self._context.unread[: self._cache.follow(self._context.unread[:-1]).num_tokens]
        del self._context.unread[: self._cache.read(self._context.unread, max_pieces)]
        return max(0, len(self._context.unread) - 1) // PIECE_ROWS

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
            followed = self._cache.follow(self._context.unread[:-1])
            logits = self._cache.extend(self._context.unread[followed.num_tokens :])
            self._context.unread.clear()
            self._rows = {(): ROOT}
            self._behind = {(): self._distribution(logits)}

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
