"""Metrics of a service, as `prometheus_client` families created at scrape time.

Counts are plain numbers where the events happen; only histograms are objects of the library.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from coppice.net.certificates import Certificates

# Without the extra series of creation times.
disable_created_metrics()  # type: ignore[no-untyped-call]

Read: TypeAlias = Callable[[], Iterable[Metric]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Factory of one service's metrics, whose names share a prefix."""

    text: str

    def gauge(self, name: str, description: str, value: float, **labels: str) -> Metric:
        """Gauge."""
        family = GaugeMetricFamily(self.text + name, description, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def counter(self, name: str, description: str, value: float, **labels: str) -> Metric:
        """Counter since the process started; `_total` is appended to its name."""
        family = CounterMetricFamily(self.text + name, description, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def counters(self, name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
        """Counters by the values of one label, in alphabetical order."""
        family = CounterMetricFamily(self.text + name, description, labels=[label])
        for key in sorted(values):
            family.add_metric([key], values[key])
        return family

    def tasks(self) -> Metric:
        """Tasks of the running event loop, this one included: they grow where something is never awaited to its end."""
        return self.gauge("event_loop_tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))

    def certificates(self, **certificates: Certificates | None) -> Iterator[Metric]:
        """Expiry times of a service's certificates by use; nothing without certificates."""
        for use, one in certificates.items():
            if one is not None and math.isfinite(end_s := one.current().not_after_s):
                text = "End of the certificate's validity, in Unix time."
                yield self.gauge("certificate_expiry_timestamp_seconds", text, end_s, use=use)


def histogram(name: str, description: str, bounds: Sequence[float]) -> Histogram:
    """Histogram of one service; not in a registry, since a process may hold several services.

    `bounds` are ascending, inclusive upper bounds; the last bucket has none.
    """
    return Histogram(name, description, buckets=bounds, registry=None)
