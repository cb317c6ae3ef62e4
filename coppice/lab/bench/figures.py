"""Figures of a set of completions: rates, shares and lists, each a function of samples alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from coppice.lab.bench.contenders import Completion, OriginCounts, PassTime
from coppice.lab.bench.latency import Sample

NGRAM = 4
# Drafts that were there when the outcome was known which they hang behind.
EARLY_ORIGINS = ("left_over", "rerooted", "ahead", "redraft")


def by_run(samples: Sequence[Sample], figure: Callable[[list[Completion]], float]) -> list[float]:
    """A figure of each run, runs in order."""
    runs: dict[int, list[Completion]] = defaultdict(list)
    for sample in samples:
        runs[sample.run].append(sample.completion)
    return [figure(runs[run]) for run in sorted(runs)]


def tokens_per_s(completions: Iterable[Completion]) -> float:
    """All tokens over all wall time, prefill and transport included."""
    completions = list(completions)
    return _ratio(sum(len(item.token_ids) for item in completions), sum(item.wall_s for item in completions))


def forward_share(completions: Iterable[Completion]) -> float:
    """Share of the wall time inside the target's forward."""
    completions = list(completions)
    return _ratio(sum(item.forward_s for item in completions), sum(item.wall_s for item in completions))


def linger_share(completions: Iterable[Completion]) -> float:
    """Share of the wall time that the verifier waited for drafts."""
    completions = list(completions)
    return _ratio(sum(item.linger_s for item in completions), sum(item.wall_s for item in completions))


def bubble_ms(completions: Iterable[Completion]) -> float:
    """Milliseconds per round between two passes, of a sequence that is alone."""
    completions = list(completions)
    return 1000 * _ratio(sum(item.bubble_s for item in completions), sum(item.num_rounds for item in completions))


def draft_ahead_hits(completions: Iterable[Completion]) -> float:
    """Share of expected rounds with a draft behind their outcome before it was known.

    Drafted ahead for outcomes that left the expected tree, or that tree itself where a round ended inside it.
    """
    speculations = [item.speculation for item in completions if item.speculation is not None]
    hits = sum(sum(item.draft_ahead_hits_by_rank) + item.outcomes_inside_expected for item in speculations)
    return _ratio(hits, sum(item.expected_outcomes for item in speculations))


def guessed_outcomes(completions: Iterable[Completion]) -> float:
    """Share of the outcomes that left an expected tree that were drafted for before they were known."""
    speculations = [item.speculation for item in completions if item.speculation is not None]
    hits = sum(sum(item.draft_ahead_hits_by_rank) for item in speculations)
    return _ratio(hits, sum(item.expected_outcomes - item.outcomes_inside_expected for item in speculations))


def early_drafts(completions: Iterable[Completion]) -> float:
    """Share of rounds that began with a draft that was there when the outcome before was known."""
    completions = list(completions)
    rounds = _by_origin(completions)
    hits = sum(counts.rounds for origin, counts in rounds.items() if origin in EARLY_ORIGINS)
    return _ratio(hits, sum(item.num_rounds for item in completions))


def rerooted_tokens(completions: Iterable[Completion]) -> float:
    """Share of the tokens that were accepted from drafts which came late and were re-rooted."""
    completions = list(completions)
    rerooted = _by_origin(completions).get("rerooted", OriginCounts(0, 0))
    return _ratio(rerooted.accepted_tokens, sum(len(item.token_ids) for item in completions))


def mean_acceptance_length(completions: Iterable[Completion]) -> float:
    """Tokens committed per round, the target's own token included."""
    completions = list(completions)
    return _ratio(sum(len(item.token_ids) for item in completions), sum(item.num_rounds for item in completions))


def median_ttft_ms(completions: Iterable[Completion]) -> float:
    """Median time to the first token."""
    return 1000 * median(item.ttft_s for item in completions)


