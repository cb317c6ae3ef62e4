"""Figures of answers: rates, shares and lists, each a function of answers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from statistics import median
from typing import Any, TypeAlias

from coppice.completion import Completion, OriginCounts, SourceCounts, Speculation
from coppice.lab.bench.client import Answer
from coppice.lab.bench.harness.experiment import quotient

Figure: TypeAlias = Callable[[Sequence[Answer]], float | None]

NGRAM = 4
# Above this share of repeated 4-grams an output mostly copies itself.
LOOPING_SHARE = 0.3
# Drafts that were there when the outcome was known which they continue.
EARLY_ORIGINS = ("left_over", "rerooted", "ahead", "redraft")


def num_tokens(answers: Iterable[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


def num_rounds(answers: Iterable[Answer]) -> int:
    """Rounds of completed requests."""
    return sum(one.speculation.rounds for one in completions(answers))


def completions(answers: Iterable[Answer]) -> list[Completion]:
    """What the server says of completed requests."""
    return [answer.completion for answer in answers if answer.completion is not None]


def forward_share(answers: Sequence[Answer]) -> float:
    """Share of the requests' time inside the target's forward."""
    return _ratio(_total(answers, "forward_ms") / 1000, _time_s(answers))


def linger_share(answers: Sequence[Answer]) -> float:
    """Share of the requests' time that the verifier waited for drafts."""
    return _ratio(_total(answers, "linger_ms") / 1000, _time_s(answers))


def bubble_ms(answers: Sequence[Answer]) -> float:
    """Milliseconds per round between two passes, of a sequence that is alone."""
    return _ratio(_total(answers, "bubble_ms"), num_rounds(answers))


def draft_ahead_hits(answers: Sequence[Answer]) -> float:
    """Share of expected rounds with a draft for their outcome before it was known.

    Drafted ahead for outcomes that left the expected tree, or that tree itself where a round ended inside it.
    """
    found = _speculations(answers)
    hits = sum(sum(item.draft_ahead_hits_by_rank) + item.outcomes_inside_expected for item in found)
    return _ratio(hits, sum(item.expected_outcomes for item in found))


def guessed_outcomes(answers: Sequence[Answer]) -> float:
    """Share of the outcomes that left an expected tree that were drafted for before they were known."""
    found = _speculations(answers)
    hits = sum(sum(item.draft_ahead_hits_by_rank) for item in found)
    return _ratio(hits, sum(item.expected_outcomes - item.outcomes_inside_expected for item in found))


def early_drafts(answers: Sequence[Answer]) -> float:
    """Share of rounds that began with a draft that was there when the outcome before was known."""
    hits = sum(counts.rounds for origin, counts in _by_origin(answers).items() if origin in EARLY_ORIGINS)
    return _ratio(hits, num_rounds(answers))


def rerooted_tokens(answers: Sequence[Answer]) -> float:
    """Share of the tokens that were accepted from drafts which came late and were re-rooted."""
    rerooted = _by_origin(answers).get("rerooted", OriginCounts())
    return _ratio(rerooted.accepted_tokens, num_tokens(answers))


def mean_acceptance_length(answers: Iterable[Answer]) -> float | None:
    """Tokens committed per round of completed requests, the target's own included; None where there was no round."""
    ended = [answer for answer in answers if answer.completion is not None]
    return quotient(num_tokens(ended), num_rounds(ended))


def nodes_per_round(answers: Iterable[Answer]) -> float | None:
    """Draft nodes verified per round of completed requests; None where there was no round."""
    counts = [one.speculation for one in completions(answers)]
    return quotient(sum(count.draft_tokens for count in counts), sum(count.rounds for count in counts))


def rows_per_pass(answers: Iterable[Answer]) -> float | None:
    """Rows of a pass as completed requests saw them: a pass counts once for each that took part in it."""
    passes = [one for completion in completions(answers) for one in completion.timing.passes]
    return quotient(sum(one.rows * one.count for one in passes), sum(one.count for one in passes))


def median_ttft_s(answers: Iterable[Answer]) -> float | None:
    """Median time to the first token; None where none came."""
    times = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return median(times) if times else None


