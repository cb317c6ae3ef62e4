"""Request noise: Gumbel numbers as a pure function of (seed, position, token id).

Counter-based, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): Philox4x32 with
ten rounds.

    key     = (seed mod 2^32, seed div 2^32)
    counter = (token_id div 4, position mod 2^32, position div 2^32, 0)
    word    = philox(counter, key)[token_id mod 4]
    u       = (word + 0.5) / 2^32            in float64, never 0 or 1
    G       = -log(-log(u))                  in float64

Test vectors: `tests/unit/coppice/core/test_noise.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

try:
    from coppice.kernels.cpu.noise_words import noise_words
except ImportError:

    def noise_words(
        seed: np.uint64, first_position: np.uint64, num_positions: int, groups: int
    ) -> npt.NDArray[np.uint32]:
        """Fallback without the compiled function."""
        return library_noise_words(seed, first_position, num_positions, groups)


FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(
    counter: tuple[WordArray, WordArray, WordArray, WordArray], key: tuple[WordArray | np.uint64, WordArray | np.uint64]
) -> list[WordArray]:
    """Ten rounds of Philox4x32 over arrays of counters, with one key or one each; words are uint64 below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> _SHIFT) ^ c1 ^ k0, (product0 >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def gumbel(seed: int, first_position: int, num_positions: int, vocab_size: int) -> FloatArray:
    """Gumbel noise [num_positions, vocab_size] for consecutive absolute positions."""
    groups = -(-vocab_size // 4)
    words = noise_words(np.uint64(seed), np.uint64(first_position), num_positions, groups)
    # In place.
    noise = words[:, :vocab_size].astype(np.float64)
    noise += 0.5
    noise /= 2.0**32
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def gumbel_of(seeds: WordArray, positions: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> FloatArray:
    """Gumbel noise [nodes] of single tokens, each with its own seed and absolute position; equal to `gumbel`."""
    places = positions.astype(np.uint64)
    groups, words = np.divmod(token_ids, 4)
    counter = (groups.astype(np.uint64), places & _LOW, places >> _SHIFT, np.zeros(len(places), np.uint64))
    by_word = np.stack(philox4x32(counter, (seeds & _LOW, seeds >> _SHIFT)))
    uniform = (by_word[words, np.arange(len(places))].astype(np.float64) + 0.5) / 2.0**32
    noise: FloatArray = -np.log(-np.log(uniform))
    return noise


def library_noise_words(
    seed: np.uint64, first_position: np.uint64, num_positions: int, groups: int
) -> npt.NDArray[np.uint32]:
    """Reference for `kernels.cpu.noise_words`, in numpy."""
    positions = first_position + np.arange(num_positions, dtype=np.uint64)[:, None]
    shape = (num_positions, groups)
    counter = (
        np.broadcast_to(np.arange(groups, dtype=np.uint64)[None], shape),
        np.broadcast_to(positions & _LOW, shape),
        np.broadcast_to(positions >> _SHIFT, shape),
        np.zeros(shape, np.uint64),
    )
    words = philox4x32(counter, (seed & _LOW, seed >> _SHIFT))
    return np.stack(words, axis=-1).astype(np.uint32).reshape(num_positions, 4 * groups)
