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
# Depths that acceptance is counted at; deeper nodes count in the sums alone.
MOST_POSITIONS = 16


def request_metrics(tally: ServiceCounters, admission: Admission) -> Iterator[Metric]:
    """Requests and the tokens of their outputs."""
    yield _OWN.gauge("num_requests_running", "Outputs that have a place.", admission.num_running)
    yield _OWN.gauge("num_requests_waiting", "Outputs that wait for a place.", admission.num_waiting)
    yield _OWN.gauge("num_requests_paused", "Those of them that have begun, and go on later.", admission.num_paused)
    yield _OWN.gauge("num_places", "Outputs that may run at once now.", admission.num_places)
    yield _OWN.counter("requests", "Calls of Generate.", tally.num_requests)
    yield _OWN.counters("requests_refused", "Calls that got no place, by reason.", "reason", tally.refused)
    yield _OWN.counters("requests_finished", "Outputs that have ended, by reason.", "reason", tally.finished)
    yield _OWN.counter("prompt_tokens", "Tokens of prompts of requests that got a place.", tally.num_prompt_tokens)
    yield _OWN.counter("generation_tokens", "Tokens generated.", tally.num_generated())
    yield _OWN.counter("cpu_seconds", "CPU time of the process.", time.process_time())


def speculation_metrics(tally: ServiceCounters) -> Iterator[Metric]:
    """Rounds, and what became of drafts."""
    total = tally.statistics()
    drafted, accepted = total.rounds_drafted_by_depth, total.rounds_accepted_by_depth
    yield _OWN.counter("rounds", "Passes as seen by one output that committed tokens.", total.rounds)
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
    yield _OWN.counters("stale_drafts", "Drafts that came too late to be of use, by reason.", "reason", stale)
    waits = sum(records.num_waits for records in tally.records.values())
    yield _OWN.counter("better_tree_waits", "Times that a round's trees waited for another drafter's.", waits)
    yield _OWN.counter("expected_outcomes", "Rounds whose tree a drafter was told to expect.", total.ahead.expected)
    hits = dict.fromkeys(map(str, range(MOST_POSITIONS)), 0)
    for rank, count in enumerate(total.ahead.hits_by_rank):
        hits[str(min(rank, MOST_POSITIONS - 1))] += count
    text = "Those of them whose outcome left that tree and was drafted for, by its rank from 0; the last: and beyond."
    yield _OWN.counters("draft_ahead_hits", text, "rank", hits)
    text = "Those of them that verified another tree and ended inside the expected one, where it goes on."
    yield _OWN.counter("outcomes_inside_expected", text, total.ahead.inside)
    yield _OWN.counter("linger_seconds", "Time that rounds waited for drafts, added up.", total.linger_us / 1e6)
    yield _OWN.counter("near_ties", "Tokens chosen where rounding may choose another.", total.near_ties)
    plans = [generation.planned_nodes for generation in tally.generations()]
    yield _OWN.gauge("planned_nodes", "Nodes that the current rounds of all outputs may verify.", sum(plans))
    yield _OWN.gauge("drafting_outputs", "Outputs whose current rounds may verify any.", sum(map(bool, plans)))


def latency_metrics(latencies: Latencies) -> Iterator[Metric]:
    """What clients wait for."""
    for distribution in latencies.all:
        yield from distribution.collect()


def peer_metrics(verifiers: VerifierPool, drafters: Sequence[DrafterClient]) -> Iterator[Metric]:
    """Connections to the other services, and what was lost with them."""
    yield _OWN.gauge("verifiers", "Verifiers that this orchestrator is told of.", len(verifiers.clients))
    yield _OWN.gauge("verifiers_connected", "Those that outputs can go to.", verifiers.num_usable)
    draining = sum(client.is_draining for client in verifiers.clients)
    yield _OWN.gauge("verifiers_draining", "Those that are about to stop.", draining)
    yield _OWN.gauge("verifiers_refused", "Those that serve something else.", len(verifiers.refusals()))
    lost = sum(client.stream.num_lost for client in verifiers.clients)
    yield _OWN.counter("verifier_streams_lost", "Streams to verifiers that ended by themselves.", lost)
    yield _OWN.counter("rehomed_sequences", "Outputs whose verifier was lost while they ran.", verifiers.num_rehomed)
    yield _OWN.gauge("drafters", "Drafters that this orchestrator is told of.", len(drafters))
    connected = Counter({client.kind: 0 for client in drafters if client.kind})
    connected.update(client.kind for client in drafters if client.connected)
    for kind, count in sorted(connected.items()):
        yield _OWN.gauge("drafters_connected", "Those that can be asked for drafts.", count, kind=kind)
    refused = sum(client.stream.refusal is not None for client in drafters)
    yield _OWN.gauge("drafters_refused", "Those with another tokenizer.", refused)
    lost = sum(client.stream.num_lost for client in drafters)
    yield _OWN.counter("drafter_streams_lost", "Streams to drafters that ended by themselves.", lost)
    handed_over = sum(client.num_handed_over for client in drafters)
    yield _OWN.counter("handed_over_sequences", "Outputs that another drafter of the kind took over.", handed_over)
    dropped = sum(client.num_dropped for client in drafters)
    yield _OWN.counter("drafter_errors", "Outputs that a drafter erred in and was dropped from.", dropped)