# Fields of a row that are no more than a figure.
SHARES: Mapping[str, Callable[[Sequence[Answer]], float]] = {
    "forward_share": forward_share,
    "linger_share": linger_share,
    "bubble_ms": bubble_ms,
    "draft_ahead_hits": draft_ahead_hits,
    "guessed_outcomes": guessed_outcomes,
    "early_drafts": early_drafts,
}


def acceptance_by_depth(answers: Sequence[Answer]) -> list[float]:
    """For each depth, the share of rounds with a tree that deep that accepted that many nodes or more."""
    drafted = _columns(answers, "rounds_drafted_by_depth")
    accepted = _columns(answers, "rounds_accepted_by_depth")
    return [_ratio(taken, offered) for taken, offered in zip_longest(accepted, drafted, fillvalue=0) if offered]


def drafted_share(answers: Sequence[Answer]) -> float | None:
    """Share of rounds that had a draft to verify; None where they are not counted."""
    found = _speculations(answers)
    return quotient(sum(sum(item.rounds_drafted_by_depth[:1]) for item in found), sum(item.rounds for item in found))


def ms_per_pass_by_rows(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Count and mean milliseconds of the target's passes by their number of rows; prefill counts too."""
    totals: dict[int, tuple[int, float]] = {}
    for completion in completions(answers):
        for one in completion.timing.passes:
            count, total_ms = totals.get(one.rows, (0, 0.0))
            totals[one.rows] = count + one.count, total_ms + one.total_ms
    return {
        str(rows): {"count": count, "mean_ms": round(_ratio(total_ms, count), 4)}
        for rows, (count, total_ms) in sorted(totals.items())
    }


def draft_counts(answers: Sequence[Answer]) -> dict[str, Any]:
    """Sums of what speculation did; empty where it is not counted."""
    if not (found := _speculations(answers)):
        return {}
    sources: dict[str, SourceCounts] = {}
    for speculation in found:
        for name, one in speculation.sources.items():
            old = sources.get(name, SourceCounts())
            sources[name] = SourceCounts(old.proposed + one.proposed, old.accepted + one.accepted)
    sums = ("draft_tokens", "accepted_tokens", "redraft_tokens", "stale_drafts")
    lists = ("rounds_drafted_by_depth", "rounds_accepted_by_depth", "draft_ahead_hits_by_rank")
    return {
        **{name: sum(getattr(item, name) for item in found) for name in sums},
        **{name: _columns(answers, name) for name in lists},
        "sources": {name: asdict(one) for name, one in sources.items()},
        "expected_outcomes": sum(item.expected_outcomes for item in found),
        "outcomes_inside_expected": sum(item.outcomes_inside_expected for item in found),
        "origins": {
            name: {"rounds": one.rounds, "accepted": one.accepted_tokens} for name, one in _by_origin(answers).items()
        },
    }


def repeated_4grams(answers: Iterable[Answer]) -> float:
    """Share of 4-grams that occurred before in the same output, over all outputs."""
    total = repeated = 0
    for output in (answer.token_ids for answer in answers):
        grams = [output[start : start + NGRAM] for start in range(len(output) - NGRAM + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return _ratio(repeated, total)


def _speculations(answers: Iterable[Answer]) -> list[Speculation]:
    return [one.speculation for one in completions(answer for answer in answers if answer.counts_drafts)]


def _columns(answers: Iterable[Answer], field: str) -> list[int]:
    """Entry by entry sums of lists of different lengths."""
    lists = [getattr(item, field) for item in _speculations(answers)]
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _by_origin(answers: Iterable[Answer]) -> dict[str, OriginCounts]:
    """Rounds and tokens by when their drafts were made."""
    sums: dict[str, OriginCounts] = {}
    for item in _speculations(answers):
        for name, counts in item.origins.items():
            old = sums.get(name, OriginCounts())
            sums[name] = OriginCounts(
                old.rounds + counts.rounds,
                old.draft_tokens + counts.draft_tokens,
                old.accepted_tokens + counts.accepted_tokens,
            )
    return sums


def _total(answers: Iterable[Answer], field: str) -> float:
    return float(sum(getattr(one.timing, field) for one in completions(answers)))


def _time_s(answers: Iterable[Answer]) -> float:
    return sum(answer.ended_s - answer.sent_s for answer in answers)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
