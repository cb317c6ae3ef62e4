"""Metrics of an orchestrator; `docs/metrics.md` lists them. To be read on the event loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from coppice.obs.metrics import Prefix
from orchestrator.admission.admission import Admission
from orchestrator.api.authentication import Authentication
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.peers.verifier_pool import VerifierPool
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.prefix_cache.store import CacheCounts
from orchestrator.request.drafting import STALE
from orchestrator.request.latencies import Latencies
from orchestrator.service_counters import ServiceCounters

_OWN = Prefix("coppice_orchestrator_")
# Depths counted separately; deeper nodes only count in the sums.
MOST_POSITIONS = 16


def request_metrics(tally: ServiceCounters, admission: Admission) -> Iterator[Metric]:
    """Requests and tokens of their outputs."""
    yield _OWN.gauge("num_requests_running", "Running outputs.", admission.num_running)
    yield _OWN.gauge("num_requests_waiting", "Outputs waiting for a place.", admission.num_waiting)
    yield _OWN.gauge("num_requests_paused", "Outputs waiting for a place that have begun.", admission.num_paused)
    yield _OWN.gauge("num_places", "Current concurrency limit, in outputs.", admission.num_places)
    yield _OWN.counter("requests", "Calls of Generate.", tally.num_requests)
    yield _OWN.counters("requests_refused", "Calls refused, by reason.", "reason", tally.refused)
    yield _OWN.counters("requests_finished", "Ended outputs, by reason.", "reason", tally.finished)
    yield _OWN.counter("prompt_tokens", "Prompt tokens of admitted requests.", tally.num_prompt_tokens)
    yield _OWN.counter("generation_tokens", "Tokens generated.", tally.num_generated())
    yield _OWN.counter("cpu_seconds", "CPU time of the process.", time.process_time())
    yield _OWN.tasks()


def speculation_metrics(tally: ServiceCounters) -> Iterator[Metric]:
    """Rounds and drafts."""
    total = tally.statistics()
    drafted, accepted = total.rounds_drafted_by_depth, total.rounds_accepted_by_depth
    yield _OWN.counter("rounds", "Passes that committed tokens, counted per output.", total.rounds)
    yield _OWN.counter("spec_decode_num_drafts", "Rounds that verified a draft.", drafted[0] if drafted else 0)
    yield _OWN.counter("spec_decode_num_draft_tokens", "Draft nodes verified.", total.draft_tokens)
    yield _OWN.counter("spec_decode_num_accepted_tokens", "Draft nodes accepted.", total.accepted_tokens)
    by_depth = {str(depth): accepted[depth] if depth < len(accepted) else 0 for depth in range(MOST_POSITIONS)}
    text = "Accepted nodes by depth, from 0."
    yield _OWN.counters("spec_decode_num_accepted_tokens_per_pos", text, "position", by_depth)
    proposed = {source: counts.proposed for source, counts in total.sources.items()}
    yield _OWN.counters("source_proposed_tokens", "Verified nodes that a source proposed.", "source", proposed)
    right = {source: counts.accepted for source, counts in total.sources.items()}
    yield _OWN.counters("source_accepted_tokens", "Accepted nodes that a source proposed.", "source", right)
    stale = {**dict.fromkeys(STALE, 0), **tally.stale()}
    yield _OWN.counters("stale_drafts", "Drafts discarded on arrival, by reason.", "reason", stale)
    waits = sum(records.num_waits for records in tally.records.values())
    yield _OWN.counter("better_tree_waits", "Rounds whose trees waited for another drafter's.", waits)
    yield _OWN.counter("expected_outcomes", "Rounds for which drafting ahead was requested.", total.ahead.expected)
    hits = dict.fromkeys(map(str, range(MOST_POSITIONS)), 0)
    for rank, count in enumerate(total.ahead.hits_by_rank):
        hits[str(min(rank, MOST_POSITIONS - 1))] += count
    text = "Expected outcomes that left the tree and were drafted for, by rank from 0; the last includes all beyond."
    yield _OWN.counters("draft_ahead_hits", text, "rank", hits)
    text = "Rounds that verified another tree and ended inside the expected one, before a leaf."
    yield _OWN.counter("outcomes_inside_expected", text, total.ahead.inside)
    yield _OWN.counter("linger_seconds", "Total time that rounds waited for drafts.", total.linger_us / 1e6)
    yield _OWN.counter("near_ties", "Tokens whose choice rounding may change.", total.near_ties)
    plans = [generation.planned_nodes for generation in tally.generations()]
    yield _OWN.gauge("planned_nodes", "Node budgets of the current rounds, summed over outputs.", sum(plans))
    yield _OWN.gauge("drafting_outputs", "Outputs whose current round has a node budget.", sum(map(bool, plans)))


def latency_metrics(latencies: Latencies) -> Iterator[Metric]:
    """Latency histograms."""
    for distribution in latencies.all:
        yield from distribution.collect()


def peer_metrics(verifiers: VerifierPool, drafters: Sequence[DrafterClient]) -> Iterator[Metric]:
    """Connections to verifiers and drafters, and losses."""
    yield _OWN.gauge("verifiers", "Configured verifiers.", len(verifiers.clients))
    yield _OWN.gauge("verifiers_connected", "Verifiers that can take outputs.", verifiers.num_usable)
    draining = sum(client.is_draining for client in verifiers.clients)
    yield _OWN.gauge("verifiers_draining", "Verifiers that are about to stop.", draining)
    yield _OWN.gauge(
        "verifiers_refused", "Verifiers refused because they serve another model.", len(verifiers.refusals())
    )
    lost = sum(client.stream.num_lost for client in verifiers.clients)
    yield _OWN.counter("verifier_streams_lost", "Streams to verifiers lost while open.", lost)
    yield _OWN.counter("rehomed_sequences", "Outputs moved off a lost verifier.", verifiers.num_rehomed)
    yield _OWN.gauge("drafters", "Configured drafters.", len(drafters))
    connected = Counter({client.kind: 0 for client in drafters if client.kind})
    connected.update(client.kind for client in drafters if client.connected)
    for kind, count in sorted(connected.items()):
        yield _OWN.gauge("drafters_connected", "Connected drafters, by kind.", count, kind=kind)
    refused = sum(client.stream.refusal is not None for client in drafters)
    yield _OWN.gauge("drafters_refused", "Drafters refused because they do not match the target.", refused)
    lost = sum(client.stream.num_lost for client in drafters)
    yield _OWN.counter("drafter_streams_lost", "Streams to drafters lost while open.", lost)
    handed_over = sum(client.num_handed_over for client in drafters)
    yield _OWN.counter("handed_over_sequences", "Outputs moved to another drafter of the kind.", handed_over)
    dropped = sum(client.num_dropped for client in drafters)
    yield _OWN.counter("drafter_errors", "Outputs from which a drafter was dropped after an error.", dropped)


def planner_metrics(planners: Mapping[str, AdaptivePlanner]) -> Iterator[Metric]:
    """State of the adaptive planners, by the address of their verifier."""
    for verifier, planner in planners.items():
        yield from _planner_metrics(planner, verifier)


def _planner_metrics(planner: AdaptivePlanner, verifier: str) -> Iterator[Metric]:
    usual = planner.mean_accepted
    yield _OWN.gauge(
        "planner_rate", "Value of time in tokens per second; 0 until known.", planner.rate, verifier=verifier
    )
    yield _OWN.gauge(
        "planner_price", "Price of a row: expected tokens that it must gain.", planner.price, verifier=verifier
    )
    yield _OWN.gauge(
        "planner_threshold",
        "Fraction of a typical draft's gain from which drafts pay.",
        planner.break_even / usual if usual else 0.0,
        verifier=verifier,
    )
    yield _OWN.gauge("planner_gain", "Expected accepted tokens of a typical draft.", usual, verifier=verifier)
    yield _OWN.gauge(
        "planner_nodes", "Nodes of a typical draft that are worth their rows.", planner.mean_nodes, verifier=verifier
    )
    yield _OWN.gauge("planner_pays", "1 if drafting by all requests would pay.", planner.pays, verifier=verifier)
    yield _OWN.counter("planner_pauses", "Pauses of drafting while it pays.", planner.num_pauses, verifier=verifier)
    for who, count in (("all", planner.num_trials), ("alone", planner.num_turns)):
        text = "Trials of drafting while it does not pay, by who."
        yield _OWN.counter("planner_probes", text, count, verifier=verifier, who=who)
    for source, share in sorted(planner.shares.items()):
        text = "Fraction of requests that ask a drafter, with several kinds."
        yield _OWN.gauge("planner_source_share", text, share, verifier=verifier, source=source)
    text = "Trials of other sets of drafters, while drafting pays."
    yield _OWN.counter("planner_source_comparisons", text, planner.num_comparisons, verifier=verifier)


def cache_metrics(counts: CacheCounts) -> Iterator[Metric]:
    """Metrics of the prefix cache."""
    yield _OWN.counter("prefix_cache_reads", "Reads of the store, each of several values.", counts.reads)
    yield _OWN.counter("prefix_cache_hits", "Values found.", counts.hits)
    yield _OWN.counter("prefix_cache_misses", "Values not found.", counts.misses)
    yield _OWN.counter("prefix_cache_invalid_values", "Values of another format, or damaged.", counts.invalid_values)
    yield _OWN.counter("prefix_cache_errors", "Store calls that failed or timed out.", counts.errors)
    yield _OWN.counter("prefix_cache_skipped", "Store calls skipped by the circuit breaker.", counts.skipped)
    yield _OWN.counter(
        "prefix_cache_dropped_outputs", "Finished outputs dropped from a full queue.", counts.dropped_outputs
    )
    yield _OWN.gauge(
        "prefix_cache_unwritten_outputs", "Finished outputs waiting to be written.", counts.unwritten_outputs
    )
    yield _OWN.counter("prefix_cache_conflicts", "Values changed by others between read and write.", counts.conflicts)
    yield _OWN.counter("prefix_cache_lost_changes", "Changes lost after a second conflict.", counts.lost_changes)


def authentication_metrics(authentication: Authentication) -> Iterator[Metric]:
    """Metrics of bearer tokens."""
    tokens = authentication.tokens
    yield _OWN.counter("unauthenticated_calls", "Calls without a valid token.", authentication.num_refused)
    yield _OWN.gauge("tokens", "Valid tokens.", tokens.num_tokens)
    yield _OWN.counter("token_file_loads", "Versions of the token file loaded.", tokens.num_loads)
    yield _OWN.counter("token_file_errors", "Versions of the token file rejected as invalid.", tokens.num_errors)
