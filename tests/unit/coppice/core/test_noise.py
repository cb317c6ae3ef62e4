"""The request's noise: published and own test vectors, statistics, and a slow reference in plain integers.

Own vectors fix the chain of `coppice/core/noise.py`: (seed, position, token id) to a 32-bit word to a Gumbel number.
Another implementation (another language, a GPU kernel) has to reproduce the words exactly. The numbers are compared
to 1e-13: logarithms of two libraries may differ in the last bit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.noise import gumbel, library_noise_words, philox4x32
from coppice.kernels.cpu.noise_words import noise_words

ALL_ONES = 0xFFFFFFFF
SEEDS = st.integers(0, 2**64 - 1)

# seed, position, token id, word, Gumbel number
VECTORS = [
    (0, 0, 0, 0x6627E8D5, 0.08482025111138775),
    (0, 0, 1, 0xE169C58D, 2.061661254644034),
    (0, 0, 5, 0x5CB200DB, -0.01573495216563069),
    (1, 0, 0, 0xE3E80670, 2.152075435130231),
    (0, 1, 0, 0x6AD0C5EC, 0.13458999911711614),
    (42, 100, 4095, 0x8BF08386, 0.5042353727677538),
    (0x123456789ABCDEF0, 7, 31999, 0x0DF1EC29, -1.0681722290400963),
    (0xFFFFFFFFFFFFFFFF, 0x100000003, 151935, 0xF81DC9EF, 3.4647890053855095),
]

# The known-answer tests of Random123 (kat_vectors, philox4x32 10): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES, ALL_ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers, written from the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def reference_word(seed: int, position: int, token_id: int) -> int:
    counter = (token_id // 4, position % 2**32, position // 2**32, 0)
    return reference_philox(counter, (seed % 2**32, seed // 2**32))[token_id % 4]


def reference_gumbel(seed: int, position: int, token_id: int) -> float:
    return -math.log(-math.log((reference_word(seed, position, token_id) + 0.5) / 2**32))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert reference_philox(counter, key) == expected
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), key)] == list(expected)


@pytest.mark.parametrize(("seed", "position", "token_id", "word", "number"), VECTORS)
def test_the_noise_has_its_documented_values(seed: int, position: int, token_id: int, word: int, number: float) -> None:
    assert reference_word(seed, position, token_id) == word
    assert gumbel(seed, position, 1, token_id + 1)[0, token_id] == pytest.approx(number, rel=1e-13)


@given(SEEDS, st.integers(0, 2**40), st.integers(1, 3), st.integers(1, 13))
def test_the_noise_equals_a_slow_reference(seed: int, position: int, count: int, vocab_size: int) -> None:
    expected = [[reference_gumbel(seed, position + row, token) for token in range(vocab_size)] for row in range(count)]
    np.testing.assert_allclose(gumbel(seed, position, count, vocab_size), expected, rtol=1e-13)


@given(SEEDS, st.integers(0, 2**64 - 8), st.integers(1, 8), st.integers(1, 40))
def test_compiled_words_are_those_of_the_library(seed: int, position: int, count: int, groups: int) -> None:
    arguments = np.uint64(seed), np.uint64(position), count, groups
    assert np.array_equal(noise_words(*arguments), library_noise_words(*arguments))


@given(SEEDS, st.integers(0, 2**33), st.integers(1, 40), st.integers(1, 40))
def test_a_token_has_the_same_noise_in_every_vocabulary(seed: int, position: int, smaller: int, extra: int) -> None:
    wide = gumbel(seed, position, 2, smaller + extra)
    assert np.array_equal(gumbel(seed, position, 2, smaller), wide[:, :smaller])


@given(SEEDS, st.integers(0, 1000), st.integers(1, 16))
def test_a_position_has_the_same_noise_alone_and_in_a_block(seed: int, first: int, count: int) -> None:
    together = gumbel(seed, first, count, 8)
    alone = np.concatenate([gumbel(seed, first + row, 1, 8) for row in range(count)])
    assert np.array_equal(together, alone)


def test_the_noise_is_gumbel_distributed() -> None:
    sample = gumbel(seed=42, first_position=0, num_positions=200, vocab_size=4096).ravel()
    assert sample.mean() == pytest.approx(np.euler_gamma, abs=0.006)
    assert sample.var() == pytest.approx(math.pi**2 / 6, abs=0.015)
    # Kolmogorov-Smirnov against exp(-exp(-x)); 1.63 is the 1 % point.
    cdf = np.exp(-np.exp(-np.sort(sample)))
    steps = np.arange(len(sample) + 1) / len(sample)
    distance = max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())
    assert distance * math.sqrt(len(sample)) < 1.63


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated() -> None:
    here = gumbel(seed=7, first_position=100, num_positions=64, vocab_size=1024)
    others = {
        "seed": gumbel(seed=8, first_position=100, num_positions=64, vocab_size=1024),
        "position": gumbel(seed=7, first_position=101, num_positions=64, vocab_size=1024),
        "token": np.roll(here, 1, axis=1),
    }
    for name, other in others.items():
        correlation = float(np.corrcoef(here.ravel(), other.ravel())[0, 1])
        assert abs(correlation) < 4 / math.sqrt(here.size), name


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_the_largest_of_logits_plus_noise_follows_the_softmax(seed: int) -> None:
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    draws = 20_000
    chosen = (logits + gumbel(seed, 0, draws, len(logits))).argmax(axis=1)
    observed = np.bincount(chosen, minlength=len(logits))
    expected = draws * np.exp(logits) / np.exp(logits).sum()
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    # The 0.1 % point of chi-square with 6 degrees of freedom.
    assert chi_square < 22.46
