"""Chance events: what a uniform number decides, exactly, and the seeded streams with their test vectors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.chance import COUNTERS_PER_CALL, Purpose, UniformChance, uniforms
from coppice.core.noise import philox4x32

ALMOST_ONE = 1 - 2.0**-53

# seed, position, purpose, index, uniform number times 2^53
VECTORS = [
    (0, 0, Purpose.DRAFT, 0, 0x05B9CE7C4D2388),
    (0, 0, Purpose.DRAFT, 1, 0x1F9F1C1E8A1EAB),
    (0, 0, Purpose.ACCEPTANCE, 0, 0x1BA5F8A2B7D683),
    (1, 0, Purpose.DRAFT, 0, 0x024F7DC87811D2),
    (0, 1, Purpose.DRAFT, 0, 0x09E103D3A378AA),
    (42, 100, Purpose.ACCEPTANCE, 63, 0x0BA85943AD9B63),
    (42, 100, Purpose.ACCEPTANCE, 64, 0x06F4FF682535E5),
    (0x123456789ABCDEF0, 7, Purpose.DRAFT, 129, 0x1EDF47609B5A81),
    (0xFFFFFFFFFFFFFFFF, 0x100000003, Purpose.ACCEPTANCE, 5, 0x0C77FACED3CF47),
]


def reference_uniform(seed: int, position: int, purpose: int, index: int) -> float:
    """One number by itself, from one counter."""
    counter = tuple(np.array([word], np.uint64) for word in (index // 2, position % 2**32, position // 2**32, purpose))
    words = [int(word[0]) for word in philox4x32(counter, (seed % 2**32, seed // 2**32))]  # type: ignore[arg-type]
    high, low = words[2 * (index % 2) : 2 * (index % 2) + 2]
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


@pytest.mark.parametrize(("seed", "position", "purpose", "index", "numerator"), VECTORS)
def test_uniform_numbers_match_the_vectors(
    seed: int, position: int, purpose: Purpose, index: int, numerator: int
) -> None:
    [number] = itertools.islice(uniforms(seed, position, purpose), index, index + 1)
    assert number * 2**53 == numerator


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.sampled_from(Purpose))
def test_a_stream_is_a_function_of_seed_position_purpose_and_index(seed: int, position: int, purpose: Purpose) -> None:
    indices = (0, 1, 2, 2 * COUNTERS_PER_CALL - 1, 2 * COUNTERS_PER_CALL, 2 * COUNTERS_PER_CALL + 3)
    stream = list(itertools.islice(uniforms(seed, position, purpose), max(indices) + 1))
    for index in indices:
        assert stream[index] == reference_uniform(seed, position, purpose, index)


def test_uniform_numbers_are_uniform_and_streams_do_not_resemble_each_other() -> None:
    count = 4096
    streams = [
        np.array(list(itertools.islice(uniforms(seed, position, purpose), count)))
        for seed in (1, 2**40)
        for position in (0, 1, 2**33)
        for purpose in Purpose
    ]
    for stream in streams:
        assert 0 <= stream.min() < stream.max() < 1
        bins = np.bincount((stream * 16).astype(int), minlength=16)
        # The 0.9999 quantile of chi-square with 15 degrees of freedom.
        assert ((bins - count / 16) ** 2 / (count / 16)).sum() < 44.3
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / math.sqrt(count)


def test_an_event_happens_below_its_probability() -> None:
    cases = [(0.0, 0.25, True), (0.5, 0.5, False), (0.3, 0.31, True), (0.0, 0.0, False), (ALMOST_ONE, 1.0, True)]
    for number, probability, happens in cases:
        assert UniformChance(iter([number])).happens(probability) is happens


@given(st.lists(st.integers(0, 8), min_size=1, max_size=8).filter(any))
def test_a_choice_has_exactly_its_share_of_the_numbers(weights: list[int]) -> None:
    """Whole weights over a grid that divides them: every number of the grid is tried."""
    total = sum(weights)
    shares = np.array(weights, np.float64)
    drawn = [UniformChance(iter([(step + 0.5) / total])).choice(shares) for step in range(total)]
    assert np.bincount(drawn, minlength=len(weights)).tolist() == weights


@given(st.lists(st.floats(0, 1e-3) | st.just(0.0) | st.floats(0.1, 1), min_size=1, max_size=40).filter(any))
def test_a_choice_is_never_one_of_probability_zero(weights: list[float]) -> None:
    for number in (0.0, 0.5, ALMOST_ONE):
        assert weights[UniformChance(iter([number])).choice(np.array(weights))] > 0
