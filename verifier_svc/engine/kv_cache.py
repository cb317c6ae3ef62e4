"""Paged KV cache: blocks of token slots, and per sequence a block table.

Position p of a sequence is slot p mod BLOCK_SIZE of its block p div BLOCK_SIZE. A pass writes its rows after the
committed tokens; accepting a path moves the path's rows together, and rejected rows are overwritten by the next pass.
The keys and values themselves belong to the attention kernel.

Keys and values depend on the tokens up to their own, and on whether the text has long rope factors. A block filled
with committed tokens is therefore published under a digest of both, and shared by sequences that begin with the same
tokens and factors. A published block without users is kept until its memory is needed, least recently used first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from coppice.core.errors import OverloadedError
from coppice.core.prefix_digests import first_digest, longer_digest
from verifier_svc.engine.state_slots import StateMoves, StateSlots

IntArray = npt.NDArray[np.int64]
# bfloat16, which numpy lacks.
HalfArray = npt.NDArray[np.int16]

# Slots per block: as many keys as a compiled loop scores at once without idle lanes.
BLOCK_SIZE = 64


def slots_of(table: IntArray, positions: IntArray) -> IntArray:
    """Slots of positions in a sequence whose blocks are `table`."""
    slots: IntArray = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


def slot_list(table: IntArray, first: int, last: int) -> list[int]:
    """Slots of positions in [first, last); a list, since rounds have too few for arrays to pay."""
    slots: list[int] = []
    while first < last:
        block, offset = divmod(first, BLOCK_SIZE)
        count = min(BLOCK_SIZE - offset, last - first)
        start = int(table[block]) * BLOCK_SIZE + offset
        slots += range(start, start + count)
        first += count
    return slots


class KVCache:
    """Users of blocks, contents of published blocks, and rows to move before the next pass.

    Without `reuses_prefixes` nothing is published. `states` are those of recurrent layers, None without any.
    """

    def __init__(self, num_blocks: int, *, reuses_prefixes: bool = True, states: StateSlots | None = None) -> None:
        self.num_blocks = num_blocks
        self.reuses_prefixes = reuses_prefixes
        self.states = states
        self._num_users = [0] * num_blocks
        # Blocks without reusable content.
        self._empty = list(range(num_blocks - 1, -1, -1))
        # Published blocks without users, least recently used first.
        self._left: OrderedDict[int, None] = OrderedDict()
        self._published: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        # Slots; lists are faster than arrays for the few moves of a round.
        self._sources: list[int] = []
        self._destinations: list[int] = []
        # Whether moves were taken but not confirmed by `moves_made`.
        self.has_unmade_moves = False

    @property
    def num_free_blocks(self) -> int:
        """Blocks not used by any sequence."""
        return len(self._empty) + len(self._left)

    @property
    def num_open_blocks(self) -> int:
        """Free blocks for further sequences: none while there is no recurrent state for one."""
        return 0 if self.states is not None and self.states.num_free == 0 else self.num_free_blocks

    @property
    def num_reusable_blocks(self) -> int:
        """Free blocks with a reusable prefix."""
        return len(self._left)

    def take_block(self) -> int:
        """Allocate a free block.

        Raises:
            OverloadedError: no block is free.
        """
        if self._empty:
            block = self._empty.pop()
        elif self._left:
            block, _ = self._left.popitem(last=False)
            digest = self._digests.pop(block)
            del self._published[digest]
            if self.states is not None:
                self.states.forget(digest)
        else:
            raise OverloadedError("the KV cache is full")
        self._num_users[block] = 1
        return block

    def share_block(self, digest: bytes) -> int | None:
        """Use the block published under a digest, with its other users; None if there is none."""
        block = self._published.get(digest)
        if block is not None:
            self._left.pop(block, None)
            self._num_users[block] += 1
        return block

    def shareable(self, digests: Iterable[bytes]) -> list[bytes]:
        """Digests of a text's leading blocks that a sequence could share; with states, up to a border that has one."""
        found = list(itertools.takewhile(self._published.__contains__, digests))
        return found if self.states is None else found[: self.states.num_restorable(found)]

    def num_held(self, digests: Iterable[bytes]) -> int:
        """Number of shareable leading blocks of a text that have users: sharing these takes no free block."""
        return sum(self._num_users[self._published[digest]] > 0 for digest in self.shareable(digests))

    def publish_block(self, block: int, digest: bytes) -> None:
        """Share a full block; a second one with the same content stays private."""
        if self.reuses_prefixes and digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def return_blocks(self, blocks: Iterable[int]) -> None:
        """Remove a user from each of a sequence's blocks, given in token order."""
        # Reversed: later blocks are useless without earlier ones, so they are evicted first.
        for block in reversed(list(blocks)):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._digests:
                    self._left[block] = None
                else:
                    self._empty.append(block)

    def move(self, source: int, destination: int) -> None:
        """Copy a slot to another before the next pass; all are read before any is written."""
        self._sources.append(source)
        self._destinations.append(destination)

    def take_moves(self) -> tuple[IntArray, IntArray]:
        """Sources and destinations of moves since the last call; to be confirmed by `moves_made`."""
        moves = np.array(self._sources, np.int64), np.array(self._destinations, np.int64)
        self.has_unmade_moves |= len(self._sources) > 0
        self._sources, self._destinations = [], []
        return moves

    def take_state_moves(self) -> StateMoves | None:
        """Changes of recurrent states since the last call, if there are any states; to be confirmed likewise."""
        if self.states is None:
            return None
        moves = self.states.take_moves()
        self.has_unmade_moves |= len(moves.commits) + len(moves.copies) > 0
        return moves

    def moves_made(self) -> None:
        """Confirm that the moves taken last were made in all layers."""
        self.has_unmade_moves = False

    def forget(self) -> None:
        """Drop all contents and pending moves. No block may have users."""
        self._empty += self._left
        self._left.clear()
        self._published.clear()
        self._digests.clear()
        self._sources, self._destinations = [], []
        if self.states is not None:
            self.states.forget_all()
        self.has_unmade_moves = False


