"""Metrics of a service over HTTP, in the format of Prometheus: read when they are asked for, free in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import CollectorRegistry

from coppice.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with a name. Counters only grow while the process lives; by convention their names end in `_total`."""

    name: str
    description: str
    value: float
    is_counter: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.is_counter != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: the names of counters, and no others, end in _total")


Read: TypeAlias = Callable[[], Iterable[Metric]]


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


class _Collector:
    """Metrics as the library wants them."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        for metric in self._read():
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(metric.name, metric.description, labels=list(metric.labels))
            family.add_metric(list(metric.labels.values()), metric.value)
            yield family
