"""Figures of a set of completions: rates, shares and lists, each a function of completions alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from statistics import median
from typing import Any, TypeAlias

from coppice.completion import OriginCounts, SourceCounts, Speculation
from coppice.lab.bench.contenders import Completion, PassTime

Completions: TypeAlias = Sequence[Completion]
Figure: TypeAlias = Callable[[Completions], float]

NGRAM = 4
# Drafts that were there when the outcome was known which they continue.
EARLY_ORIGINS = ("left_over", "rerooted", "ahead", "redraft")


def tokens_per_s(completions: Completions) -> float:
    """All tokens over all wall time, prefill and transport included."""
    return _ratio(num_tokens(completions), _sum(completions, "wall_s"))


def num_tokens(completions: Completions) -> int:
    """Tokens of all completions."""
    return sum(len(item.token_ids) for item in completions)


def forward_share(completions: Completions) -> float:
    """Share of the wall time inside the target's forward."""
    return _ratio(_sum(completions, "forward_s"), _sum(completions, "wall_s"))


def linger_share(completions: Completions) -> float:
    """Share of the wall time that the verifier waited for drafts."""
    return _ratio(_sum(completions, "linger_s"), _sum(completions, "wall_s"))


def bubble_ms(completions: Completions) -> float:
    """Milliseconds per round between two passes, of a sequence that is alone."""
    return 1000 * _ratio(_sum(completions, "bubble_s"), _sum(completions, "num_rounds"))


def draft_ahead_hits(completions: Completions) -> float:
    """Share of expected rounds with a draft for their outcome before it was known.

    Drafted ahead for outcomes that left the expected tree, or that tree itself where a round ended inside it.
    """
    found = _speculations(completions)
    hits = sum(sum(item.draft_ahead_hits_by_rank) + item.outcomes_inside_expected for item in found)
    return _ratio(hits, sum(item.expected_outcomes for item in found))


def guessed_outcomes(completions: Completions) -> float:
    """Share of the outcomes that left an expected tree that were drafted for before they were known."""
    found = _speculations(completions)
    hits = sum(sum(item.draft_ahead_hits_by_rank) for item in found)
    return _ratio(hits, sum(item.expected_outcomes - item.outcomes_inside_expected for item in found))


def early_drafts(completions: Completions) -> float:
    """Share of rounds that began with a draft that was there when the outcome before was known."""
    hits = sum(counts.rounds for origin, counts in _by_origin(completions).items() if origin in EARLY_ORIGINS)
    return _ratio(hits, _sum(completions, "num_rounds"))


def rerooted_tokens(completions: Completions) -> float:
    """Share of the tokens that were accepted from drafts which came late and were re-rooted."""
    rerooted = _by_origin(completions).get("rerooted", OriginCounts())
    return _ratio(rerooted.accepted_tokens, num_tokens(completions))


def mean_acceptance_length(completions: Completions) -> float:
    """Tokens committed per round, the target's own token included."""
    return _ratio(num_tokens(completions), _sum(completions, "num_rounds"))


def median_ttft_ms(completions: Completions) -> float:
    """Median time to the first token."""
    return 1000 * median(item.ttft_s for item in completions)


# Fields of a row that are no more than a figure.
SHARES: Mapping[str, Figure] = {
    "forward_share": forward_share,
    "linger_share": linger_share,
    "bubble_ms": bubble_ms,
    "draft_ahead_hits": draft_ahead_hits,
    "guessed_outcomes": guessed_outcomes,
    "early_drafts": early_drafts,
}


def acceptance_by_depth(completions: Completions) -> list[float]:
    """For each depth, the share of rounds with a tree that deep that accepted that many nodes or more."""
    drafted = sum_columns(item.rounds_drafted_by_depth for item in _speculations(completions))
    accepted = sum_columns(item.rounds_accepted_by_depth for item in _speculations(completions))
    return [_ratio(taken, offered) for taken, offered in zip_longest(accepted, drafted, fillvalue=0) if offered]


def drafted_share(completions: Completions) -> float | None:
    """Share of rounds that had a draft to verify; None for contenders that report no speculation."""
    if not (found := _speculations(completions)):
        return None
    drafted = sum(sum(item.rounds_drafted_by_depth[:1]) for item in found)
    return _ratio(drafted, sum(item.num_rounds for item in completions if item.speculation is not None))


def ms_per_pass_by_rows(completions: Completions) -> dict[str, dict[str, float]]:
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


def draft_counts(completions: Completions) -> dict[str, Any]:
    """Sums of what speculation did; empty for contenders that report none."""
    if not (found := _speculations(completions)):
        return {}
    sources: dict[str, SourceCounts] = {}
    for speculation in found:
        for name, one in speculation.sources.items():
            old = sources.get(name, SourceCounts())
            sources[name] = SourceCounts(old.proposed + one.proposed, old.accepted + one.accepted)
    names = ("draft_tokens", "accepted_tokens", "redraft_tokens", "stale_drafts")
    return {
        **{name: sum(getattr(item, name) for item in found) for name in names},
        "rounds_drafted_by_depth": sum_columns(item.rounds_drafted_by_depth for item in found),
        "rounds_accepted_by_depth": sum_columns(item.rounds_accepted_by_depth for item in found),
        "sources": {name: asdict(one) for name, one in sources.items()},
        "expected_outcomes": sum(item.expected_outcomes for item in found),
        "outcomes_inside_expected": sum(item.outcomes_inside_expected for item in found),
        "draft_ahead_hits_by_rank": sum_columns(item.draft_ahead_hits_by_rank for item in found),
        "origins": {
            name: {"rounds": one.rounds, "accepted": one.accepted_tokens}
            for name, one in _by_origin(completions).items()
        },
    }


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


def _speculations(completions: Completions) -> list[Speculation]:
    return [item.speculation for item in completions if item.speculation is not None]


def _by_origin(completions: Completions) -> dict[str, OriginCounts]:
    """Rounds and accepted tokens by when their drafts were made."""
    sums: dict[str, OriginCounts] = {}
    for item in _speculations(completions):
        for name, counts in item.origins.items():
            old = sums.get(name, OriginCounts())
            sums[name] = OriginCounts(
                old.rounds + counts.rounds,
                old.draft_tokens + counts.draft_tokens,
                old.accepted_tokens + counts.accepted_tokens,
            )
    return sums


def _sum(completions: Completions, field: str) -> float:
    return float(sum(getattr(item, field) for item in completions))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
