"""What a service tells of itself, as plain data: numbers and distributions with names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from coppice.obs.histogram import Distribution, Histogram

NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Metric:
    """A number or a distribution with a name. Metrics of one name differ in the values of their labels alone.

    Counters only grow while the process lives; by convention their names end in `_total`.
    """

    name: str
    description: str
    value: float | Distribution
    is_counter: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: NO_LABELS)

    def __post_init__(self) -> None:
        if self.is_counter != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: the names of counters, and no others, end in _total")
        if self.is_counter and isinstance(self.value, Distribution):
            raise ValueError(f"{self.name}: a distribution is no counter")

    @property
    def kind(self) -> str:
        """The type of Prometheus: counter, gauge or histogram."""
        if isinstance(self.value, Distribution):
            return "histogram"
        return "counter" if self.is_counter else "gauge"


Read: TypeAlias = Callable[[], Iterable[Metric]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Makes the metrics of one service, whose names all begin alike."""

    text: str

    def gauge(self, name: str, description: str, value: float, **labels: str) -> Metric:
        """A state, which goes up and down."""
        return Metric(self.text + name, description, value, labels=labels or NO_LABELS)

    def counter(self, name: str, description: str, value: float, **labels: str) -> Metric:
        """A count since the process started; `_total` is added to its name."""
        return Metric(f"{self.text}{name}_total", description, value, is_counter=True, labels=labels or NO_LABELS)

    def histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        """What a histogram has seen since the process started."""
        return Metric(self.text + name, description, histogram.read())

    def counters(self, name: str, description: str, label: str, values: Mapping[str, float]) -> list[Metric]:
        """Counts by the values of one label, in alphabetical order."""
        return [self.counter(name, description, values[key], **{label: key}) for key in sorted(values)]
