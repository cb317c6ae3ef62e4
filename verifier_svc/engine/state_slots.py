"""Slots of recurrent states: one for each running sequence, and some for states at borders of published blocks.

A slot holds the states of all recurrent layers after a sequence's committed tokens. A pass never changes it: accepted
rows are committed before the next pass, from what the last one left, so that a rejected node leaves nothing. The states
themselves belong to the layers (`verifier_svc/layers/`).

A prefix of published blocks is of use only up to a border whose state is kept; the state is copied to the slot of a
sequence that begins there. Kept states are replaced least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Changes of slots before a pass: first commits, then copies.

    `commits` are rows of the last pass by slot, counted in the sequence's segment, in path order; `copies` are pairs of
    source and destination.
    """

    commits: dict[int, tuple[int, ...]]
    copies: tuple[tuple[int, int], ...]


class StateSlots:
    """Users of slots, and changes to be made before the next pass.

    The first `num_running` slots are those of sequences, `num_kept` further ones those of borders.
    """

    def __init__(self, num_running: int, num_kept: int) -> None:
        self.num_running = num_running
        self.num_kept = num_kept
        self._free = list(range(num_running - 1, -1, -1))
        self._free_kept = list(range(num_running + num_kept - 1, num_running - 1, -1))
        # By the digest of the text up to a border, least recently used first.
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._commits: dict[int, tuple[int, ...]] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Slots for further sequences."""
        return len(self._free)

    @property
    def num_borders(self) -> int:
        """Kept states."""
        return len(self._kept)

    def take(self) -> int:
        """Allocate a sequence's slot; its content counts from the first commit or copy on.

        Raises:
            OverloadedError: no slot is free.
        """
        if not self._free:
            raise OverloadedError("no further recurrent state fits")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a sequence's slot."""
        self._commits.pop(slot, None)
        self._copies = [(source, destination) for source, destination in self._copies if destination != slot]
        self._free.append(slot)

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Advance a slot over these rows of the last pass before the next one."""
        if slot in self._commits:
            raise RuntimeError("rows of one pass are committed twice")
        self._commits[slot] = tuple(rows)

    def num_restorable(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks up to the last border with a kept state."""
        return max((place for place, digest in enumerate(digests, 1) if digest in self._kept), default=0)

    def restore(self, digest: bytes, slot: int) -> None:
        """Copy the state kept for a text to a sequence's slot before the next pass."""
        self._kept.move_to_end(digest)
        self._copies.append((self._kept[digest], slot))

    def take_border(self) -> int | None:
        """A slot for a state that the next pass is to keep, to be given to `keep` or `drop`; None if there is none."""
        if self._free_kept:
            return self._free_kept.pop()
        return self._kept.popitem(last=False)[1] if self._kept else None

    def keep(self, digest: bytes, slot: int) -> None:
        """Keep a border's state for the text with this digest."""
        if digest in self._kept:
            self.drop(slot)
        else:
            self._kept[digest] = slot

    def drop(self, slot: int) -> None:
        """Free a border's slot."""
        self._free_kept.append(slot)

    def forget(self, digest: bytes) -> None:
        """Drop the state kept for a text, if any."""
        slot = self._kept.pop(digest, None)
        if slot is not None:
            self.drop(slot)

    def forget_all(self) -> None:
        """Drop all kept states and changes. No sequence may have a slot."""
        for digest in list(self._kept):
            self.forget(digest)
        self._commits, self._copies = {}, []

    def take_moves(self) -> StateMoves:
        """Changes since the last call."""
        moves = StateMoves(self._commits, tuple(self._copies))
        self._commits, self._copies = {}, []
        return moves