def acceptance_by_depth(completions: Iterable[Completion]) -> list[float]:
    """For each depth, the share of rounds with a tree that deep that accepted that many nodes or more."""
    speculations = [item.speculation for item in completions if item.speculation is not None]
    drafted = sum_columns(item.drafted_by_depth for item in speculations)
    accepted = sum_columns(item.accepted_by_depth for item in speculations)
    return [_ratio(taken, offered) for taken, offered in zip_longest(accepted, drafted, fillvalue=0) if offered]


def drafted_share(completions: Iterable[Completion]) -> float | None:
    """Share of rounds that had a draft to verify; None for contenders that report no speculation."""
    completions = [item for item in completions if item.speculation is not None]
    if not completions:
        return None
    drafted = sum_columns(item.speculation.drafted_by_depth[:1] for item in completions if item.speculation)
    return _ratio(sum(drafted), sum(item.num_rounds for item in completions))


def ms_per_pass_by_rows(completions: Iterable[Completion]) -> dict[str, dict[str, float]]:
    """Count and mean milliseconds of the target's passes by their number of rows; prefill counts too."""
    totals: dict[int, PassTime] = {}
    for completion in completions:
        for rows, item in completion.passes.items():
            old = totals.get(rows, PassTime(0, 0.0))
            totals[rows] = PassTime(old.count + item.count, old.total_s + item.total_s)
    return {
        str(rows): {"count": item.count, "mean_ms": round(1000 * _ratio(item.total_s, item.count), 4)}
        for rows, item in sorted(totals.items())
    }


def draft_counts(completions: Iterable[Completion]) -> dict[str, Any]:
    """Sums of what speculation did; empty for contenders that report none."""
    completions = list(completions)
    speculations = [item.speculation for item in completions if item.speculation is not None]
    if not speculations:
        return {}
    sources: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for speculation in speculations:
        for name, (proposed, accepted) in speculation.sources.items():
            sources[name][0] += proposed
            sources[name][1] += accepted
    names = ("draft_tokens", "accepted_tokens", "redraft_tokens", "stale_drafts")
    counts: dict[str, Any] = {name: sum(getattr(item, name) for item in speculations) for name in names}
    counts["rounds_drafted_by_depth"] = sum_columns(item.drafted_by_depth for item in speculations)
    counts["rounds_accepted_by_depth"] = sum_columns(item.accepted_by_depth for item in speculations)
    counts["sources"] = {
        name: {"proposed": proposed, "accepted": accepted} for name, (proposed, accepted) in sources.items()
    }
    counts["expected_outcomes"] = sum(item.expected_outcomes for item in speculations)
    counts["outcomes_inside_expected"] = sum(item.outcomes_inside_expected for item in speculations)
    counts["draft_ahead_hits_by_rank"] = sum_columns(item.draft_ahead_hits_by_rank for item in speculations)
    counts["origins"] = {
        name: {"rounds": one.rounds, "accepted": one.accepted_tokens} for name, one in _by_origin(completions).items()
    }
    return counts


def repeated_4grams(token_ids: Iterable[Sequence[int]]) -> float:
    """Share of 4-grams that occurred before in the same output, over all outputs."""
    total = repeated = 0
    for output in token_ids:
        grams = [tuple(output[start : start + NGRAM]) for start in range(len(output) - NGRAM + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return _ratio(repeated, total)


def sum_columns(rows: Iterable[Sequence[int]]) -> list[int]:
    """Entry by entry sums of lists of different lengths."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _by_origin(completions: Iterable[Completion]) -> dict[str, OriginCounts]:
    """Rounds and accepted tokens by when their drafts were made."""
    sums: dict[str, OriginCounts] = {}
    for item in completions:
        for name, counts in item.speculation.origins.items() if item.speculation else ():
            old = sums.get(name, OriginCounts(0, 0))
            sums[name] = OriginCounts(old.rounds + counts.rounds, old.accepted_tokens + counts.accepted_tokens)
    return sums


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
