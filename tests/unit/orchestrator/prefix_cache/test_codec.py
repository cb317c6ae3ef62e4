"""Values as bytes: what goes in comes out, and whatever else there may be is refused."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prefix_cache.codec import (
    VERSION,
    decode_continuations,
    decode_statistics,
    encode_continuations,
    encode_statistics,
)
from orchestrator.prefix_cache.values import Continuations, InvalidValueError, PrefixStatistics

PATHS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=70), max_size=8)
COUNTS = st.integers(0, 2**30)


def grown(paths: list[list[int]]) -> Continuations:
    tree = Continuations()
    for path in paths:
        tree = tree.with_path(path)
    return tree


@given(PATHS)
@settings(max_examples=100, deadline=None)
def test_continuations_come_back_as_they_were(paths: list[list[int]]) -> None:
    tree = grown(paths)
    assert decode_continuations(encode_continuations(tree)) == tree


@given(st.tuples(*[COUNTS] * 6))
@settings(max_examples=100, deadline=None)
def test_statistics_come_back_as_they_were(counts: tuple[int, ...]) -> None:
    statistics = PrefixStatistics(*counts)
    assert decode_statistics(encode_statistics(statistics)) == statistics


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused(value: bytes) -> None:
    for decode in (decode_continuations, decode_statistics):
        with pytest.raises(InvalidValueError):
            decode(value)


@given(st.sampled_from([1, 4]), st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_with_a_right_checksum_are_refused_or_valid(kind: int, body: bytes) -> None:
    """Whoever can write to the store can do this; it must not be more than a strange draft."""
    sealed = bytes((VERSION, kind)) + body
    value = sealed + zlib.crc32(sealed).to_bytes(4, "little")
    for decode, encode in (
        (decode_continuations, encode_continuations),
        (decode_statistics, encode_statistics),
    ):
        try:
            decoded = decode(value)
        except InvalidValueError:
            continue
        assert decode(encode(decoded)) == decoded  # type: ignore[arg-type]


def test_a_changed_or_cut_value_is_refused() -> None:
    rng = random.Random(3)
    value = encode_continuations(grown([[1, 2, 3], [1, 2, 4], [7]]))
    for _ in range(200):
        at, bit = rng.randrange(len(value)), 1 << rng.randrange(8)
        changed = value[:at] + bytes([value[at] ^ bit]) + value[at + 1 :]
        with pytest.raises(InvalidValueError):
            decode_continuations(changed)
    for size in range(len(value)):
        with pytest.raises(InvalidValueError):
            decode_continuations(value[:size])
    with pytest.raises(InvalidValueError):
        decode_continuations(value + b"\0")


def test_one_kind_is_not_taken_for_the_other() -> None:
    with pytest.raises(InvalidValueError):
        decode_statistics(encode_continuations(grown([[1, 2]])))
    with pytest.raises(InvalidValueError):
        decode_continuations(encode_statistics(PrefixStatistics(1, 2)))


def test_another_version_is_refused() -> None:
    value = encode_continuations(grown([[1, 2]]))
    sealed = bytes((VERSION + 1,)) + value[1:-4]
    with pytest.raises(InvalidValueError, match="version"):
        decode_continuations(sealed + zlib.crc32(sealed).to_bytes(4, "little"))


def test_a_node_takes_a_few_bytes() -> None:
    path = list(range(3000, 3064))
    assert len(encode_continuations(grown([path]))) <= 4 * len(path) + 8
