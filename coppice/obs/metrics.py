"""Metrics of a service, as families of `prometheus_client` that are made when they are read.

Counts live where things happen, as plain numbers; only distributions are the library's own objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from coppice.net.certificates import Certificates

# Otherwise each histogram has another metric: when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

Read: TypeAlias = Callable[[], Iterable[Metric]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Makes the metrics of one service, whose names all begin alike."""

    text: str

    def gauge(self, name: str, description: str, value: float, **labels: str) -> Metric:
        """A state, which goes up and down."""
        family = GaugeMetricFamily(self.text + name, description, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def counter(self, name: str, description: str, value: float, **labels: str) -> Metric:
        """A count since the process started; `_total` is added to its name."""
        family = CounterMetricFamily(self.text + name, description, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def counters(self, name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
        """Counts by the values of one label, in alphabetical order."""
        family = CounterMetricFamily(self.text + name, description, labels=[label])
        for key in sorted(values):
            family.add_metric([key], values[key])
        return family

    def certificates(self, **certificates: Certificates | None) -> Iterator[Metric]:
        """When the certificates of a service end, by what they are used as; nothing where there are none."""
        for use, one in certificates.items():
            if one is not None and math.isfinite(end_s := one.current().not_after_s):
                text = "End of the certificate's validity, in Unix time."
                yield self.gauge("certificate_expiry_timestamp_seconds", text, end_s, use=use)


def histogram(name: str, description: str, bounds: Sequence[float]) -> Histogram:
    """A distribution of one service of this process, which may hold several: it is in no registry.

    `bounds` are the upper ends of its ranges, ascending, each included; the last range has none.
    """
    return Histogram(name, description, buckets=bounds, registry=None)
