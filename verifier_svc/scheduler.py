"""Continuous batching: which sequences take part in the next pass, and when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from verifier_svc.kv_cache import KVCache
from verifier_svc.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """A sequence's name: its stream, and its id there."""

    stream: int
    sequence_id: int


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much may run at once."""

    max_sequences: int
    max_queued: int
    prefill_chunk: int


class Scheduler:
    """Holds the waiting and the running sequences. Only the engine's thread touches it.

    A sequence runs once the blocks for its longest output are free, so that a running sequence never lacks one.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: dict[SequenceKey, Sequence] = {}
        self._running: dict[SequenceKey, Sequence] = {}
        self._reserved: dict[SequenceKey, int] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._waiting)

    def all_keys(self) -> list[SequenceKey]:
        """Keys of all waiting and running sequences."""
        return [*self._waiting, *self._running]

    def find(self, key: SequenceKey) -> Sequence | None:
        """The waiting or running sequence of a key."""
        return self._running.get(key) or self._waiting.get(key)

    def can_ever_run(self, sequence: Sequence) -> bool:
        """Whether the whole cache would be enough for it."""
        return sequence.num_blocks_needed <= self._cache.num_blocks

    def has_room_to_wait(self) -> bool:
        """Whether the queue takes another sequence."""
        return len(self._waiting) < self._limits.max_queued

    def add(self, key: SequenceKey, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting[key] = sequence

    def remove(self, key: SequenceKey) -> None:
        """Forget a sequence and free what it holds; unknown keys are fine."""
        sequence = self._running.pop(key, None) or self._waiting.pop(key, None)
        self._reserved.pop(key, None)
        if sequence is not None:
            sequence.release()

    def admit(self, now_s: float) -> None:
        """Start waiting sequences while there is room: by priority, then in order of arrival.

        Those that are not ready hold nobody up.
        """
        for key in sorted(self._waiting, key=lambda key: -self._waiting[key].priority):
            sequence = self._waiting[key]
            if not sequence.is_ready:
                continue
            needed = sequence.num_blocks_needed
            fits = sum(self._reserved.values()) + needed <= self._cache.num_blocks
            if len(self._running) >= self._limits.max_sequences or not fits:
                return
            del self._waiting[key]
            self._running[key] = sequence
            self._reserved[key] = needed
            sequence.start(self._cache, now_s)

    def next_start_s(self) -> float | None:
        """When the next pass starts: at once (0) when every running sequence has its draft, else at a deadline.

        A sequence that has its draft waits for the others, too, but never beyond its own linger. None when
        nothing runs.
        """
        if not self._running:
            return None
        if all(sequence.has_draft for sequence in self._running.values()):
            return 0.0
        return min(sequence.deadline_s for sequence in self._running.values())

    def next_batch(self, now_s: float) -> list[tuple[SequenceKey, Sequence, int]]:
        """The sequences of a pass that starts now, with the prompt tokens that each may bring.

        Sequences that still wait for a draft stay out. All prompts together bring at most one chunk, so that a long
        prompt delays the others by one chunk at a time; who waited longest is served first.
        """
        chunk = self._limits.prefill_chunk
        batch: list[tuple[SequenceKey, Sequence, int]] = []
        for key, sequence in sorted(self._running.items(), key=lambda item: item[1].last_outcome_s):
            if not (sequence.has_draft or sequence.deadline_s <= now_s):
                continue
            if not sequence.is_prefilling:
                batch.append((key, sequence, self._limits.prefill_chunk))
            elif chunk > 0:
                batch.append((key, sequence, chunk))
                chunk -= min(chunk, sequence.num_pending)
        return batch
