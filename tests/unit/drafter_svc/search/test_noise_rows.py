"""Noise rows in any order of asking are those of the positions; what lies behind is forgotten."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.noise import gumbel
from drafter_svc.search.noise_rows import NoiseRows

VOCAB_SIZE = 7
REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=30)


@given(st.integers(0, 2**64 - 1), st.sampled_from([0.3, 1.0, 2.5]), REQUESTS)
def test_rows_are_those_of_their_positions(seed: int, temperature: float, requests: list[tuple[int, int]]) -> None:
    rows = NoiseRows(seed, VOCAB_SIZE, temperature)
    for position, count in requests:
        expected = (gumbel(seed, position, count, VOCAB_SIZE) * temperature).astype(np.float32)
        assert np.array_equal(rows.at(position, count), expected)


def test_a_growing_text_computes_every_row_once_and_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(seed: int, first: int, count: int, vocab_size: int) -> npt.NDArray[np.float64]:
        computed.extend(range(first, first + count))
        return gumbel(seed, first, count, vocab_size)

    monkeypatch.setattr("drafter_svc.search.noise_rows.gumbel", counted)
    rows = NoiseRows(3, VOCAB_SIZE, 1.0)
    position = 100
    for step in range(200):
        rows.at(position, 26)
        rows.at(position, 13)
        position += 1 + step % 9
    assert computed == list(range(100, computed[-1] + 1))
    assert len(rows._rows) == 52
