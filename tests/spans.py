"""A tracer whose spans stay here, for tests."""

from __future__ import annotations

from collections import defaultdict

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler

from coppice.obs.tracing import Tracer

# What a caller that records its span sends, and one that does not.
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNRECORDED_CALLER = CALLER[:-1] + "0"


class KeptSpans:
    """Spans that have ended, of every tracer made here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()

    def tracer(self, sampler: Sampler | None = None) -> Tracer:
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        return Tracer(provider, provider.shutdown)

    def silent_tracer(self) -> Tracer:
        """One that records only what a caller records."""
        return self.tracer(ParentBased(ALWAYS_OFF))

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def by_name(self) -> dict[str, list[ReadableSpan]]:
        found: defaultdict[str, list[ReadableSpan]] = defaultdict(list)
        for span in self.all:
            found[span.name].append(span)
        return dict(found)

    def only(self, name: str) -> ReadableSpan:
        [span] = self.by_name()[name]
        return span


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def own_id(span: ReadableSpan) -> int:
    return span.context.span_id
