"""The suffix index against a slow, obvious search."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from orchestrator.prefix_cache.suffix_index import (
    MAX_MATCH,
    MAX_SCANNED,
    MIN_MATCH,
    SEPARATOR,
    Occurrence,
    SuffixIndex,
)


def obvious(tokens: Sequence[int], suffix: Sequence[int]) -> list[Occurrence]:
    """Every place of `tokens` at which the end of `suffix` stands and a token follows: a look at each of them."""
    found = []
    for end in range(len(tokens) - 1, MIN_MATCH - 1, -1):
        length = 0
        while length < min(end, len(suffix), MAX_MATCH) and tokens[end - 1 - length] == suffix[-1 - length]:
            length += 1
        if length >= MIN_MATCH and tokens[end] != SEPARATOR:
            found.append(Occurrence(end, length))
    return sorted(found[:MAX_SCANNED], key=lambda one: -one.length)


@pytest.mark.parametrize("num_kinds", [2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_every_occurrence_is_found_while_the_tokens_grow(num_kinds: int, seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    index = SuffixIndex()
    found = 0
    for _ in range(60):
        new = [rng.randrange(num_kinds) for _ in range(rng.randrange(4))]
        index.append(new)
        tokens += new
        assert index.find(tokens) == obvious(tokens, tokens)
        found += len(index.find(tokens))
    assert found


@pytest.mark.parametrize("seed", range(10))
def test_sequences_that_are_kept_apart_are_not_read_across(seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    index = SuffixIndex()
    for _ in range(20):
        new = [rng.randrange(3) for _ in range(rng.randrange(1, 9))] + [SEPARATOR]
        index.append(new)
        tokens += new
        suffix = [rng.randrange(3) for _ in range(6)]
        assert index.find(suffix) == obvious(tokens, suffix)
        for one in index.find(suffix):
            after = tokens[one.end :]
            assert index.continuation(one.end, 99) == after[: after.index(SEPARATOR)]


def test_the_longest_match_comes_first_and_of_equal_ones_the_latest() -> None:
    index = SuffixIndex()
    index.append([5, 1, 2, 7, 1, 2, 8, 1, 2, 9, 5, 1, 2])
    assert index.find([5, 1, 2]) == [Occurrence(3, 3), Occurrence(9, 2), Occurrence(6, 2)]


def test_a_continuation_that_reaches_the_end_repeats_itself() -> None:
    index = SuffixIndex()
    index.append([1, 2, 3, 1, 2])
    [one] = index.find([1, 2])
    assert index.continuation(one.end, 7) == [3, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("step", [1, 3, 7, 40, 100])
def test_memory_is_bounded_and_what_is_recent_is_found(step: int) -> None:
    rng = random.Random(step)
    index = SuffixIndex(max_tokens=32)
    tokens: list[int] = []
    for _ in range(60):
        new = [rng.randrange(4) for _ in range(step)]
        index.append(new)
        tokens += new
        assert len(index) <= 64
        assert len(index) >= min(32, len(tokens))
        held = tokens[-len(index) :]
        assert index.find(tokens) == obvious(held, tokens)
    assert index.find(tokens)


def test_nothing_is_found_for_less_than_two_tokens_or_in_nothing() -> None:
    index = SuffixIndex()
    assert index.find([1, 2, 3]) == []
    index.append([1, 1, 1])
    assert index.find([1]) == []
    assert index.find([]) == []
