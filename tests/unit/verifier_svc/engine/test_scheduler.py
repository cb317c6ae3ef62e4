"""The scheduler without a model: who starts, who makes room, who shares a pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import chain
from tests.unit.verifier_svc.tiny_engine import VOCAB, character_tokenizer
from verifier_svc.engine.draft_counts import DraftOrigin
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache
from verifier_svc.engine.pass_runner import PassPart
from verifier_svc.engine.pass_shares import PROMPT_SHARE, SHARED_ROWS, RowAllotment
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.engine.scheduler import MARGIN_TOKENS, Scheduler, SchedulerLimits
from verifier_svc.engine.sequence import Draft, Sequence, SequenceKey, SequenceSpec
from verifier_svc.model.target_model import TargetInfo

MAX_NODES = 16
INFO = TargetInfo("toy", character_tokenizer(), "", VOCAB, 8, 2000, (), exact=True)
TOKENIZER = TargetTokenizer(INFO.tokenizer_json)
# A sequence of one token asks for one block: itself, the margin behind it, and a tree, as far as its output goes.
SHORT = BLOCK_SIZE - MAX_NODES - 1


class Bench:
    """A scheduler whose target always says token 0."""

    def __init__(self, num_blocks: int, **limits: int) -> None:
        self.cache = KVCache(num_blocks)
        defaults = {"max_sequences": 16, "max_queued": 100, "prefill_chunk": 32}
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**{**defaults, **limits}))
        self.now_s = 0.0
        self.last_batch: list[RowAllotment] = []

    def add(
        self,
        name: int,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        linger_s: float = 0.0,
        traverses: bool = False,
    ) -> Sequence:
        stopping = StoppingOptions(max_tokens=max_tokens, ignore_eos=True)
        sampling = SamplingParams(temperature=1.0 if traverses else 0.0)
        spec = SequenceSpec(
            tuple(prompt), sampling, stopping, linger_s=linger_s, priority=priority, traverses=traverses
        )
        sequence = Sequence(spec, INFO, TOKENIZER, max_nodes=MAX_NODES, opened_s=self.now_s)
        assert self.scheduler.can_ever_run(sequence)
        self.scheduler.add(SequenceKey(0, name), sequence)
        return sequence

    def admit(self) -> set[int]:
        """Start what has room; returns who runs."""
        self.scheduler.admit(self.now_s)
        return self.running

    def turn(self) -> dict[int, RoundOutcome]:
        """Start what has room, run a pass, remove who has finished."""
        self.admit()
        self.now_s += 1.0
        self.last_batch = self.scheduler.next_batch(self.now_s)
        outcomes: dict[int, RoundOutcome] = {}
        for share in self.last_batch:
            rows = share.sequence.next_rows(share.num_pending, share.max_nodes)
            assert len(rows) <= share.num_pending + share.max_nodes
            rows.cache.reserve(len(rows))
        for share in self.last_batch:
            logits = np.zeros((1 + share.max_nodes, VOCAB), np.float32)
            outcome = share.sequence.finish_round(PassPart(logits), self.now_s, 0.0)
            if outcome is not None:
                outcomes[share.key.sequence_id] = outcome
                if outcome.finish is not None:
                    self.scheduler.remove(share.key)
        return outcomes

    @property
    def running(self) -> set[int]:
        return {key.sequence_id for key in self.scheduler._running}

    @property
    def waiting(self) -> list[int]:
        return [key.sequence_id for key in self.scheduler._waiting.keys()]  # noqa: SIM118 not a dictionary


def turns_until(bench: Bench, holds: Callable[[], bool], most: int = 5000) -> int:
    for turn in range(most):
        if holds():
            return turn
        bench.turn()
    raise AssertionError("it never came to hold")


def test_higher_priorities_start_first_and_within_one_who_came_first() -> None:
    bench = Bench(num_blocks=8, max_sequences=1)
    for name, priority in enumerate([0, 0, 5, -1, 5, 0]):
        bench.add(name, [7], 1, priority=priority)
    order = []
    while bench.scheduler.all_keys():
        order += bench.turn()
    assert order == [2, 4, 0, 1, 5, 3]


def test_nobody_overtakes_a_sequence_that_finds_no_room() -> None:
    bench = Bench(num_blocks=4)
    bench.add(0, [7] * (2 * BLOCK_SIZE), 10)
    bench.add(1, [8] * (2 * BLOCK_SIZE), 10)
    bench.add(2, [9], 10)
    assert bench.admit() == {0}
    assert bench.waiting == [1, 2]


def test_a_sequence_starts_with_room_for_what_it_has_and_a_margin() -> None:
    # Four blocks would be reserved for each longest output; a prompt, the margin and a tree take two.
    bench = Bench(num_blocks=8)
    for name in range(6):
        assert bench.add(name, [name], 4 * BLOCK_SIZE - MAX_NODES - 1).residence.num_blocks_needed == 4
    assert bench.admit() == {0, 1, 2, 3}
    short = Bench(num_blocks=8)
    for name in range(12):
        short.add(name, [name], SHORT)
    assert short.admit() == set(range(8))


def test_a_beginning_that_others_use_takes_no_room_and_one_that_nobody_uses_is_free() -> None:
    common = [11] * (3 * BLOCK_SIZE)
    bench = Bench(num_blocks=9)
    bench.add(0, [*common, 1], SHORT)
    turns_until(bench, lambda: not bench.scheduler.all_keys())
    assert bench.cache.num_free_blocks == 9
    for name in range(1, 9):
        bench.add(name, [*common, name], SHORT)
    # Three blocks in common and one for each.
    assert bench.admit() == set(range(1, 7))
    assert bench.cache.num_free_blocks == 0


def test_the_queue_is_bounded_for_new_sequences_and_not_for_preempted_ones() -> None:
    bench = Bench(num_blocks=8, max_queued=2)
    for name in range(2):
        assert bench.scheduler.has_room_to_wait()
        bench.add(name, [name], 200)
    assert not bench.scheduler.has_room_to_wait()
    assert bench.admit() == {0, 1}
    for name in range(2, 4):
        assert bench.scheduler.has_room_to_wait()
        bench.add(name, [name], 200)
    bench.scheduler._preempt_last()
    assert bench.waiting == [1, 2, 3]
    assert bench.scheduler.num_waiting == 3
    assert not bench.scheduler.has_room_to_wait()


def test_the_last_of_the_lowest_priority_makes_room_and_returns_before_all_that_came_later() -> None:
    bench = Bench(num_blocks=40)
    for name, priority in enumerate([0, 1, 0, 1, -1, -1]):
        bench.add(name, [name], 300, priority=priority)
    assert bench.admit() == set(range(6))
    for name, priority in ((6, 0), (7, -1), (8, 1)):
        bench.add(name, [name], 300, priority=priority)
    victims = [bench.scheduler._preempt_last().sequence_id for _ in range(5)]
    assert victims == [5, 4, 2, 0, 3]
    assert bench.waiting == [3, 8, 0, 2, 6, 4, 5, 7]
    assert bench.running == {1}
    assert bench.scheduler.num_preemptions == 5


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    bench = Bench(num_blocks=20, prefill_chunk=50)
    sequence = bench.add(0, [5] * 100, 90)
    assert turns_until(bench, lambda: len(sequence.tokens) == 120) == 21
    cached, started_s = sequence.num_cached, sequence.started_s
    sequence.submit(Draft(121, chain([0, 0])))
    bench.scheduler._preempt_last()
    assert bench.cache.num_free_blocks == 20
    sequence.submit(Draft(120, chain([0, 0, 1])))
    # One of the two blocks was published; the rest is computed again, in chunks.
    assert bench.turn() == {}
    outcome = bench.turn()[0]
    assert (outcome.base_length, outcome.token_ids, outcome.accepted_nodes) == (120, (0, 0, 0), (0, 1))
    assert bench.turn()[0].token_ids == (0,)
    bench.scheduler._preempt_last()
    assert bench.scheduler.num_recomputed_tokens == 119 - BLOCK_SIZE
    turns_until(bench, lambda: not bench.scheduler.all_keys())
    assert len(sequence.tokens) == 190
    assert (sequence.num_cached, sequence.started_s) == (cached, started_s)
    assert sequence.residence.num_preemptions == bench.scheduler.num_preemptions == 2
    # The second time, 123 tokens were there: two blocks less five places.
    assert bench.scheduler.num_recomputed_tokens == 119 - BLOCK_SIZE + 123 - BLOCK_SIZE


def test_a_preempted_sequence_asks_for_a_wider_margin() -> None:
    bench = Bench(num_blocks=5)
    first, second = (bench.add(name, [name], 4 * BLOCK_SIZE - MAX_NODES - 1) for name in range(2))
    assert bench.admit() == {0, 1}
    bench.scheduler._preempt_last()
    # Two blocks for each were enough at first; now it is three, and the first has to end before.
    assert bench.admit() == {0}
    turns_until(bench, lambda: len(second.tokens) > 1)
    assert len(first.tokens) == 4 * BLOCK_SIZE - MAX_NODES


def test_a_round_after_a_preemption_does_not_linger() -> None:
    bench = Bench(num_blocks=20, prefill_chunk=500)
    sequence = bench.add(0, [5] * (2 * BLOCK_SIZE), 90, linger_s=30.0)
    bench.turn()
    assert sequence.may_linger
    bench.scheduler._preempt_last()
    bench.admit()
    # All but the last token is there already, as in a round; but its drafts have had their time.
    assert sequence.num_pending == 1
    assert not sequence.may_linger
    assert bench.scheduler.next_start_s() == bench.now_s
    assert len(bench.turn()[0].token_ids) == 1
    assert sequence.may_linger


def test_trees_shrink_before_anybody_makes_room() -> None:
    bench = Bench(num_blocks=2)
    first = bench.add(0, [5], BLOCK_SIZE + 30)
    turns_until(bench, lambda: len(first.tokens) == BLOCK_SIZE - 8)
    second = bench.add(1, [6], SHORT)
    bench.scheduler._running[SequenceKey(0, 1)] = bench.scheduler._waiting.take(SequenceKey(0, 1))  # type: ignore[assignment]
    second.start(bench.cache, bench.now_s)
    assert bench.cache.num_free_blocks == 0
    first.submit(Draft(len(first.tokens), chain([0] * 12)))
    second.submit(Draft(len(second.tokens), chain([0] * 12)))
    limit_s = first.linger.limit_s
    outcomes = bench.turn()
    assert outcomes[0].draft_nodes == 8
    assert outcomes[1].draft_nodes == 12
    # What was cut off serves the next round; but it needs a block now, which only the other has.
    assert first.mailbox.tree is not None
    assert (first.linger.limit_s, first.linger.wait_s()) == (limit_s, limit_s)
    assert bench.scheduler.num_preemptions == 0
    bench.turn()
    assert bench.scheduler.num_preemptions == 1
    assert bench.running == {0}


def test_a_tree_without_room_is_no_vain_wait() -> None:
    bench = Bench(num_blocks=2)
    sequence = bench.add(0, [5] * BLOCK_SIZE, 10, linger_s=1.0)
    turns_until(bench, lambda: len(sequence.tokens) == BLOCK_SIZE + 1)
    for _ in range(4):
        sequence.submit(Draft(len(sequence.tokens), chain([0, 0])))
        sequence.next_rows(1, 0).cache.reserve(1)
        outcome = sequence.finish_round(PassPart(np.zeros((1, VOCAB), np.float32)), bench.now_s, 0.0)
        assert outcome is not None
        assert outcome.draft_nodes == 0
        assert sequence.linger.wait_s() == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_everyone_ends_and_the_first_in_rank_never_makes_room(seed: int) -> None:
    """Nobody makes room either before someone has used up the margin of the last start, so that no work is in vain."""
    generator = np.random.default_rng(seed)
    bench = Bench(num_blocks=int(generator.integers(12, 18)), max_rows=int(generator.choice([0, 24])))
    sequences = [
        bench.add(
            name,
            [int(generator.integers(3)) + 1] * int(generator.integers(1, 150)),
            int(generator.integers(1, 600)),
            priority=int(generator.integers(3)),
        )
        for name in range(25)
    ]
    at_start: dict[int, int] = {}
    turns = preemptions = 0
    while bench.scheduler.all_keys():
        before = bench.running
        if bench.admit() != before:
            at_start = {name: len(sequences[name].tokens) for name in bench.running}
        first = min(bench.running, key=lambda name: sequences[name].rank)
        lengths = {name: len(sequences[name].tokens) for name in bench.running}
        for name in bench.running:
            if generator.random() < 0.3:
                sequences[name].submit(Draft(lengths[name], chain([0] * int(generator.integers(1, 20)))))
        bench.turn()
        if bench.scheduler.num_preemptions > preemptions:
            preemptions = bench.scheduler.num_preemptions
            assert max(lengths[name] - at_start[name] for name in at_start if name in lengths) >= MARGIN_TOKENS
        assert first not in bench.waiting
        turns += 1
        assert turns < 10_000, "no progress"
    assert [sequence.verifier.room for sequence in sequences] == [0] * 25
    assert preemptions > 0
    assert bench.scheduler.num_recomputed_tokens > 0
    assert bench.cache.num_free_blocks == bench.cache.num_blocks


def test_without_a_limit_a_pass_takes_every_round_and_one_chunk_of_prompts() -> None:
    bench = Bench(num_blocks=100, prefill_chunk=32)
    drafted = [bench.add(name, [name], 50) for name in range(4)]
    bench.turn()

    def shares() -> dict[int, tuple[int, int]]:
        for sequence in drafted:
            sequence.submit(Draft(len(sequence.tokens), chain([0] * MAX_NODES)))
        bench.turn()
        return {share.key.sequence_id: (share.num_pending, share.max_nodes) for share in bench.last_batch}

    assert shares() == dict.fromkeys(range(4), (1, MAX_NODES))
    for name in (5, 6, 7):
        bench.add(name, [name] * 20, 50)
    # Of the rows that prompts and trees share, the three prompts want 60, though only 32 in this pass.
    assert SHARED_ROWS == 64
    assert shares() == {**dict.fromkeys(range(4), (1, 1)), 5: (20, 0), 6: (12, 0)}
    # 28 tokens wait now, and two rounds more want a tree.
    assert sum(nodes for _, nodes in shares().values()) == 64 - 28
    assert shares()[0] == (1, MAX_NODES)


def test_a_row_limit_takes_rounds_first_then_prompts_then_even_trees() -> None:
    bench = Bench(num_blocks=100, prefill_chunk=32, max_rows=40)
    sizes = {0: 2, 1: 16, 2: 16}
    sequences = {name: bench.add(name, [name], 50) for name in sizes}
    bench.turn()

    def shares() -> dict[int, tuple[int, int]]:
        for name, size in sizes.items():
            sequences[name].submit(Draft(len(sequences[name].tokens), chain([1] * size)))
        bench.turn()
        return {share.key.sequence_id: (share.num_pending, share.max_nodes) for share in bench.last_batch}

    assert shares() == {0: (1, 2), 1: (1, 16), 2: (1, 16)}
    bench.add(3, [3] * 5, 50)
    # Of 40 rows, 5 are the prompt's and 3 the rounds' own: 32 nodes are left for 34.
    assert shares() == {0: (1, 2), 1: (1, 15), 2: (1, 15), 3: (5, 0)}
    bench.add(4, [4] * 33, 50)
    # A prompt comes before trees, up to a chunk.
    assert shares() == {0: (1, 2), 1: (1, 1), 2: (1, 1), 3: (1, 0), 4: (32, 0)}


def test_with_fewer_rows_than_sequences_everyone_has_a_turn() -> None:
    bench = Bench(num_blocks=100, max_rows=4)
    short = [bench.add(name, [name], 100) for name in range(10)]
    turns_until(bench, lambda: all(len(sequence.tokens) > 1 for sequence in short))
    long = bench.add(10, [1] * 60, 40)
    rounds = dict.fromkeys(range(10), 0)
    for _ in range(30):
        for name in bench.turn():
            rounds[name] += 1
        assert sum(share.num_pending + share.max_nodes for share in bench.last_batch) == 4
    # Three rows for ten rounds, one for the prompt.
    assert set(rounds.values()) == {9}
    assert long.num_pending == 60 - 30 * 4 // PROMPT_SHARE


@pytest.mark.parametrize("seed", range(3))
def test_no_pass_has_more_rows_than_the_limit(seed: int) -> None:
    generator = np.random.default_rng(seed)
    max_rows = int(generator.integers(4, 30))
    bench = Bench(num_blocks=24, max_rows=max_rows)
    full = 0
    for turn in range(300):
        if generator.random() < 0.5:
            prompt = [int(generator.integers(5))] * int(generator.integers(1, 100))
            bench.add(turn, prompt, int(generator.integers(1, 60)))
        for key in bench.scheduler.all_keys():
            sequence = bench.scheduler.find(key)
            assert sequence is not None
            sequence.submit(Draft(len(sequence.tokens), chain([0] * int(generator.integers(1, 20)))))
        bench.turn()
        rows = sum(share.num_pending + share.max_nodes for share in bench.last_batch)
        assert rows <= max_rows
        full += rows == max_rows
    assert full > 50


def test_what_was_drafted_ahead_counts_as_that_only_if_it_came_before_its_own_rounds_outcome() -> None:
    bench = Bench(num_blocks=40)
    in_time, late = bench.add(0, [1, 2, 3], 50), bench.add(1, [1, 2, 3], 50)
    bench.turn()
    base = len(in_time.tokens)
    bench.turn()
    # Between the outcomes at 1.0 and at 2.0; put there behind the latter, since a pass ran.
    in_time.submit(Draft(base, chain([0, 0, 0]), is_ahead=True), came_s=1.5)
    assert in_time.mailbox.origin is DraftOrigin.AHEAD
    bench.turn()
    late.submit(Draft(base, chain([0] * 4), is_ahead=True), came_s=2.5)
    assert late.mailbox.origin is DraftOrigin.REROOTED
