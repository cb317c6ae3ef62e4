"""Continuous batching: which sequences take part in the next pass, when it starts, and who makes room for whom."""

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

# A sequence starts when it and all that run could commit this many tokens more before one of them lacks a block.
MARGIN_TOKENS = BLOCK_SIZE
# Each preemption doubles the margin of a sequence's next start, this often: more is beyond any output.
_MAX_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much may run at once; `max_rows` is per pass, and 0 sets no limit.

    `free_rows`: masks are computed while a pass has no more rows than this with them; 0 where there are none.
    """

    max_sequences: int
    max_queued: int
    prefill_chunk: int
    max_rows: int = 0
    free_rows: int = 0


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


class Scheduler:
    """Holds the waiting and the running sequences. Only the engine's thread touches it.

    A sequence starts when there is room for what it has and a margin. When running ones come to lack blocks, the last
    of them in rank is preempted: it gives its blocks back and waits, before all that came later, to compute them again.
    The first in rank is never preempted, and alone it always has room: so every sequence ends in its turn.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting = WaitingQueue()
        self._running: dict[SequenceKey, Sequence] = {}
        self._arrivals = itertools.count()
        self._cost = PassCost()
        # When the last pass ended, and from when on the next could have run.
        self._ended_s = self._free_s = 0.0
        self.num_preemptions = 0
        # Tokens that ended stays in the cache had to compute another time, after preemptions and restarts.
        self.num_recomputed_tokens = 0
        # Tokens that sequences had when they first started, and those of them that others had computed.
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that take part in passes."""
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
        """Whether the whole cache would be enough for it."""
        return sequence.residence.num_blocks_needed <= self._cache.num_blocks

    def has_room_to_wait(self) -> bool:
        """Whether the queue takes another sequence; those that were preempted count."""
        return len(self._waiting) < self._limits.max_queued

    def add(self, key: SequenceKey, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.arrival = next(self._arrivals)
        self._waiting.put(key, sequence)

    def remove(self, key: SequenceKey) -> None:
        """Forget a sequence and free what it holds; unknown keys are fine."""
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
        """Start waiting sequences while there is room: by priority, then in order of arrival.

        Those that are not ready hold nobody up.
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
        """Have a running sequence compute all its keys and values again, when there is room for it in its turn.

        It is no preemption: nobody else needed the blocks, and the sequence's next start asks for no wider margin.
        """
        sequence = self._running.pop(key)
        self.num_recomputed_tokens += sequence.residence.release()
        self._waiting.put(key, sequence)

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

    def next_batch(self, now_s: float) -> list[RowAllotment]:
        """What every sequence of a pass that starts now brings to it; who waited longest is served first.

        Sequences that still wait for a draft stay out. Empty when those that are ready had to make room for these.
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
        """Learn from how long a pass over these shares took, and those who wait for drafts held it up.

        From one sequence's alone nothing is learned, since it shares with nobody.
        """
        if len(shares) > 1:
            self._cost.add(num_rows, now_s - self._free_s)
        self._ended_s = now_s

    def _with_masks(self, shares: list[RowAllotment]) -> list[RowAllotment]:
        """The shares with masks, where nobody waits and nobody would have to make room for these."""
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

        One that was preempted asks for more each time, for all; in the end for everyone's longest output. So nobody
        keeps on computing tokens again only to be preempted before they are of use.
        """
        margin = MARGIN_TOKENS << min(sequence.residence.num_preemptions, _MAX_DOUBLINGS)
        promised = sum(running.residence.num_blocks_lacking(margin) for running in self._running.values())
        missing = sequence.residence.num_blocks_lacking(margin) + promised - self._cache.num_free_blocks
        return missing <= 0 or missing <= sequence.residence.num_blocks_held(self._cache)

    def _take_turns(self, served: Iterable[RowAllotment]) -> None:
        """Put those that were served behind all others: their rounds end together, and their order would else stay."""
        for share in served:
            self._running[share.key] = self._running.pop(share.key)

    def _have_room(self, shares: list[RowAllotment]) -> bool:
        return sum(share.num_missing_blocks for share in shares) <= self._cache.num_free_blocks

    def _make_room(self, shares: list[RowAllotment]) -> list[RowAllotment]:
        """Shares that the free blocks are enough for: with smaller trees, and then without whom it takes."""
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
