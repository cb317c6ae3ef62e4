"""A sequence's KV blocks over starts, preemptions and restarts.

A preempted sequence keeps its committed tokens; keys and values are recomputed at the same positions, except blocks
still published. A sequence also restarts when its text becomes long enough for long rope factors, since its keys have
short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.prefix_digests import prefix_digests
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache


class SequenceBlocks:
    """Blocks that one sequence owns or needs, and its recomputed tokens.

    `tokens` are the committed ones, a list that grows to at most `max_tokens`; a tree adds up to `max_nodes` rows.
    Texts of more than `rope_boundary` tokens have long rope factors; None without such a length.
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
        # Digests of shareable blocks, while the sequence waits.
        self._digests: tuple[bytes, ...] | None = None
        # Cached tokens at the last start, and the largest cached length at a release.
        self._num_adopted = 0
        self._num_released = 0
        self.num_starts = 0
        self.num_preemptions = 0
        # Tokens whose keys and values were recomputed.
        self.num_recomputed = 0

    @property
    def cache(self) -> SequenceCache:
        """The sequence's part of the cache, between start and release."""
        if self._cache is None:
            raise RuntimeError("the sequence has not started")
        return self._cache

    @property
    def is_outgrown(self) -> bool:
        """Whether the cache has short rope factors, but the text needs long ones."""
        return self._is_long and self._cache is not None and not self._cache.is_long

    @property
    def num_pending(self) -> int:
        """Committed tokens not in the cache."""
        return len(self._tokens) - (self._cache.length if self._cache is not None else 0)

    @property
    def num_blocks_needed(self) -> int:
        """Upper bound of the sequence's blocks: its longest output and a tree after it."""
        return self._blocks_for(self._max_tokens)

    def num_blocks_lacking(self, num_tokens: int) -> int:
        """Blocks to be allocated for all tokens so far, at most `num_tokens` more, and a tree after them."""
        owned = len(self._cache.table) if self._cache is not None else 0
        return max(0, self._blocks_for(min(len(self._tokens) + num_tokens, self._max_tokens)) - owned)

    def num_blocks_held(self, cache: KVCache) -> int:
        """Blocks that a waiting sequence would share with current users."""
        if self._digests is None:
            self._digests = tuple(prefix_digests(self._tokens, BLOCK_SIZE, self._salt, is_long=self._is_long))
        return cache.num_held(self._digests)

    def start(self, cache: KVCache) -> int:
        """Allocate blocks for all tokens so far; returns the number of cached tokens.

        Raises:
            OverloadedError: too few free blocks.
        """
        self._digests = None
        self.num_starts += 1
        self._cache = SequenceCache(cache, self._max_tokens + self._max_nodes, self._salt, is_long=self._is_long)
        self._num_adopted = self._cache.adopt(self._tokens)
        self._cache.reserve(self.num_pending)
        return self._num_adopted

    def preempt(self) -> int:
        """Release the blocks for others, to start again later. Returns what `release` does."""
        self.num_preemptions += 1
        return self.release()

    def release(self) -> int:
        """Return the blocks; returns the number of tokens recomputed since the last start."""
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
