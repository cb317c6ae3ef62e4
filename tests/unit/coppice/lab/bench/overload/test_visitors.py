"""Who comes, and what is seen of how many wait."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric

from coppice.lab.bench.client import ATTENTIVE, Meter, watching
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.overload import LEAVE_WITHIN_S, RUNNING, WAITING, Visitors
from coppice.obs.metrics import Prefix
from coppice.obs.metrics_server import MetricsServer
from tests.fakes import eventually


def test_shares_of_clients_leave_or_read_slowly_and_the_same_ones_each_time() -> None:
    arrivals = Visitors(0.2, 0.1).arrivals(100.0, 5.0, 40.0, "s")
    assert arrivals == Visitors(0.2, 0.1).arrivals(100.0, 5.0, 40.0, "s")
    assert all(5.0 <= arrival.at_s < 45.0 for arrival in arrivals)
    leaving = [one.manner.leave_after_s for one in arrivals if one.manner.leave_after_s is not None]
    slow = [one for one in arrivals if one.manner.pause_s]
    assert len(leaving) == pytest.approx(0.2 * len(arrivals), rel=0.1)
    assert len(slow) == pytest.approx(0.1 * len(arrivals), rel=0.15)
    assert 0 < min(leaving) < 0.1
    assert 0.9 * LEAVE_WITHIN_S < max(leaving) < LEAVE_WITHIN_S
    calm = Visitors(0.0, 0.0).arrivals(100.0, 0.0, 5.0, "s")
    assert {arrival.manner for arrival in calm} == {ATTENTIVE}


def _meter(url: str) -> Meter:
    return Meter((url,), (RUNNING, WAITING), "the orchestrator")


async def test_a_crowd_is_read_from_the_metrics_while_it_is_watched() -> None:
    own = Prefix("coppice_orchestrator_")

    def metrics() -> list[Metric]:
        return [own.gauge("num_requests_running", "x", 3), own.gauge("num_requests_waiting", "x", 2)]

    server = MetricsServer(metrics, "127.0.0.1", 0)
    try:
        async with watching(_meter(f"http://127.0.0.1:{server.port}/metrics"), 0.01) as seen:
            await eventually(lambda: len(seen) > 1)
    finally:
        await asyncio.to_thread(server.stop)
    assert {(one.total(RUNNING), one.total(WAITING)) for _, one in seen} == {(3, 2)}
    assert [at_s for at_s, _ in seen] == sorted(at_s for at_s, _ in seen)


async def test_metrics_that_are_not_there_or_of_something_else_are_an_error() -> None:
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    try:
        with pytest.raises(BenchmarkError, match="no metrics of the orchestrator"):
            async with watching(_meter(url), 0.01):
                await asyncio.sleep(0.2)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(BenchmarkError, match="no metrics of the orchestrator"):
        async with watching(_meter(url), 0.01):
            await asyncio.sleep(0.2)
