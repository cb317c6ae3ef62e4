"""Metrics of a verifier; `docs/metrics.md` lists them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from coppice.net.certificates import Certificates
from coppice.obs.metrics import Prefix
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.state_slots import StateSlots
from verifier_svc.model.target_model import TargetInfo

_OWN = Prefix("coppice_verifier_")


def verifier_metrics(engine: Engine, info: TargetInfo, certificates: Certificates | None = None) -> Iterator[Metric]:
    """Metrics of the verifier at this moment. Thread-safe: counts are read once.

    Near-ties are omitted if not counted.
    """
    mode = "strict" if info.exact else "fast"
    yield _OWN.gauge("exactness", "1 for the mode that the server runs in, strict or fast.", 1, mode=mode)
    yield _OWN.gauge(
        "bit_exact", "Whether rows had the same bits alone and in a batch, as tested at start.", info.bit_exact
    )
    if info.near_tie_gap:
        yield _OWN.gauge("near_tie_gap", "Logit difference below which scores are near-ties.", info.near_tie_gap)
        yield _OWN.counter("near_ties", "Tokens whose choice rounding may change.", engine.counts.num_near_ties)
    yield from _passes(engine)
    yield from _drafts(engine)
    yield from _sequences(engine)
    yield from _cache(engine)
    yield from _grammars(engine)
    yield from _OWN.certificates(server=certificates)


def _passes(engine: Engine) -> Iterator[Metric]:
    counts = engine.counts
    for distribution in (counts.pass_s, counts.pass_rows, counts.bubble_s):
        yield from distribution.collect()
    yield _OWN.counter("failed_passes", "Passes that failed.", counts.num_failed_passes)
    yield _OWN.counter("rounds", "Rounds of all sequences, without chunks of prefill.", counts.num_rounds)
    yield _OWN.counter("linger_seconds", "Total time that rounds waited for drafts.", counts.linger_s)
    yield _OWN.counter("committed_tokens", "Tokens committed.", engine.counts.num_tokens)


def _drafts(engine: Engine) -> Iterator[Metric]:
    counts, drafts = engine.counts, engine.counts.drafts
    yield _OWN.counter("spec_decode_num_drafts", "Rounds that verified a draft.", counts.num_drafts)
    yield _OWN.counter("spec_decode_num_draft_tokens", "Draft nodes verified.", counts.num_draft_nodes)
    yield _OWN.counter("spec_decode_num_accepted_tokens", "Draft nodes accepted.", counts.num_accepted_nodes)
    rounds = {origin.value: count for origin, count in counts.rounds_by_origin.items()}
    accepted = {origin.value: count for origin, count in counts.accepted_by_origin.items()}
    yield _OWN.counters("origin_drafts", "Rounds that verified a draft, by when it was made.", "origin", rounds)
    text = "Accepted nodes, by when the draft was made."
    yield _OWN.counters("origin_accepted_tokens", text, "origin", accepted)
    yield _OWN.counter("masks", "Mask rows computed for in-pass re-drafts.", counts.num_masks)
    yield _OWN.counter("redraft_tokens", "Nodes of in-pass re-drafts.", counts.num_redraft_nodes)
    text = "Passes that dropped nodes after the layer of the early head."
    yield _OWN.counter("early_pruned_passes", text, counts.num_pruned_passes)
    yield _OWN.counter("early_pruned_nodes", "Draft nodes dropped by early pruning.", counts.num_pruned_nodes)
    yield from _pruning_times(engine)
    arrived = {"in_time": drafts.in_time, "late": drafts.late}
    yield _OWN.counters("drafts", "Drafts used, by arrival: in time, or late and re-rooted.", "arrival", arrived)
    ahead = {"hit": drafts.ahead_hits, "miss": drafts.ahead_misses}
    text = "Rounds with drafts made ahead, by whether their outcome was among them."
    yield _OWN.counters("ahead_outcomes", text, "result", ahead)
    yield _OWN.counters("stale_drafts", "Drafts discarded, by reason.", "reason", drafts.stale)
    yield _OWN.counters(
        "pruned_nodes", "Available nodes that a round did not verify, by reason.", "reason", drafts.pruned
    )


def _pruning_times(engine: Engine) -> Iterator[Metric]:
    """Durations of prunable passes: for comparison, with EARLY_PRUNING=compare."""
    times = {"yes" if pruned else "no": value for pruned, value in engine.passes.pruning_times.items()}
    for name, text, values in (
        (
            "prunable_passes",
            "Passes over rounds that could be pruned early",
            {k: v.num_passes for k, v in times.items()},
        ),
        ("prunable_pass_rows", "Rows that these passes began with", {k: v.num_rows for k, v in times.items()}),
        ("prunable_pass_seconds", "Time of these passes", {k: v.seconds for k, v in times.items()}),
    ):
        yield _OWN.counters(name, f"{text}, by whether they were.", "pruned", values)


def _sequences(engine: Engine) -> Iterator[Metric]:
    yield _OWN.gauge("waiting_sequences", "Sequences waiting for KV blocks.", engine.scheduler.num_waiting)
    yield _OWN.gauge("running_sequences", "Sequences in the running batch.", engine.scheduler.num_running)
    # Copied: the engine's thread may add a status.
    finished, failed = engine.counts.finished.copy(), engine.counts.failed.copy()
    yield _OWN.counters("finished_sequences", "Finished outputs, by reason.", "reason", finished)
    yield _OWN.counters("failed_sequences", "Sequences refused or failed, by gRPC status.", "code", failed)
    yield _OWN.counter("preemptions", "Preemptions of sequences.", engine.scheduler.num_preemptions)
    yield _OWN.counter(
        "recomputed_tokens",
        "Tokens computed again after preemptions and at rope boundaries.",
        engine.scheduler.num_recomputed_tokens,
    )


def _cache(engine: Engine) -> Iterator[Metric]:
    yield _OWN.gauge("kv_blocks", "KV blocks in total.", engine.cache.num_blocks)
    yield _OWN.gauge("free_kv_blocks", "KV blocks not used by a sequence.", engine.cache.num_free_blocks)
    yield _OWN.gauge("reusable_kv_blocks", "Free KV blocks with a reusable prefix.", engine.cache.num_reusable_blocks)
    states = engine.cache.states or StateSlots(0, 0)
    yield _OWN.gauge("recurrent_states", "Sequences that recurrent states fit for.", states.num_running)
    yield _OWN.gauge("free_recurrent_states", "Recurrent states not used by one.", states.num_free)
    yield _OWN.gauge("kept_recurrent_states", "Recurrent states at ends of prefixes.", states.num_borders)
    yield _OWN.counter("prompt_tokens", "Prompt tokens of opened sequences.", engine.scheduler.num_prompt_tokens)
    yield _OWN.counter(
        "cached_prompt_tokens", "Prompt tokens found in the prefix cache.", engine.scheduler.num_cached_tokens
    )


def _grammars(engine: Engine) -> Iterator[Metric]:
    grammars = engine.grammars
    results = grammars.counts.results.copy()
    yield _OWN.counters("grammars", "Grammars checked, by result.", "result", results)
    yield _OWN.counter("grammar_trials", "Grammars tried in a separate process.", grammars.counts.num_trials)
    yield _OWN.gauge("waiting_grammars", "Grammars waiting to be compiled.", grammars.num_waiting)
    yield from grammars.counts.queue_s.collect()
    yield _OWN.gauge("grammar_cache_bytes", "Memory of cached grammars.", grammars.cache_bytes)
