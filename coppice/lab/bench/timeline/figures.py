"""Rounds as rows: the median of each hop, and how much of the time nobody verifies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from coppice.lab.bench.timeline.rounds import Round

# Each hop of a round in the order in which they come: its name, and the round's times that it lies between.
HOPS = (
    ("outcome to the orchestrator", "outcome_left", "outcome_came"),
    ("orchestrator, to the drafter", "outcome_came", "drafter_told"),
    ("outcome to the drafter", "drafter_told", "drafter_heard"),
    ("drafter, until it drafts", "drafter_heard", "draft_began"),
    ("draft", "draft_began", "draft_ended"),
    ("drafter, until the tree leaves", "draft_ended", "tree_left"),
    ("tree to the orchestrator", "tree_left", "tree_came"),
    ("orchestrator, to the verifier", "tree_came", "draft_left"),
    ("draft to the verifier", "draft_left", "draft_came"),
    ("verifier, until the pass", "draft_came", "pass_began"),
    ("pass", "pass_began", "pass_ended"),
    ("verifier, until the outcome leaves", "pass_ended", "ended"),
    ("delta to the client", "delta_left", "delta_came"),
)


def hop_rows(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Each hop's time in microseconds, over the rounds in which it happened the usual way round."""
    rows = []
    for name, start, end in HOPS:
        times = [getattr(one, end) - getattr(one, start) for one in rounds if _is_hop(one, start, end)]
        row: dict[str, Any] = {"name": name, "rounds": len(times)}
        if times:
            row |= {"us_p50": round(statistics.median(times), 1), "us_p90": round(_quantile(times, 0.9), 1)}
        rows.append(row)
    return rows


def ratios(requests: Sequence[Sequence[Round]]) -> dict[str, float]:
    """What the rounds of all requests come to.

    `forward-share`: of the time between outcomes, that inside the target's forward; `waiting-share`: that in which the
    verifier had no draft to begin with. `bubble_ms`: the median time from one pass's end to the next one's beginning.
    `drafted-share`: of the rounds, those whose own draft was there when their pass began.
    """
    rounds = [one for request in requests for one in request]
    wall_us = sum(one.ended - one.outcome_left for one in rounds)
    bubbles = [after.pass_began - before.pass_ended for request in requests for before, after in pairwise(request)]
    return {
        "forward-share": sum(one.pass_ended - one.pass_began for one in rounds) / wall_us,
        "waiting-share": sum(one.waited_us for one in rounds) / wall_us,
        "drafted-share": sum(one.has_draft for one in rounds) / len(rounds),
        "bubble_ms": statistics.median(bubbles) / 1000,
        "waiting_ms": statistics.median([one.waited_us for one in rounds]) / 1000,
        "round_ms": statistics.median([one.ended - one.outcome_left for one in rounds]) / 1000,
        "tokens-per-round": sum(one.num_tokens for one in rounds) / len(rounds),
    }


def shown_rounds(requests: Sequence[Sequence[Round]], number: int) -> Sequence[Round]:
    """So many rounds in a row from the middle of the longest request, where nothing is unusual any more."""
    longest = max(requests, key=len)
    first = max(0, (len(longest) - number) // 2)
    return longest[first : first + number]


def _is_hop(one: Round, start: str, end: str) -> bool:
    times: Mapping[str, float | None] = {start: getattr(one, start), end: getattr(one, end)}
    began, ended = times[start], times[end]
    return began is not None and ended is not None and ended >= began


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]
