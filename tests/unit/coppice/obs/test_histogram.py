"""Histograms beside the library's own, and as a scraper sees them."""

from __future__ import annotations

import random
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs
from prometheus_client.exposition import generate_latest

from coppice.obs.histogram import Histogram
from coppice.obs.metric import Metric, Prefix
from coppice.obs.telemetry import _Collector

BOUNDS = (0.1, 0.25, 1.0, 3.0)


def exposed(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    # The library tells when it made its own.
    return [line for line in lines if "_created" not in line]


def test_a_histogram_is_served_as_the_library_s_own_would_be() -> None:
    ours, theirs_registry, ours_registry = Histogram(BOUNDS), CollectorRegistry(), CollectorRegistry()
    theirs = Theirs("wait_seconds", "Waits.", buckets=BOUNDS, registry=theirs_registry)
    numbers = random.Random(5)
    for value in [*BOUNDS, *(numbers.expovariate(1.0) for _ in range(200))]:
        ours.observe(value)
        theirs.observe(value)
    ours_registry.register(_Collector(lambda: [Prefix("").histogram("wait_seconds", "Waits.", ours)]))
    assert exposed(ours_registry) == exposed(theirs_registry)


def test_what_was_read_stays_as_it_was() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(1.0)
    read = histogram.read()
    histogram.observe(2.0)
    assert (read.counts, read.sum, read.count) == ((1, 0), 1.0, 1)
    assert histogram.read().counts == (1, 1)


def test_a_sum_is_that_of_the_values_counted_whoever_reads_meanwhile() -> None:
    histogram = Histogram((0.5, 2.0))
    is_over = threading.Event()

    def observe() -> None:
        while not is_over.is_set():
            histogram.observe(1.0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    observer = threading.Thread(target=observe)
    observer.start()
    try:
        torn = [read for read in (histogram.read() for _ in range(20_000)) if read.sum != read.count]
    finally:
        is_over.set()
        observer.join()
        sys.setswitchinterval(interval)
    assert not torn


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)], ids=str)
def test_bounds_have_to_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        Histogram(bounds)


def test_metrics_of_one_name_are_one_family() -> None:
    registry = CollectorRegistry()
    own = Prefix("things_")
    apart = own.counters("lost", "Lost.", "why", {"b": 2, "a": 1})
    registry.register(_Collector(lambda: [apart[0], Metric("other", "Other.", 1), apart[1]]))
    assert exposed(registry) == [
        "# HELP things_lost_total Lost.",
        "# TYPE things_lost_total counter",
        'things_lost_total{why="a"} 1.0',
        'things_lost_total{why="b"} 2.0',
        "# HELP other Other.",
        "# TYPE other gauge",
        "other 1.0",
    ]


def test_a_distribution_is_no_counter() -> None:
    with pytest.raises(ValueError, match="no counter"):
        Metric("waits_total", "Waits.", Histogram((1.0,)).read(), is_counter=True)
