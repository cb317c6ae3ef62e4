"""Continuous batching: sequences of the next pass, its start, and preemption."""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from coppice.obs.logs import of_request
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache
from verifier_svc.engine.pass_cost import PassCost
from verifier_svc.engine.pass_shares import RowAllotment, cut_trees, deal_masks, share_rows
from verifier_svc.engine.sequence import Sequence, SequenceKey

logger = logging.getLogger(__name__)

# A sequence starts if it and all running ones could commit this many tokens before one lacks a block.
MARGIN_TOKENS = BLOCK_SIZE
# Upper bound of doublings of a sequence's margin by preemptions; more exceeds any output.
_MAX_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of concurrency; `max_rows` is per pass, and 0 sets no limit.

    `free_rows`: masks are computed only in passes of at most this many rows, masks included; 0 without masks.
    """

    max_sequences: int
    max_queued: int
    prefill_chunk: int
    max_rows: int = 0
    free_rows: int = 0


_rank = itemgetter(0)


class WaitingQueue:
    """Waiting sequences by rank.

    A preempted sequence keeps its arrival number, so that it precedes later ones.
    """

    def __init__(self) -> None:
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._order: list[tuple[tuple[int, int], SequenceKey]] = []

    def __len__(self) -> int:
        return len(self._order)

    def keys(self) -> list[SequenceKey]:
        """Keys of all sequences in queue order."""
        return [key for _, key in self._order]

    def find(self, key: SequenceKey) -> Sequence | None:
        """The sequence of a key."""
        return self._sequences.get(key)

    def first(self) -> tuple[SequenceKey, Sequence] | None:
        """Next sequence to start, skipping those that wait for grammars; None if there is none."""
        for _, key in self._order:
            if self._sequences[key].is_ready:
                return key, self._sequences[key]
        return None

    def put(self, key: SequenceKey, sequence: Sequence) -> None:
        """Insert a sequence by rank."""
        insort(self._order, (sequence.rank, key), key=_rank)
        self._sequences[key] = sequence

    def take(self, key: SequenceKey) -> Sequence | None:
        """Remove a sequence; None for unknown keys."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            del self._order[bisect_left(self._order, sequence.rank, key=_rank)]
        return sequence


