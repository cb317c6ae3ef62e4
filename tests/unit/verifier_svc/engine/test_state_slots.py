"""Slots of recurrent states: users, commits, and prefixes that end at a border with a kept state."""

from __future__ import annotations

import pytest

from coppice.core.errors import OverloadedError
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache
from verifier_svc.engine.state_slots import StateSlots

TEXT = list(range(5 * BLOCK_SIZE))


def new_cache(num_running: int = 4, num_kept: int = 2, num_blocks: int = 20) -> KVCache:
    return KVCache(num_blocks, states=StateSlots(num_running, num_kept))


def prefill(cache: KVCache, tokens: list[int], *, chunk: int) -> SequenceCache:
    """A sequence with all of these tokens in the cache, in parts."""
    sequence = SequenceCache(cache, len(tokens))
    while sequence.length < len(tokens):
        count = min(chunk, len(tokens) - sequence.length)
        sequence.reserve(count)
        sequence.plan_borders(count)
        sequence.keep(range(count))
        cache.take_state_moves()
        sequence.publish(tokens)
    return sequence


def test_a_prefix_is_shared_up_to_the_last_border_of_each_part() -> None:
    cache = new_cache()
    first = prefill(cache, TEXT[: 4 * BLOCK_SIZE + 10], chunk=2 * BLOCK_SIZE + 20)
    assert cache.states is not None
    assert cache.states.num_borders == 2
    for length, expected in ((BLOCK_SIZE + 1, 0), (2 * BLOCK_SIZE, 0), (2 * BLOCK_SIZE + 1, 2), (5 * BLOCK_SIZE, 4)):
        other = SequenceCache(cache, len(TEXT))
        assert other.adopt(TEXT[:length]) == expected * BLOCK_SIZE
        moves = cache.take_state_moves()
        assert moves is not None
        assert [destination for _, destination in moves.copies] == ([other.state] if expected else [])
        other.release()
    first.release()
    assert cache.states.num_free == 4


def test_a_sequence_without_a_slot_does_not_start() -> None:
    cache = new_cache(num_running=1)
    one, other = SequenceCache(cache, 10), SequenceCache(cache, 10)
    one.reserve(1)
    with pytest.raises(OverloadedError, match="recurrent state"):
        other.reserve(1)
    one.release()
    other.reserve(1)


def test_the_state_used_least_recently_makes_room() -> None:
    cache = new_cache(num_kept=2)
    texts = [[1000 * number + token for token in TEXT[: BLOCK_SIZE + 5]] for number in range(3)]

    def is_known(text: list[int]) -> bool:
        other = SequenceCache(cache, 1000)
        adopted = other.adopt(text)
        other.release()
        return adopted > 0

    for text in texts[:2]:
        prefill(cache, text, chunk=1000)
    # Its use makes the other one the oldest.
    assert is_known(texts[0])
    prefill(cache, texts[2], chunk=1000)
    assert [is_known(text) for text in texts] == [True, False, True]


def test_a_block_that_is_given_away_takes_its_state_with_it() -> None:
    cache = new_cache(num_blocks=3)
    prefill(cache, TEXT[: BLOCK_SIZE + 5], chunk=1000).release()
    assert cache.states is not None
    assert cache.states.num_borders == 1
    for _ in range(3):
        cache.take_block()
    assert cache.states.num_borders == 0
    assert {cache.states.take_border(), cache.states.take_border()} == {4, 5}


def test_slots_of_a_pass_that_failed_come_back() -> None:
    cache = new_cache(num_kept=1)
    sequence = SequenceCache(cache, 1000)
    sequence.reserve(BLOCK_SIZE)
    assert sequence.plan_borders(BLOCK_SIZE) == ((BLOCK_SIZE - 1, 4),)
    # Planned again, and never kept.
    assert sequence.plan_borders(BLOCK_SIZE) == ((BLOCK_SIZE - 1, 4),)
    sequence.release()
    assert cache.states is not None
    assert cache.states.take_border() == 4


def test_decoding_keeps_no_borders() -> None:
    cache = new_cache()
    sequence = SequenceCache(cache, 1000)
    sequence.reserve(BLOCK_SIZE - 1)
    sequence.keep(range(BLOCK_SIZE - 1))
    assert sequence.plan_borders(1) == ()


def test_changes_of_a_slot_go_with_its_sequence_and_are_taken_once() -> None:
    states = StateSlots(2, 1)
    slot = states.take()
    states.commit(slot, [0, 2])
    with pytest.raises(RuntimeError, match="twice"):
        states.commit(slot, [0])
    assert states.take_moves().commits == {slot: (0, 2)}
    assert states.take_moves().commits == {}
    states.commit(slot, [0])
    states.give_back(slot)
    assert states.take_moves().commits == {}
    assert states.num_free == 2
