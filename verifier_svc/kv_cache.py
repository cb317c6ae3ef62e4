"""The paged KV cache's bookkeeping: blocks of token slots, and per sequence a table of the blocks that it owns.

A sequence's tokens lie in its blocks in order: position p is in slot p mod BLOCK_SIZE of block p div BLOCK_SIZE. A
pass writes its rows behind the committed tokens; accepting a path moves the path's rows together, and what lay between
them is overwritten by the next pass. The keys and values themselves belong to the attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from coppice.errors import OverloadedError

IntArray = npt.NDArray[np.int64]

# Slots in a block: as many keys as a compiled loop scores at once without running idle on its edges.
BLOCK_SIZE = 64


def slots_of(table: IntArray, positions: IntArray) -> IntArray:
    """Slots of positions in a sequence whose blocks are `table`."""
    slots: IntArray = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


class KVCache:
    """Which blocks are free, and which rows have to move before the next pass."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._sources: list[IntArray] = []
        self._destinations: list[IntArray] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    def take_block(self) -> int:
        """Hand out a free block.

        Raises:
            OverloadedError: there is none.
        """
        if not self._free:
            raise OverloadedError("the KV cache is full")
        return self._free.pop()

    def return_blocks(self, blocks: Iterable[int]) -> None:
        """Take blocks back."""
        self._free.extend(blocks)

    def move(self, sources: IntArray, destinations: IntArray) -> None:
        """Before the next pass, what is in slots `sources` has to go to `destinations`; all are read before written."""
        self._sources.append(sources)
        self._destinations.append(destinations)

    def take_moves(self) -> tuple[IntArray, IntArray]:
        """Sources and destinations of all moves since the last call."""
        empty = np.empty(0, np.int64)
        moves = np.concatenate([empty, *self._sources]), np.concatenate([empty, *self._destinations])
        self._sources, self._destinations = [], []
        return moves


class SequenceCache:
    """One sequence's part of the cache, for at most `max_tokens` tokens and rows behind them."""

    def __init__(self, cache: KVCache, max_tokens: int) -> None:
        self._cache = cache
        self._num_blocks = 0
        self._table = np.zeros(-(-max_tokens // BLOCK_SIZE), np.int64)
        # Tokens whose keys and values are kept.
        self.length = 0

    @property
    def table(self) -> IntArray:
        """The sequence's blocks, in order [blocks]."""
        return self._table[: self._num_blocks]

    def reserve(self, rows: int) -> None:
        """Own the blocks that the next `rows` rows are written to.

        Raises:
            OverloadedError: the cache has no block left.
        """
        needed = -(-(self.length + rows) // BLOCK_SIZE)
        while self._num_blocks < needed:
            self._table[self._num_blocks] = self._cache.take_block()
            self._num_blocks += 1

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass, in path order and ascending; the others are forgotten."""
        kept = np.asarray(rows, np.int64)
        places = np.arange(len(kept))
        moved = kept != places
        if moved.any():
            sources = slots_of(self._table, self.length + kept[moved])
            self._cache.move(sources, slots_of(self._table, self.length + places[moved]))
        self.length += len(kept)

    def release(self) -> None:
        """Give every block back; the sequence is empty afterwards."""
        self._cache.return_blocks(self.table.tolist())
        self._num_blocks = 0
        self.length = 0
