"""When requests arrive: the law of the random process, and what a trace file says."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from coppice.lab.bench.load.loads import Arrival, TraceError, poisson_arrivals, read_trace, trace_beginning

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
LINES = (
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
    "2023-11-16 18:17:06.4799600,110,27",
)


def _trace(directory: Path, *lines: str) -> Path:
    path = directory / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_poisson_arrivals_come_at_the_rate_with_exponential_gaps() -> None:
    rate, duration_s = 50.0, 400.0
    times = [arrival.at_s for arrival in poisson_arrivals(rate, duration_s, "a")]
    expected = rate * duration_s
    assert abs(len(times) - expected) < 4 * expected**0.5
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < duration_s
    gaps = [late - early for early, late in pairwise(times)]
    # Of an exponential law the standard deviation is the mean, and the median ln 2 times the mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(0.6931 / rate, rel=0.05)
    # Neighbours know nothing of each other.
    assert abs(statistics.correlation(gaps[:-1], gaps[1:])) < 0.04


def test_a_trace_is_read_from_its_earliest_line_on(tmp_path: Path) -> None:
    arrivals = read_trace(_trace(tmp_path, HEADER, LINES[2], LINES[0], "", LINES[1]))
    assert [arrival.num_tokens for arrival in arrivals] == [10, 8, 27]
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.0, 0.052, 2.5], abs=1e-6)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEADER,), "holds no request"),
        (("TIMESTAMP,ContextTokens", "2023-11-16 18:17:03,1"), ":1: has no column GeneratedTokens"),
        ((), ":1: has no column TIMESTAMP"),
        ((HEADER, *LINES, "yesterday,1,2"), ":5: Invalid isoformat string: 'yesterday'"),
        ((HEADER, LINES[0], "2023-11-16 18:17:05,1"), ":3: invalid literal"),
        ((HEADER, "2023-11-16 18:17:05,1,many"), ":2: invalid literal"),
        ((HEADER, "2023-11-16 18:17:05,1,-1"), ":2: GeneratedTokens must be at least 0, got -1"),
        ((HEADER, LINES[0], "2023-11-16 18:17:05+00:00,1,1"), "some times have a time zone"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError) as refusal:
        read_trace(_trace(tmp_path, *lines))
    assert str(refusal.value).startswith(str(tmp_path / "trace.csv"))
    assert message in str(refusal.value)


def test_a_trace_played_faster_has_more_in_the_same_time() -> None:
    trace = [Arrival(0.0, 1), Arrival(1.0, 2), Arrival(2.0, 3), Arrival(4.0, 4)]
    assert trace_beginning(trace, 2.0, 1.0) == trace[:2]
    assert trace_beginning(trace, 2.0, 2.0) == [Arrival(0.0, 1), Arrival(0.5, 2), Arrival(1.0, 3)]
