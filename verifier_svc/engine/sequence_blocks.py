"""A sequence's stays in the KV cache: it starts, may have to make room for others, and starts again.

What a preempted sequence has committed stays; its keys and values are computed again at the same positions, save for
blocks that are still published. So does a sequence start again when its text comes to have long rope factors, since its
keys were turned by short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.prefix_digests import prefix_digests
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache


class SequenceBlocks:
    """Which blocks one sequence owns or would need, and what it has computed more than once.

    `tokens` are the committed ones, a list that grows to `max_tokens` at most; a tree adds up to `max_nodes` rows.
    Texts of more than `rope_boundary` tokens have long rope factors; None where there is no such length.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        max_nodes: int,
        salt: str,
        rope_boundary: int | None = None,
    ) -> None:
        self._tokens = tokens
        self._rope_boundary = rope_boundary
        self._max_tokens = max_tokens
        self._max_nodes = max_nodes
        self._salt = salt
        self._cache: SequenceCache | None = None
        # Digests of what may be shared, while the sequence waits.
        self._digests: tuple[bytes, ...] | None = None
        # Tokens that others had computed at the last start, and the most that were in the cache at a release.
        self._num_adopted = 0
        self._num_released = 0
        self.num_starts = 0
        self.num_preemptions = 0
        # Tokens whose keys and values were computed another time.
        self.num_recomputed = 0

    @property
    def cache(self) -> SequenceCache:
        """The sequence's part of the cache, between a start and a release."""
        if self._cache is None:
            raise RuntimeError("the sequence has not started")
        return self._cache

    @property
    def is_outgrown(self) -> bool:
        """Whether the cache was made with short rope factors, and the text has come to have long ones."""
        return self._is_long and self._cache is not None and not self._cache.is_long

    @property
    def num_pending(self) -> int:
        """Committed tokens whose keys and values are not in the cache."""
        return len(self._tokens) - (self._cache.length if self._cache is not None else 0)

    @property
    def num_blocks_needed(self) -> int:
        """Blocks that the sequence can come to own: room for its longest output and a tree behind it."""
        return self._blocks_for(self._max_tokens)

    def num_blocks_lacking(self, num_tokens: int) -> int:
        """Blocks not owned yet of those for all tokens so far, at most `num_tokens` more, and a tree behind them."""
        owned = len(self._cache.table) if self._cache is not None else 0
        return max(0, self._blocks_for(min(len(self._tokens) + num_tokens, self._max_tokens)) - owned)

    def num_blocks_held(self, cache: KVCache) -> int:
        """Blocks that a sequence which waits would share with others that use them already."""
        if self._digests is None:
            self._digests = tuple(prefix_digests(self._tokens, BLOCK_SIZE, self._salt, is_long=self._is_long))
        return cache.num_held(self._digests)

    def start(self, cache: KVCache) -> int:
        """Own blocks for all tokens so far; returns how many of these others have computed.

        Raises:
            OverloadedError: the cache has too few free blocks.
        """
        self._digests = None
        self.num_starts += 1
        self._cache = SequenceCache(cache, self._max_tokens + self._max_nodes, self._salt, is_long=self._is_long)
        self._num_adopted = self._cache.adopt(self._tokens)
        self._cache.reserve(self.num_pending)
        return self._num_adopted

    def preempt(self) -> int:
        """Release the blocks for others; the next start goes on from the same tokens. Returns what `release` does."""
        self.num_preemptions += 1
        return self.release()

    def release(self) -> int:
        """Give the blocks back; returns how many tokens were computed another time since the last start."""
        if self._cache is None:
            return 0
        recomputed = max(0, min(self._cache.length, self._num_released) - self._num_adopted)
        self.num_recomputed += recomputed
        self._num_released = max(self._num_released, self._cache.length)
        self._cache.release()
        self._cache = None
        return recomputed

    @property
    def _is_long(self) -> bool:
        return self._rope_boundary is not None and len(self._tokens) > self._rope_boundary

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-(num_tokens + self._max_nodes) // BLOCK_SIZE)