class SequenceCache:
    """One sequence's part of the cache, for at most `max_tokens` tokens and rows after them.

    Blocks are shared only among sequences of the same `salt` and rope factors: with `is_long`, keys have long ones, see
    rope_regimes.py.
    """

    def __init__(self, cache: KVCache, max_tokens: int, salt: str = "", *, is_long: bool = False) -> None:
        self._cache = cache
        self.is_long = is_long
        self._num_blocks = 0
        self._table = np.zeros(-(-max_tokens // BLOCK_SIZE), np.int64)
        # Number of shared or published blocks, and the digest of the tokens up to their end.
        self._num_published = 0
        self._digest = first_digest(salt, is_long=is_long)
        # Tokens with kept keys and values.
        self.length = 0
        # Slot of the recurrent states, -1 before the first rows; and slots for those at borders within the next pass.
        self.state = -1
        self._borders: dict[int, int] = {}

    @property
    def table(self) -> IntArray:
        """The sequence's blocks, in order [blocks]."""
        return self._table[: self._num_blocks]

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Share cached blocks of these tokens, except the last token; returns their number of tokens."""
        for digest in self._cache.shareable(self._digests_of(token_ids)):
            block = self._cache.share_block(digest)
            assert block is not None
            self._append(block)
            self._num_published, self._digest = self._num_blocks, digest
        self.length = self._num_blocks * BLOCK_SIZE
        if self._cache.states is not None and self.length:
            self._take_state()
            self._cache.states.restore(self._digest, self.state)
        return self.length

    def num_missing(self, rows: int) -> int:
        """Blocks that the next `rows` rows need and the sequence lacks."""
        return max(0, -(-(self.length + rows) // BLOCK_SIZE) - self._num_blocks)

    def room_behind(self, rows: int) -> int:
        """Rows after the next `rows` ones that need no further block."""
        return (self._num_blocks + self.num_missing(rows)) * BLOCK_SIZE - self.length - rows

    def reserve(self, rows: int) -> None:
        """Allocate blocks for the next `rows` rows.

        Raises:
            OverloadedError: no block is free.
        """
        self._take_state()
        while self._num_blocks * BLOCK_SIZE < self.length + rows:
            self._append(self._cache.take_block())

    def plan_borders(self, num_pending: int) -> tuple[tuple[int, int], ...]:
        """States that the next pass is to keep, as pairs of row and slot: at the last border within a prompt's part.

        `num_pending` are the rows of committed tokens.
        """
        if (states := self._cache.states) is None:
            return ()
        self._drop_borders()
        border = (self.length + num_pending) // BLOCK_SIZE * BLOCK_SIZE
        if not self._cache.reuses_prefixes or num_pending == 1 or border <= self.length:
            return ()
        if (slot := states.take_border()) is None:
            return ()
        self._borders[border] = slot
        return ((border - self.length - 1, slot),)

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass, in ascending path order; the others are dropped."""
        # Ascending, so the last is in place only if all are.
        if rows and rows[-1] != len(rows) - 1:
            for place, row in enumerate(rows):
                if row != place:
                    self._cache.move(self._slot(self.length + row), self._slot(self.length + place))
        if self._cache.states is not None:
            self._cache.states.commit(self.state, rows)
        self.length += len(rows)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publish blocks filled with committed tokens. `token_ids` are the sequence's, at least `length`."""
        while (self._num_published + 1) * BLOCK_SIZE <= self.length:
            self._digest = self._next_digest(token_ids)
            self._cache.publish_block(int(self._table[self._num_published]), self._digest)
            self._num_published += 1
            slot = self._borders.pop(self._num_published * BLOCK_SIZE, None)
            if slot is not None and self._cache.states is not None:
                self._cache.states.keep(self._digest, slot)

    def release(self) -> None:
        """Return all blocks; the sequence must not be used any more."""
        self._cache.return_blocks(self.table.tolist())
        self._drop_borders()
        if self._cache.states is not None and self.state >= 0:
            self._cache.states.give_back(self.state)
            self.state = -1
        self._num_blocks = 0
        self.length = 0

    def _take_state(self) -> None:
        if self._cache.states is not None and self.state < 0:
            self.state = self._cache.states.take()

    def _drop_borders(self) -> None:
        for slot in self._borders.values():
            assert self._cache.states is not None
            self._cache.states.drop(slot)
        self._borders.clear()

    def _slot(self, position: int) -> int:
        return slot_list(self._table, position, position + 1)[0]

    def _append(self, block: int) -> None:
        self._table[self._num_blocks] = block
        self._num_blocks += 1

    def _digests_of(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Digests of a text's blocks, without the last token's, for a cache without blocks."""
        digest = self._digest
        for end in range(BLOCK_SIZE, len(token_ids), BLOCK_SIZE):
            digest = longer_digest(digest, token_ids[end - BLOCK_SIZE : end])
            yield digest

    def _next_digest(self, token_ids: Sequence[int]) -> bytes:
        """Digest of the tokens up to the end of the first unpublished block."""
        start = self._num_published * BLOCK_SIZE
        return longer_digest(self._digest, token_ids[start : start + BLOCK_SIZE])
