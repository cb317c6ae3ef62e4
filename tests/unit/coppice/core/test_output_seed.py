"""Seeds of several outputs: values that other implementations have to reproduce, and no two alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coppice.core.output_seed import output_seed

SEEDS = st.integers(0, 2**64 - 1)


def test_vectors() -> None:
    assert [output_seed(7, index) for index in range(3)] == [7, 11400714819323198492, 4354685564936845361]
    assert output_seed(2**64 - 1, 1) == 11400714819323198484


@given(SEEDS)
def test_the_first_output_has_the_seed_itself(seed: int) -> None:
    assert output_seed(seed, 0) == seed


@given(SEEDS, st.integers(0, 1000))
def test_requests_with_neighbouring_seeds_share_none(seed: int, distance: int) -> None:
    """One request's outputs all differ, and from those of another whose seed is near."""
    seeds = {output_seed((seed + apart) % 2**64, index) for apart in {0, distance} for index in range(64)}
    assert len(seeds) == (64 if distance == 0 else 128)
    assert all(0 <= one < 2**64 for one in seeds)
