"""The queue of sequences that wait for room in the KV cache."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter

from verifier_svc.engine.sequence import Sequence, SequenceKey

_rank = itemgetter(0)


class WaitingQueue:
    """Holds sequences in the order of their ranks.

    One that has started keeps its number of arrival when it comes back, so that it stands before all that came later.
    """

    def __init__(self) -> None:
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._order: list[tuple[tuple[int, int], SequenceKey]] = []

    def __len__(self) -> int:
        return len(self._order)

    def keys(self) -> list[SequenceKey]:
        """Keys of all sequences, the first in the queue first."""
        return [key for _, key in self._order]

    def find(self, key: SequenceKey) -> Sequence | None:
        """The sequence of a key."""
        return self._sequences.get(key)

    def first(self) -> tuple[SequenceKey, Sequence] | None:
        """The sequence that starts next; None when all still wait for their grammars, which holds nobody else up."""
        for _, key in self._order:
            if self._sequences[key].is_ready:
                return key, self._sequences[key]
        return None

    def put(self, key: SequenceKey, sequence: Sequence) -> None:
        """Queue a sequence behind all of lower rank."""
        insort(self._order, (sequence.rank, key), key=_rank)
        self._sequences[key] = sequence

    def take(self, key: SequenceKey) -> Sequence | None:
        """Take a sequence out; None for unknown keys."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            del self._order[bisect_left(self._order, sequence.rank, key=_rank)]
        return sequence
