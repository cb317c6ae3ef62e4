"""Settings and memory limits of the services as the chart has them by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

VALUES = Path(__file__).resolve().parents[2] / "k8s" / "values.yaml"
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_MIB = 2**20
# Where the chart's image has them, and timing that only a cluster needs.
_LEFT_OUT = ("MODEL", "GRACE_S", "CONNECT_TIMEOUT_S")


def _values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    return {
        "orchestrator": values["orchestrator"],
        "verifier": values["verifier"],
        "drafter": values["drafterDefaults"],
        "gateway": values["gateway"],
    }


def memory_limits_mib() -> dict[str, float]:
    """The memory limit of each service's container, in MiB."""
    return {name: mib(service["resources"]["limits"]["memory"]) for name, service in _values().items()}


def settings() -> dict[str, dict[str, str]]:
    """Environment variables of each service, without those of paths and of starting and stopping."""
    return {
        name: {key: str(value) for key, value in service["config"].items() if key not in _LEFT_OUT}
        for name, service in _values().items()
    }


def mib(quantity: str) -> float:
    """A quantity of Kubernetes such as 512Mi or 1Gi, in MiB.

    Raises:
        ValueError: it has no unit that is known here.
    """
    for unit, size in _UNITS.items():
        if quantity.endswith(unit):
            return float(quantity.removesuffix(unit)) * size / _MIB
    raise ValueError(f"no quantity of memory: {quantity}")
