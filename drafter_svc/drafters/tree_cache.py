"""One sequence's cached rows: the trunk (committed tokens) and, behind it, the rows of the tree being drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from coppice.tree import ROOT

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# Prompts are read in pieces of this many rows, so that the mask of a long prompt stays small.
PREFILL_ROWS = 256
_HIDDEN = np.float32(-np.inf)

Store = TypeVar("Store")


class Rows(NamedTuple):
    """New rows of one forward pass, R of them behind S cached ones.

    `token_ids` [R], `positions` [R]; `mask` [R, S + R] is added to the attention scores: 0 where a row sees another,
    -inf elsewhere. Logits are wanted for the last `num_logits` rows.
    """

    token_ids: IntArray
    positions: IntArray
    mask: FloatArray
    num_logits: int


class Forward(Protocol[Store]):
    """A way to run a causal language model over rows with a mask. `Store` is what it remembers of the rows."""

    vocab_size: int
    max_positions: int

    def new_store(self) -> Store:
        """An empty store."""
        ...

    def run(self, store: Store, rows: Rows) -> FloatArray:
        """Append the rows to the store; returns logits [num_logits, vocab]."""
        ...

    def keep(self, store: Store, first: int, rows: Sequence[int]) -> None:
        """Of the cached rows from `first` on keep the given ones, which ascend, in their order."""
        ...


class TreeCache(Generic[Store]):
    """Keeps track of which rows a store holds, and which of them each new row sees."""

    def __init__(self, forward: Forward[Store]) -> None:
        self._forward = forward
        self._store = forward.new_store()
        self.trunk_length = 0
        self._parents: list[int] = []
        self._row_of: dict[tuple[int, int], int] = {}

    def extend(self, token_ids: Sequence[int]) -> FloatArray:
        """Append at least one committed token to the trunk; returns the logits [vocab] behind the last.

        There must be no tree rows: call `follow` first.
        """
        logits = np.empty((0, 0), np.float32)
        for start in range(0, len(token_ids), PREFILL_ROWS):
            piece = np.asarray(token_ids[start : start + PREFILL_ROWS], np.int64)
            count, length = len(piece), self.trunk_length
            mask = np.zeros((count, length + count), np.float32)
            mask[:, length:][np.triu_indices(count, 1)] = _HIDDEN
            positions = np.arange(length, length + count)
            logits = self._forward.run(self._store, Rows(piece, positions, mask, 1))
            self.trunk_length += count
        row: FloatArray = logits[-1]
        return row

    def grow(self, token_ids: Sequence[int], parent_rows: Sequence[int], depths: Sequence[int]) -> FloatArray:
        """Append tree rows; returns their logits [rows, vocab].

        Tree rows are numbered from 0 in the order of appending; a parent is an earlier call's row, or -1 for the
        end of the trunk, whose children have depth 1.
        """
        trunk, old, count = self.trunk_length, len(self._parents), len(token_ids)
        mask = np.full((count, trunk + old + count), _HIDDEN, np.float32)
        mask[:, :trunk] = 0
        for offset, (token, parent) in enumerate(zip(token_ids, parent_rows, strict=True)):
            self._row_of[parent, token] = old + offset
            self._parents.append(parent)
            mask[offset, trunk + old + offset] = 0
            while parent != ROOT:
                mask[offset, trunk + parent] = 0
                parent = self._parents[parent]
        positions = np.asarray(depths, np.int64) + (trunk - 1)
        rows = Rows(np.asarray(token_ids, np.int64), positions, mask, count)
        return self._forward.run(self._store, rows)

    def follow(self, token_ids: Sequence[int]) -> int:
        """Walk committed tokens down the tree rows; what they meet joins the trunk, all other tree rows go.

        Returns how many of the tokens are in the trunk now.
        """
        path: list[int] = []
        for token in token_ids:
            row = self._row_of.get((path[-1] if path else ROOT, token))
            if row is None:
                break
            path.append(row)
        if self._parents:
            self._forward.keep(self._store, self.trunk_length, [self.trunk_length + row for row in path])
            self._parents.clear()
            self._row_of.clear()
        self.trunk_length += len(path)
        return len(path)
