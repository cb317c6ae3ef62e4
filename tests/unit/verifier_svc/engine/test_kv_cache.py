"""Blocks: who uses them, who may use them again, and what moves."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.core.errors import OverloadedError
from coppice.core.prefix_digests import prefix_digests
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache

TEXT = list(range(10 * BLOCK_SIZE))


def read(cache: KVCache, token_ids: list[int], salt: str = "") -> SequenceCache:
    """A sequence that has read these tokens."""
    sequence = SequenceCache(cache, len(token_ids) + BLOCK_SIZE, salt)
    sequence.adopt(token_ids)
    rows = len(token_ids) - sequence.length
    sequence.reserve(rows)
    sequence.keep(range(rows))
    sequence.publish(token_ids)
    return sequence


def test_kept_rows_move_together_behind_the_committed_ones() -> None:
    cache = KVCache(num_blocks=3)
    other, sequence = SequenceCache(cache, max_tokens=BLOCK_SIZE), SequenceCache(cache, max_tokens=2 * BLOCK_SIZE)
    sequence.reserve(BLOCK_SIZE - 2)
    sequence.keep(range(BLOCK_SIZE - 2))
    other.reserve(1)
    sequence.reserve(6)
    sequence.keep([0, 2, 5])
    first, second = (int(block) * BLOCK_SIZE for block in sequence.table)
    # Rows 2 and 5 go behind row 0; the first of them to the end of the first block.
    sources, destinations = cache.take_moves()
    assert sources.tolist() == [second, second + 3]
    assert destinations.tolist() == [first + BLOCK_SIZE - 1, second]
    assert sequence.length == BLOCK_SIZE + 1
    assert cache.take_moves()[0].tolist() == []
    sequence.release()
    other.release()
    assert cache.num_free_blocks == 3


def test_moves_are_unmade_from_when_they_are_taken_until_somebody_says_so() -> None:
    cache = KVCache(4)
    cache.take_moves()
    assert not cache.has_unmade_moves
    cache.move(3, 1)
    assert not cache.has_unmade_moves
    for _ in range(2):  # taking none does not make those of before
        cache.take_moves()
        assert cache.has_unmade_moves
    cache.moves_made()
    assert not cache.has_unmade_moves


def test_a_cache_that_forgets_has_every_block_and_shares_none() -> None:
    cache = KVCache(4)
    tokens = list(range(3 * BLOCK_SIZE))
    sequence = read(cache, tokens)
    cache.move(3, 1)
    cache.take_moves()
    cache.move(5, 4)
    sequence.release()
    assert cache.num_reusable_blocks == 3
    cache.forget()
    assert (cache.num_free_blocks, cache.num_reusable_blocks, cache.has_unmade_moves) == (4, 0, False)
    assert cache.take_moves()[0].tolist() == []
    assert SequenceCache(cache, 4 * BLOCK_SIZE).adopt(tokens) == 0
    assert sorted(cache.take_block() for _ in range(4)) == [0, 1, 2, 3]


def test_a_full_cache_is_an_overload_and_not_a_crash() -> None:
    cache = KVCache(num_blocks=1)
    sequence = SequenceCache(cache, max_tokens=2 * BLOCK_SIZE)
    with pytest.raises(OverloadedError):
        sequence.reserve(BLOCK_SIZE + 1)


def test_what_begins_alike_shares_full_blocks_and_always_computes_its_last_token() -> None:
    cache = KVCache(num_blocks=16)
    first = read(cache, TEXT[: 3 * BLOCK_SIZE + 5])
    other = TEXT[: 2 * BLOCK_SIZE] + [7] * BLOCK_SIZE
    for tokens, shared in (
        (TEXT[: 3 * BLOCK_SIZE + 1], 3),
        (TEXT[: 3 * BLOCK_SIZE], 2),
        (TEXT[:BLOCK_SIZE], 0),
        (TEXT[1:], 0),
        (other, 2),
    ):
        second = SequenceCache(cache, len(tokens) + 1)
        assert second.adopt(tokens) == second.length == shared * BLOCK_SIZE
        assert second.table.tolist() == first.table[:shared].tolist()
        second.release()
    # Rows of a sharer go to blocks of its own.
    second = read(cache, other)
    assert second.table[:2].tolist() == first.table[:2].tolist()
    assert not set(second.table[2:].tolist()) & set(first.table.tolist())
    first.release()
    second.release()
    assert cache.num_free_blocks == 16


def test_a_salt_keeps_sequences_apart() -> None:
    cache = KVCache(num_blocks=16)
    read(cache, TEXT[:200], salt="a")
    assert SequenceCache(cache, 400, salt="b").adopt(TEXT[:200]) == 0
    assert SequenceCache(cache, 400).adopt(TEXT[:200]) == 0
    assert SequenceCache(cache, 400, salt="a").adopt(TEXT[:200]) == 3 * BLOCK_SIZE


def test_without_reuse_nothing_is_shared() -> None:
    cache = KVCache(num_blocks=16, reuses_prefixes=False)
    read(cache, TEXT[:200])
    assert SequenceCache(cache, 400).adopt(TEXT[:200]) == 0


def test_what_was_left_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    cache = KVCache(num_blocks=6)
    old, new = TEXT[: 3 * BLOCK_SIZE + 1], [9, *TEXT[: 2 * BLOCK_SIZE]]
    read(cache, old).release()
    read(cache, new).release()
    assert cache.num_free_blocks == 6
    # Blocks: three of the old text and one more, which was not full; two of the new and one more, taken from those.
    taken = [cache.take_block() for _ in range(2)]
    found = SequenceCache(cache, 400)
    assert found.adopt(old) == 2 * BLOCK_SIZE, "the end of the old text is gone"
    found.release()
    cache.return_blocks(taken)


def test_a_used_block_is_never_handed_out() -> None:
    cache = KVCache(num_blocks=4)
    first = read(cache, TEXT[: 3 * BLOCK_SIZE + 1])
    second = SequenceCache(cache, 400)
    second.adopt(TEXT[: 3 * BLOCK_SIZE + 1])
    first.release()
    assert cache.num_free_blocks == 1
    assert cache.take_block() not in second.table.tolist()
    with pytest.raises(OverloadedError):
        cache.take_block()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 7])
def test_what_a_sequence_would_share_is_known_before_it_does(length: int) -> None:
    cache = KVCache(num_blocks=16)
    others = [read(cache, TEXT[: 2 * BLOCK_SIZE + 9], "a"), read(cache, TEXT[: 5 * BLOCK_SIZE], "a")]
    digests = list(prefix_digests(TEXT[:length], BLOCK_SIZE, "a"))
    for held in (len(digests), min(2, len(digests)), 0):
        assert cache.num_held(digests) == held
        assert cache.num_held(prefix_digests(TEXT[:length], BLOCK_SIZE, "b")) == 0
        free = cache.num_free_blocks
        sequence = SequenceCache(cache, 400, "a")
        assert sequence.adopt(TEXT[:length]) == len(digests) * BLOCK_SIZE
        # What others hold takes no free block; what is only left there does.
        assert cache.num_free_blocks == free - (len(digests) - held)
        sequence.release()
        if others:
            others.pop().release()


def test_rows_that_fit_into_owned_blocks_miss_none() -> None:
    cache = KVCache(num_blocks=4)
    sequence = SequenceCache(cache, 4 * BLOCK_SIZE)
    assert (sequence.num_missing(0), sequence.num_missing(1), sequence.num_missing(BLOCK_SIZE + 1)) == (0, 1, 2)
    assert (sequence.room_behind(0), sequence.room_behind(1)) == (0, BLOCK_SIZE - 1)
    sequence.reserve(BLOCK_SIZE + 1)
    sequence.keep(range(10))
    assert (sequence.num_missing(1), sequence.room_behind(1)) == (0, 2 * BLOCK_SIZE - 11)
    assert (sequence.num_missing(2 * BLOCK_SIZE - 10), sequence.num_missing(2 * BLOCK_SIZE - 9)) == (0, 1)


def test_random_joins_and_leaves_leave_nothing_behind() -> None:
    """Every block is always free or used, by as many as say so; what is shared holds what its sharers read."""
    cache = KVCache(num_blocks=24)
    generator = np.random.default_rng(0)
    running: list[tuple[SequenceCache, list[int]]] = []
    content: dict[int, list[int]] = {}
    hits = 0
    for _ in range(1500):
        if running and generator.random() < 0.5:
            running.pop(int(generator.integers(len(running))))[0].release()
        else:
            # Few texts, so that they meet.
            length = int(generator.integers(1, 5 * BLOCK_SIZE))
            tokens = [int(generator.integers(3))] * BLOCK_SIZE + [int(generator.integers(2))] * BLOCK_SIZE
            tokens = (tokens + TEXT)[:length]
            sequence = SequenceCache(cache, 6 * BLOCK_SIZE)
            hits += sequence.adopt(tokens)
            for index, block in enumerate(sequence.table.tolist()):
                assert content[block] == tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            try:
                sequence.reserve(len(tokens) - sequence.length)
            except OverloadedError:
                sequence.release()
                continue
            for index, block in enumerate(sequence.table.tolist()):
                content[block] = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            sequence.keep(range(len(tokens) - sequence.length))
            sequence.publish(tokens)
            running.append((sequence, tokens))
        used = {block for sequence, _ in running for block in sequence.table.tolist()}
        assert cache.num_free_blocks == cache.num_blocks - len(used)
        for sequence, tokens in running:
            for index, block in enumerate(sequence.table.tolist()):
                assert content[block] == tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
    assert hits > 100 * BLOCK_SIZE
