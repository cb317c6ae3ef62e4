"""Metrics as a scraper sees them."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric

from coppice.core.errors import UnavailableError
from coppice.obs.metrics import Prefix, histogram
from coppice.obs.metrics_server import MetricsServer

HOST = "127.0.0.1"
OWN = Prefix("our_")


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode().splitlines()


def test_metrics_are_read_anew_at_every_scrape() -> None:
    count = 0

    def read() -> Iterator[Metric]:
        nonlocal count
        count += 1
        yield OWN.counter("things", "Things so far.", count)
        yield OWN.gauge("mode", "Which.", True, who="a", kind='"b"')

    server = MetricsServer(read, HOST, 0)
    first, second = scrape(server.port), scrape(server.port)
    server.stop()
    assert first == [
        "# HELP our_things_total Things so far.",
        "# TYPE our_things_total counter",
        "our_things_total 1.0",
        "# HELP our_mode Which.",
        "# TYPE our_mode gauge",
        'our_mode{kind="\\"b\\"",who="a"} 1.0',
    ]
    assert second[2] == "our_things_total 2.0"


def test_metrics_of_one_name_are_one_family() -> None:
    def read() -> Iterator[Metric]:
        yield OWN.gauge("share", "Share.", 1, who="a")
        yield OWN.counters("lost", "Lost.", "why", {"b": 2, "a": 1})
        yield OWN.gauge("share", "Share.", 2, who="b")

    server = MetricsServer(read, HOST, 0)
    lines = scrape(server.port)
    server.stop()
    assert lines == [
        "# HELP our_share Share.",
        "# TYPE our_share gauge",
        'our_share{who="a"} 1.0',
        'our_share{who="b"} 2.0',
        "# HELP our_lost_total Lost.",
        "# TYPE our_lost_total counter",
        'our_lost_total{why="a"} 1.0',
        'our_lost_total{why="b"} 2.0',
    ]


def test_a_distribution_is_its_ranges_count_and_sum_and_nothing_else() -> None:
    waits = histogram("our_wait_seconds", "Waits.", (0.5, 2.0))
    for value in (0.25, 0.5, 2.5):
        waits.observe(value)
    server = MetricsServer(waits.collect, HOST, 0)
    lines = scrape(server.port)
    server.stop()
    assert lines == [
        "# HELP our_wait_seconds Waits.",
        "# TYPE our_wait_seconds histogram",
        'our_wait_seconds_bucket{le="0.5"} 2.0',
        'our_wait_seconds_bucket{le="2.0"} 2.0',
        'our_wait_seconds_bucket{le="+Inf"} 3.0',
        "our_wait_seconds_count 3.0",
        "our_wait_seconds_sum 3.25",
    ]


def test_a_stopped_server_frees_its_port() -> None:
    server = MetricsServer(lambda: (), HOST, 0)
    server.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((HOST, server.port))
        again.listen()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(UnavailableError, match=r"cannot serve metrics at .* in use"):
            MetricsServer(lambda: (), HOST, taken.getsockname()[1])
