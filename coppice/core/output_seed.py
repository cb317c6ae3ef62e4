"""The seed of each of several outputs, as `inference.proto` defines it."""

from __future__ import annotations

# The golden ratio's fraction in units of 2^-64, which is odd: seeds repeat after 2^64 outputs only, and requests whose
# seeds are near to each other share none.
SEED_STEP = 0x9E3779B97F4A7C15


def output_seed(seed: int, index: int) -> int:
    """The seed that output `index` of a request with `seed` is drawn with; output 0 has the seed itself."""
    return (seed + index * SEED_STEP) % 2**64