class Scheduler:
    """Waiting and running sequences. For the engine's thread only.

    A sequence starts if there is room for its tokens and a margin. If running ones lack blocks, the last in rank is
    preempted: it returns its blocks and waits, before later arrivals, to recompute them. The first in rank is never
    preempted, and alone it always has room, so every sequence finishes in turn.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting = WaitingQueue()
        self._running: dict[SequenceKey, Sequence] = {}
        self._arrivals = itertools.count()
        self._cost = PassCost()
        # End of the last pass, and time from which the next could have run.
        self._ended_s = self._free_s = 0.0
        self.num_preemptions = 0
        # Tokens recomputed after preemptions and restarts, of released sequences.
        self.num_recomputed_tokens = 0
        # Tokens of sequences at their first start, and those found in the prefix cache.
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for room."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the running batch."""
        return len(self._running)

    def all_keys(self) -> list[SequenceKey]:
        """Keys of all waiting and running sequences."""
        return [*self._waiting.keys(), *self._running]

    def running_keys(self) -> list[SequenceKey]:
        """Keys of the running sequences."""
        return [*self._running]

    def find(self, key: SequenceKey) -> Sequence | None:
        """The waiting or running sequence of a key."""
        return self._running.get(key) or self._waiting.find(key)

    def can_ever_run(self, sequence: Sequence) -> bool:
        """Whether the whole cache would suffice for it."""
        return sequence.residence.num_blocks_needed <= self._cache.num_blocks

    def has_room_to_wait(self) -> bool:
        """Whether the queue has room for another sequence; preempted ones count."""
        return len(self._waiting) < self._limits.max_queued

    def add(self, key: SequenceKey, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.arrival = next(self._arrivals)
        self._waiting.put(key, sequence)

    def remove(self, key: SequenceKey) -> None:
        """Remove a sequence and free its blocks; a no-op for unknown keys."""
        sequence = self._running.pop(key, None) or self._waiting.take(key)
        if sequence is None:
            return
        residence = sequence.residence
        self.num_recomputed_tokens += residence.release()
        if residence.num_preemptions:
            logger.info(
                "sequence %d of stream %d was preempted %d times and computed %d tokens again",
                key.sequence_id,
                key.stream,
                residence.num_preemptions,
                residence.num_recomputed,
                extra=of_request(sequence.request_id),
            )

    def admit(self, now_s: float) -> None:
        """Start waiting sequences while there is room: by priority, then by arrival.

        Those that wait for grammars are skipped.
        """
        while len(self._running) < self._limits.max_sequences and (first := self._waiting.first()) is not None:
            key, sequence = first
            if not self._has_room_for(sequence):
                return
            self._waiting.take(key)
            self._running[key] = sequence
            sequence.start(self._cache, now_s)
            if sequence.residence.num_starts == 1:
                self.num_prompt_tokens += len(sequence.tokens)
                self.num_cached_tokens += sequence.num_cached

    def restart(self, key: SequenceKey) -> None:
        """Queue a running sequence to recompute its keys and values when there is room for it.

        Not a preemption: no other sequence needed the blocks, and the margin of its next start stays.
        """
        sequence = self._running.pop(key)
        self.num_recomputed_tokens += sequence.residence.release()
        self._waiting.put(key, sequence)

    def next_start_s(self) -> float | None:
        """Start of the next pass: at once (0) if every running sequence has its draft, else a deadline.

        A sequence with a draft waits for others too, but at most for its own linger. None if nothing is running.
        """
        if not self._running:
            return None
        if all(sequence.has_draft for sequence in self._running.values()):
            return 0.0
        return min(sequence.deadline_s for sequence in self._running.values())

    def next_batch(self, now_s: float) -> list[RowAllotment]:
        """Shares of the sequences of a pass that starts now, longest-waiting first.

        Sequences still waiting for a draft are left out. Empty if all ready ones were preempted for these.
        """
        waited = sorted(self._running.items(), key=lambda item: item[1].last_outcome_s)
        self._free_s = max(self._ended_s, waited[0][1].last_outcome_s if waited else now_s)
        ready = [item for item in waited if item[1].has_draft or item[1].deadline_s <= now_s]
        shares = share_rows(
            ready,
            prefill_chunk=self._limits.prefill_chunk,
            max_rows=self._limits.max_rows,
            own_rows=self._cost.own_rows,
        )
        if len(shares) < len(ready):
            self._take_turns(share for share in shares if not share.sequence.is_prefilling)
        sampled = [share for share in shares if share.sequence.traverses]
        if not all(share.max_nodes for share in sampled):
            self._take_turns(share for share in sampled if share.max_nodes)
        return self._with_masks(shares if self._have_room(shares) else self._make_room(shares))

    def pass_over(self, shares: list[RowAllotment], num_rows: int, now_s: float) -> None:
        """Learn from the duration of a pass over these shares, during which lingering sequences waited.

        A single sequence's pass is ignored, since it shares rows with no other.
        """
        if len(shares) > 1:
            self._cost.add(num_rows, now_s - self._free_s)
        self._ended_s = now_s

    def _with_masks(self, shares: list[RowAllotment]) -> list[RowAllotment]:
        """Shares with masks, if no sequence waits and none would have to be preempted."""
        if not self._limits.free_rows or self._waiting.first() is not None:
            return shares
        dealt = deal_masks(
            shares,
            free_rows=self._limits.free_rows,
            own_rows=self._cost.own_rows,
            max_rows=self._limits.max_rows,
        )
        return dealt if self._have_room(dealt) else shares

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether a sequence may start.

        The margin doubles with its preemptions, up to the longest outputs of all, so that no sequence is repeatedly
        preempted before recomputed tokens are of use.
        """
        if self._cache.states is not None and not self._cache.states.num_free:
            return False
        margin = MARGIN_TOKENS << min(sequence.residence.num_preemptions, _MAX_DOUBLINGS)
        promised = sum(running.residence.num_blocks_lacking(margin) for running in self._running.values())
        missing = sequence.residence.num_blocks_lacking(margin) + promised - self._cache.num_free_blocks
        return missing <= 0 or missing <= sequence.residence.num_blocks_held(self._cache)

    def _take_turns(self, served: Iterable[RowAllotment]) -> None:
        """Move served sequences to the end: their rounds end together, so the order would not change otherwise."""
        for share in served:
            self._running[share.key] = self._running.pop(share.key)

    def _have_room(self, shares: list[RowAllotment]) -> bool:
        return sum(share.num_missing_blocks for share in shares) <= self._cache.num_free_blocks

    def _make_room(self, shares: list[RowAllotment]) -> list[RowAllotment]:
        """Shares that fit the free blocks: first with smaller trees, then with sequences preempted."""
        shares = cut_trees(shares, self._cache.num_free_blocks)
        while not self._have_room(shares):
            victim = self._preempt_last()
            shares = [share for share in shares if share.key != victim]
        return shares

    def _preempt_last(self) -> SequenceKey:
        key = max(self._running, key=lambda key: self._running[key].rank)
        sequence = self._running.pop(key)
        self.num_preemptions += 1
        self.num_recomputed_tokens += sequence.residence.preempt()
        self._waiting.put(key, sequence)
        return key
