"""Cached rows of one sequence: trunk (committed tokens) and rows of the tree being drafted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from coppice.core.tree import ROOT
from coppice.draft_models.kernels.base import Found, Rows, WholeSearch
from coppice.search.tree_limits import Children
from drafter_svc.model.prefix_blocks import PIECE_ROWS, KvBlock, PrefixKey

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_HIDDEN = np.float32(-np.inf)

Store = TypeVar("Store")


class Forward(Protocol[Store]):
    """A way to run a causal language model over rows with a mask. `Store` is its KV cache."""

    vocab_size: int
    max_positions: int
    # Most unread tokens that `search` can read; more must be read before.
    max_unread: int

    def new_store(self) -> Store:
        """An empty store."""

    def run(self, store: Store, rows: Rows) -> FloatArray:
        """Append the rows to the store; returns logits [num_logits, vocab]."""

    def keep(self, store: Store, first: int, rows: Sequence[int]) -> None:
        """Of cached rows from `first` on, keep the given ones, which ascend."""

    def take(self, store: Store, first: int, last: int) -> KvBlock:
        """Copy of cached rows from `first` to before `last`."""

    def put(self, store: Store, block: KvBlock) -> None:
        """Append rows copied by `take` from a store with the same rows before them."""

    def search(self, store: Store, search: WholeSearch) -> Found | None:
        """Search after the cached rows and append the computed rows; None if only step-by-step search is supported."""


class Followed(NamedTuple):
    """Committed tokens found among tree rows: how many joined the trunk, and the children noted after the last.

    `children` is None unless all tokens were found.
    """

    num_tokens: int
    children: Children | None


class TreeCache(Generic[Store]):
    """Tracks a store's rows, their visibility, and the children found after each.

    Tree rows are numbered from 0 in order. Without `beginning` no rows are shared.
    """

    def __init__(self, forward: Forward[Store], beginning: PrefixKey | None = None) -> None:
        self._forward = forward
        self._beginning = beginning
        self._store = forward.new_store()
        self.trunk_length = 0
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._children: dict[int, Children] = {}
        # The last search, while its rows are the tree rows: children are read from it on demand.
        self._found: Found | None = None
        self._row_of: dict[tuple[int, int], int] = {}

    def extend(self, token_ids: Sequence[int]) -> FloatArray:
        """Append at least one committed token to the trunk; returns the logits [vocab] after the last.

        Drops tree rows: call `follow` first to keep those that were committed.
        """
        if self._parents:
            self._keep([], [])
        num_read = self.read(token_ids, max_pieces=sys.maxsize)
        return self._append(token_ids[num_read:])

    def look(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        sees_all: bool,
    ) -> FloatArray:
        """Append committed tokens to the trunk and run a block of ids after them, in one pass.

        The block's rows see the trunk and the rows before them or, with `sees_all`, the whole block. They are not kept,
        and tree rows are dropped. Returns logits [rows, vocab]: of the last committed token, if `token_ids` has any,
        and of the block's rows.
        """
        if self._parents:
            self._keep([], [])
        unread = token_ids[self.read(token_ids, max_pieces=sys.maxsize) :]
        if not unread and not block_ids:
            return np.empty((0, self._forward.vocab_size), np.float32)
        logits = self._run(unread, block_ids, sees_all=sees_all)
        self._forward.keep(self._store, self.trunk_length, [])
        return logits

    def read(self, token_ids: Sequence[int], max_pieces: int) -> int:
        """Append leading committed tokens in whole pieces; returns how many were appended.

        The last 1 to PIECE_ROWS are left, to compute logits after them. Cached pieces are copied; at most `max_pieces`
        are computed. Drops tree rows, unless there is no whole piece.
        """
        if self._parents and len(token_ids) > PIECE_ROWS:
            self._keep([], [])
        start = 0
        while len(token_ids) - start > PIECE_ROWS:
            piece = token_ids[start : start + PIECE_ROWS]
            if not self._copy(piece):
                if max_pieces == 0:
                    break
                max_pieces -= 1
                self._compute(piece)
            start += PIECE_ROWS
        return start

    def _copy(self, piece: Sequence[int]) -> bool:
        """Append a piece cached by another sequence with the same prefix, if there is one."""
        if self._beginning is None or not self._beginning.follows(self.trunk_length):
            return False
        block = self._beginning.find(piece)
        if block is None:
            return False
        self._forward.put(self._store, block)
        self.trunk_length += PIECE_ROWS
        return True

    def _compute(self, piece: Sequence[int]) -> None:
        """Append a piece, and share it if it belongs to the prompt's prefix."""
        first = self.trunk_length
        self._append(piece)
        if self._beginning is not None and self._beginning.follows(first):
            self._beginning.add(piece, self._forward.take(self._store, first, self.trunk_length))

    def _append(self, token_ids: Sequence[int]) -> FloatArray:
        """Append tokens to the trunk in one pass; returns the logits [vocab] after the last."""
        row: FloatArray = self._run(token_ids, (), sees_all=False)[-1]
        return row

    def _run(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        sees_all: bool,
    ) -> FloatArray:
        """Append tokens to the trunk and a block to the store; returns the logits of the last token and the block."""
        width, length = len(block_ids), self.trunk_length
        count = len(token_ids) + width
        mask = np.zeros((count, length + count), np.float32)
        mask[:, length:][np.triu_indices(count, 1)] = _HIDDEN
        if sees_all:
            mask[count - width :] = 0
        positions = np.arange(length, length + count)
        ids = np.asarray([*token_ids, *block_ids], np.int64)
        num_logits = width + min(len(token_ids), 1)
        logits = self._forward.run(self._store, Rows(ids, positions, mask, num_logits))
        self.trunk_length += len(token_ids)
        return logits

    @property
    def num_rows(self) -> int:
        """Tree rows."""
        return len(self._parents)

    @property
    def num_cached(self) -> int:
        """All rows in the store."""
        return self.trunk_length + len(self._parents)

    def find(self, parent_row: int, token_id: int) -> int | None:
        """Row of a parent's child with this token, if any; parent -1 is the end of the trunk."""
        return self._row_of.get((parent_row, token_id))

    def children(self, row: int) -> Children:
        """Children noted after a row."""
        children = self._noted(row)
        if children is None:
            raise KeyError(row)
        return children

    def grow(self, token_ids: Sequence[int], parent_rows: Sequence[int], depths: Sequence[int]) -> FloatArray:
        """Append tree rows; returns their logits [rows, vocab]. Call `note` next if their children will be read.

        A parent is an earlier call's row, or -1 for the end of the trunk, whose children have depth 1.
        """
        trunk, old, count = self.trunk_length, len(self._parents), len(token_ids)
        mask = np.full((count, trunk + old + count), _HIDDEN, np.float32)
        mask[:, :trunk] = 0
        for offset, parent in enumerate(parent_rows):
            mask[offset, trunk + old + offset] = 0
            while parent != ROOT:
                mask[offset, trunk + parent] = 0
                parent = self._parents[parent]
        positions = np.asarray(depths, np.int64) + (trunk - 1)
        rows = Rows(np.asarray(token_ids, np.int64), positions, mask, count)
        logits = self._forward.run(self._store, rows)
        # At the end: a failed pass leaves no rows.
        self._row_of.update((key, old + offset) for offset, key in enumerate(zip(parent_rows, token_ids, strict=True)))
        self._parents.extend(parent_rows)
        self._tokens.extend(token_ids)
        return logits

    def path(self, row: int) -> list[int]:
        """Tokens from the end of the trunk to a row, inclusive."""
        tokens: list[int] = []
        while row != ROOT:
            tokens.append(self._tokens[row])
            row = self._parents[row]
        return tokens[::-1]

    def search(self, search: WholeSearch) -> Found | None:
        """A whole search by the forward itself, with its rows and children noted; None if not supported.

        The search's unread tokens join the trunk.
        """
        found = None if self._parents else self._forward.search(self._store, search)
        if found is None:
            return None
        self.trunk_length += len(search.unread)
        self._parents = found.row_parents.tolist()
        self._tokens = found.row_token_ids.tolist()
        self._row_of = {key: row for row, key in enumerate(zip(self._parents, self._tokens, strict=True))}
        self._found = found
        return found

    def note(self, children: Sequence[Children]) -> None:
        """Note the children after the rows of the last `grow`, in order."""
        first = len(self._parents) - len(children)
        self._children.update(enumerate(children, first))

    def follow(self, token_ids: Sequence[int]) -> Followed:
        """Follow committed tokens down the tree rows; those found join the trunk.

        If all are found, with children noted after the last, its descendants stay as tree rows; all others are dropped.
        """
        path: list[int] = []
        for token in token_ids:
            row = self._row_of.get((path[-1] if path else ROOT, token))
            if row is None:
                break
            path.append(row)
        met_all = len(path) == len(token_ids)
        children = self._noted(path[-1]) if met_all and path else None
        if path or (self._parents and not met_all):
            self._keep(path, self._descendants(path[-1]) if children is not None else [])
        return Followed(len(path), children)

    def _noted(self, row: int) -> Children | None:
        children = self._children.get(row)
        if children is None and self._found is not None and row < len(self._found.child_counts):
            count = self._found.child_counts[row]
            children = Children(
                self._found.child_token_ids[row, :count].tolist(), self._found.child_log_probs[row, :count].tolist()
            )
            self._children[row] = children
        return children

    def _descendants(self, ancestor: int) -> list[int]:
        below = {ancestor}
        for row in range(ancestor + 1, len(self._parents)):
            if self._parents[row] in below:
                below.add(row)
        return sorted(below - {ancestor})

    def _keep(self, path: Sequence[int], tree_rows: Sequence[int]) -> None:
        """Move `path` into the trunk and keep `tree_rows`, which follow its end."""
        self._forward.keep(self._store, self.trunk_length, [self.trunk_length + row for row in (*path, *tree_rows)])
        self.trunk_length += len(path)
        if not tree_rows:
            self._parents, self._tokens, self._row_of, self._children, self._found = [], [], {}, {}, None
            return
        renumbered = {row: number for number, row in enumerate(tree_rows)}
        self._row_of = {
            (renumbered.get(parent, ROOT), token): renumbered[row]
            for (parent, token), row in self._row_of.items()
            if row in renumbered
        }
        self._parents = [renumbered.get(self._parents[row], ROOT) for row in tree_rows]
        self._tokens = [self._tokens[row] for row in tree_rows]
        noted = {number: self._noted(row) for row, number in renumbered.items()}
        self._children = {number: children for number, children in noted.items() if children is not None}
        self._found = None
