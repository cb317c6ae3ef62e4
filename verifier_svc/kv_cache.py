"""The paged KV cache: blocks of token slots, and per sequence a table of the slots that its tokens live in.

Keys and values never move. A pass writes its rows to spare slots of the sequence; accepting a path appends those
rows' slots to the table, and the slots of rejected rows are spare again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from coppice.errors import OverloadedError

# Slots in a block.
BLOCK_SIZE = 16


class KVCache:
    """Key and value buffers of every layer [slots, kv_heads, head_dim], and the blocks that are free.

    A layer's buffers take the shape of the first keys and values that it stores, so that any head layout fits.
    """

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.device = device
        self._free = list(range(num_blocks - 1, -1, -1))
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        buffers = (*self._keys.values(), *self._values.values())
        return sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)

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

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `keys` and `values` [rows, kv_heads, head_dim] in `slots` [rows]; returns the layer's buffers."""
        if layer not in self._keys:
            num_slots = self.num_blocks * BLOCK_SIZE
            self._keys[layer] = keys.new_empty(num_slots, *keys.shape[1:])
            self._values[layer] = values.new_empty(num_slots, *values.shape[1:])
        key_buffer, value_buffer = self._keys[layer], self._values[layer]
        key_buffer.index_copy_(0, slots, keys)
        value_buffer.index_copy_(0, slots, values)
        return key_buffer, value_buffer


class SequenceCache:
    """One sequence's part of the cache."""

    def __init__(self, cache: KVCache, max_tokens: int) -> None:
        self._cache = cache
        self._blocks: list[int] = []
        self._spare: list[int] = []
        self._table = torch.empty(max_tokens, dtype=torch.long)
        self.length = 0

    @property
    def committed_slots(self) -> Tensor:
        """Slots of the tokens whose keys and values are kept, in order [length]."""
        return self._table[: self.length]

    def reserve(self, rows: int) -> list[int]:
        """Spare slots for the next `rows` rows; they stay spare until `keep`.

        Raises:
            OverloadedError: the cache has no block left.
        """
        while len(self._spare) < rows:
            block = self._cache.take_block()
            self._blocks.append(block)
            first = block * BLOCK_SIZE
            self._spare.extend(range(first, first + BLOCK_SIZE))
        return self._spare[:rows]

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last reservation, in path order; the others are spare again."""
        slots = [self._spare[row] for row in rows]
        end = self.length + len(slots)
        self._table[self.length : end] = torch.tensor(slots, dtype=torch.long)
        self.length = end
        kept = set(rows)
        self._spare = [slot for row, slot in enumerate(self._spare) if row not in kept]

    def release(self) -> None:
        """Give every block back; the sequence is empty afterwards."""
        self._cache.return_blocks(self._blocks)
        self._blocks = []
        self._spare = []
        self.length = 0
