"""Metrics of a drafter, listed in `docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from coppice.net.certificates import Certificates
from coppice.obs.metrics import Prefix
from drafter_svc.acceptance_map import TEMPERATURE_CLASSES, AcceptanceMap
from drafter_svc.service import DrafterService

_OWN = Prefix("coppice_drafter_")


def drafter_metrics(service: DrafterService, certificates: Certificates | None = None) -> Iterator[Metric]:
    """Current metrics. Safe on any thread: each number is read once."""
    counts = service.counts
    yield _OWN.gauge("info", "1 for the kind of the drafter.", 1, kind=service.drafter.info.kind)
    yield _OWN.gauge("sequences", "Open sequences.", service.num_sequences)
    yield _OWN.counter("opened_sequences", "Sequences opened.", counts.num_opened)
    yield _OWN.counters(
        "failed_sequences", "Sequences refused or failed, by gRPC status.", "code", counts.failed.copy()
    )
    prefixes = service.drafter.prefixes
    yield _OWN.counter("prompt_tokens", "Prompt tokens of opened sequences.", counts.num_prompt_tokens)
    yield _OWN.counter(
        "reused_prompt_tokens", "Prompt tokens read before for another sequence.", prefixes.num_reused_tokens
    )
    yield _OWN.gauge("prefix_bytes", "Memory of cached prompt prefixes.", prefixes.num_bytes)
    caches = service.caches
    yield _OWN.gauge("cached_tokens", "Tokens in the KV caches of open sequences.", caches.num_tokens)
    yield _OWN.counter(
        "forgotten_sequences", "Sequences whose KV cache was dropped for lack of memory.", caches.num_forgotten
    )
    yield _OWN.gauge("waiting_jobs", "Drafts and other jobs waiting for the model.", service.thread.num_waiting)
    for distribution in (counts.queue_s, counts.draft_s, counts.nodes):
        yield from distribution.collect()
    joint = service.turns.num_joint_passes
    yield _OWN.counter("joint_passes", "Forward passes shared by drafts of several sequences.", joint)
    expected = {"drafted_for": counts.num_expected, "dropped": counts.num_dropped + counts.num_gone}
    yield _OWN.counters("expectations", "Expected trees announced, by result.", "result", expected)
    yield _OWN.counter("ahead_drafts", "Trees sent for likely outcomes.", counts.num_ahead)
    yield from _acceptance_metrics(service.acceptance)
    yield from _OWN.certificates(server=certificates)


def _acceptance_metrics(acceptance: AcceptanceMap) -> Iterator[Metric]:
    counts = acceptance.counts
    families: tuple[tuple[str, str, Sequence[Sequence[float]]], ...] = (
        ("observed_nodes", "Nodes sent whose parent was committed.", counts.nodes),
        ("expected_acceptance", "Sum of the probabilities sent for these nodes.", counts.expected),
        ("accepted_nodes", "Of these nodes, those with the target's token.", counts.accepted),
    )
    for name, description, values in families:
        for temperature, by_tenth in zip(TEMPERATURE_CLASSES, values, strict=True):
            for tenth, value in enumerate(by_tenth):
                yield _OWN.counter(name, description, value, temperature=temperature, probability=f"{tenth / 10:.1f}")