def planner_metrics(planners: Mapping[str, AdaptivePlanner]) -> Iterator[Metric]:
    """What the adaptive planners think, by the address of their verifier."""
    for verifier, planner in planners.items():
        yield from _planner_metrics(planner, verifier)


def _planner_metrics(planner: AdaptivePlanner, verifier: str) -> Iterator[Metric]:
    snapshot, exploration = planner.snapshot, planner.exploration
    yield _OWN.gauge(
        "planner_rate", "Tokens per second that time is worth; 0 until known.", snapshot.rate, verifier=verifier
    )
    yield _OWN.gauge("planner_price", "Tokens that a row of a pass has to gain.", snapshot.price, verifier=verifier)
    yield _OWN.gauge(
        "planner_threshold",
        "Share of a usual draft's gain from which drafts pay.",
        snapshot.threshold,
        verifier=verifier,
    )
    yield _OWN.gauge("planner_gain", "Accepted tokens that a usual draft promises.", snapshot.gain, verifier=verifier)
    yield _OWN.gauge(
        "planner_nodes", "Nodes of a usual draft that are worth their rows.", snapshot.nodes, verifier=verifier
    )
    yield _OWN.gauge(
        "planner_pays", "Whether it would pay if every request drafted.", snapshot.pays_jointly, verifier=verifier
    )
    yield _OWN.counter("planner_pauses", "Pauses of drafting where it pays.", exploration.num_pauses, verifier=verifier)
    for who, count in (("all", exploration.num_trials), ("alone", exploration.num_trials_alone)):
        text = "Trials of drafting where it does not pay, by who."
        yield _OWN.counter("planner_probes", text, count, verifier=verifier, who=who)
    sources = planner.sources
    for source, share in sorted(sources.shares.items()):
        text = "Share of requests that ask a drafter, where there are several kinds."
        yield _OWN.gauge("planner_source_share", text, share, verifier=verifier, source=source)
    text = "Times that drafters were compared, each alone and all together."
    yield _OWN.counter("planner_source_comparisons", text, sources.num_comparisons, verifier=verifier)


def cache_metrics(counts: CacheCounts) -> Iterator[Metric]:
    """The prefix cache."""
    yield _OWN.counter("prefix_cache_reads", "Values asked for.", counts.reads)
    yield _OWN.counter("prefix_cache_hits", "Values found.", counts.hits)
    yield _OWN.counter("prefix_cache_misses", "Values not found.", counts.misses)
    yield _OWN.counter("prefix_cache_invalid_values", "Values that were not ours or not whole.", counts.invalid_values)
    yield _OWN.counter("prefix_cache_errors", "Calls of the store that failed or took too long.", counts.errors)
    yield _OWN.counter("prefix_cache_skipped", "Calls not made since others had just failed.", counts.skipped)
    yield _OWN.counter("prefix_cache_dropped_outputs", "Outputs that were not remembered.", counts.dropped_outputs)
    yield _OWN.gauge("prefix_cache_unwritten_outputs", "Ended outputs still to remember.", counts.unwritten_outputs)
    yield _OWN.counter("prefix_cache_conflicts", "Values that others had changed meanwhile.", counts.conflicts)
    yield _OWN.counter("prefix_cache_lost_changes", "Those of them that were given up.", counts.lost_changes)


def authentication_metrics(authentication: Authentication) -> Iterator[Metric]:
    """The tokens of the public API."""
    tokens = authentication.tokens
    yield _OWN.counter("unauthenticated_calls", "Calls without a valid token.", authentication.num_refused)
    yield _OWN.gauge("tokens", "Tokens that are valid.", tokens.num_tokens)
    yield _OWN.counter("token_file_loads", "Versions of the file of tokens that were taken.", tokens.num_loads)
    yield _OWN.counter("token_file_errors", "Versions that were left out, since they are wrong.", tokens.num_errors)
