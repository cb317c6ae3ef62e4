"""Counts of a gateway's requests, and its metrics."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from coppice.gateway.exchange import HttpExchange
from coppice.obs.metrics import Prefix

# Status of a request whose client has left before there was one, as proxies write it.
LEFT = 499


class GatewayCounts:
    """Requests of the endpoints that take a body. On the event loop."""

    def __init__(self) -> None:
        self._answered: Counter[tuple[str, int]] = Counter()
        self._num_running = 0

    @contextlib.contextmanager
    def request(self, endpoint: str, exchange: HttpExchange) -> Iterator[None]:
        """Count a request while the context is open, and its answer at the end."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._answered[endpoint, exchange.status or LEFT] += 1

    def metrics(self) -> Iterator[Metric]:
        """Families, whose samples are of this moment."""
        prefix = Prefix("coppice_gateway_")
        text = "Answered requests, by endpoint and HTTP status; 499 if the client left before."
        answered = CounterMetricFamily(f"{prefix.text}requests", text, labels=["endpoint", "status"])
        for (endpoint, status), count in sorted(self._answered.items()):
            answered.add_metric([endpoint, str(status)], count)
        yield answered
        yield prefix.gauge("running_requests", "Requests that are being answered.", self._num_running)
        yield prefix.tasks()

    def page(self) -> bytes:
        """The metrics in Prometheus' text format. On the event loop."""
        registry = CollectorRegistry()
        registry.register(_Families(self))
        return generate_latest(registry)


class _Families(Collector):
    def __init__(self, counts: GatewayCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        return self._counts.metrics()
