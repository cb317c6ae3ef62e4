"""Metrics as a scraper sees them."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest

from coppice.core.errors import UnavailableError
from coppice.obs.metric import Metric
from coppice.obs.telemetry import MetricsServer

HOST = "127.0.0.1"


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode().splitlines()


def test_metrics_are_read_anew_at_every_scrape() -> None:
    count = 0

    def read() -> Iterator[Metric]:
        nonlocal count
        count += 1
        yield Metric("things_total", "Things so far.", count, is_counter=True)
        yield Metric("mode", "Which.", True, labels={"name": "a", "kind": '"b"'})

    server = MetricsServer(read, HOST, 0)
    first, second = scrape(server.port), scrape(server.port)
    server.stop()
    assert first == [
        "# HELP things_total Things so far.",
        "# TYPE things_total counter",
        "things_total 1.0",
        "# HELP mode Which.",
        "# TYPE mode gauge",
        'mode{kind="\\"b\\"",name="a"} 1.0',
    ]
    assert second[2] == "things_total 2.0"


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


@pytest.mark.parametrize(("name", "is_counter"), [("things_total", False), ("things", True)])
def test_names_say_what_only_grows(name: str, is_counter: bool) -> None:
    with pytest.raises(ValueError, match="_total"):
        Metric(name, "Things.", 1, is_counter)
