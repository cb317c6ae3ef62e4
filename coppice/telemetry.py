"""Metrics of a service over HTTP, in the format of Prometheus: read when they are asked for, free in between."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Iterator

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import CollectorRegistry

from coppice.errors import UnavailableError
from coppice.histogram import Distribution
from coppice.metric import Metric, Read

# An event loop that does not answer a scrape by then has other worries.
READ_TIMEOUT_S = 5.0


class MetricsServer:
    """Serves what `read` returns under /metrics, from threads of its own: `read` must be safe beside the service's."""

    def __init__(self, read: Read, host: str, port: int) -> None:
        """Bind and serve; port 0 picks a free one.

        Raises:
            UnavailableError: the address is taken or none of this machine's.
        """
        registry = CollectorRegistry()
        registry.register(_Collector(read))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UnavailableError(f"cannot serve metrics at {host}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def serving_metrics(read: Read, listen_address: str, port: int) -> Iterator[None]:
    """Serve metrics until the context is left, on the host of the address that the service listens at.

    Raises:
        UnavailableError: the address is taken or none of this machine's.
    """
    server = MetricsServer(read, listen_address.rpartition(":")[0].strip("[]"), port)
    try:
        yield
    finally:
        server.stop()


def on_event_loop(read: Read) -> Read:
    """`read` for any thread: it runs on the event loop that runs now, between callbacks, so that what it sees holds."""
    loop = asyncio.get_running_loop()

    async def collect() -> list[Metric]:
        return list(read())

    def call() -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(collect(), loop).result(READ_TIMEOUT_S)

    return call


class _Collector:
    """Metrics as the library wants them."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for metric in self._read():
            family = families.get(metric.name)
            if family is None:
                family = families[metric.name] = _family(metric)
            _add(family, metric)
        return families.values()


def _family(metric: Metric) -> Family:
    names = list(metric.labels)
    if isinstance(metric.value, Distribution):
        return HistogramMetricFamily(metric.name, metric.description, labels=names)
    kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    return kind(metric.name, metric.description, labels=names)


def _add(family: Family, metric: Metric) -> None:
    values = list(metric.labels.values())
    if isinstance(family, HistogramMetricFamily) and isinstance(metric.value, Distribution):
        family.add_metric(values, list(_buckets(metric.value)), metric.value.sum)
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily) and not isinstance(metric.value, Distribution):
        family.add_metric(values, metric.value)


def _buckets(distribution: Distribution) -> Iterator[tuple[str, float]]:
    """For each upper bound, how many values were not above it."""
    so_far = 0
    for bound, count in zip((*distribution.bounds, math.inf), distribution.counts, strict=True):
        so_far += count
        yield "+Inf" if bound == math.inf else str(float(bound)), so_far
