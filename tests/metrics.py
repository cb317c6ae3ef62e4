"""Metrics as tests look at them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric


def values(metrics: Iterable[Metric], prefix: str = "") -> dict[str, float]:
    """Values by name without `prefix` and by labels, as in `requests_refused_total,reason=no_time`."""
    found: dict[str, float] = {}
    for metric in metrics:
        for sample in metric.samples:
            labels = [f"{name}={value}" for name, value in sample.labels.items()]
            key = ",".join([sample.name.removeprefix(prefix), *labels])
            assert key not in found
            found[key] = sample.value
    return found
