"""From the events of four processes to rounds: when each thing happened that a round consists of.

verifier ─outcome─▶ orchestrator ─outcome─▶ drafter ─tree─▶ orchestrator ─draft─▶ verifier ─pass─▶ the next outcome
                         └─ delta ─▶ client
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coppice.obs.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class Watched:
    """What each process kept. One request at a time, one drafter, one verifier."""

    client: Sequence[TimelineEvent]
    orchestrator: Sequence[TimelineEvent]
    drafter: Sequence[TimelineEvent]
    verifier: Sequence[TimelineEvent]


@dataclass(frozen=True, slots=True)
class Round:
    """One round, in microseconds of the machine's clock: from an outcome's leaving of the verifier to the next one's.

    None: it did not happen in this round. A round whose tree was left over from the last one, or came late, has its
    pass before its draft.
    """

    # Committed tokens that it starts from, and how many it commits.
    length: int
    num_tokens: int
    outcome_left: float
    outcome_came: float | None
    drafter_told: float | None
    drafter_heard: float | None
    draft_began: float | None
    draft_ended: float | None
    tree_left: float | None
    tree_came: float | None
    draft_left: float | None
    draft_came: float | None
    pass_began: float
    pass_ended: float
    # The next outcome's leaving; this round's end.
    ended: float
    # Its tokens' way to the client.
    delta_left: float | None
    delta_came: float | None

    @property
    def waited_us(self) -> float:
        """How long nothing kept the verifier from the pass but that there was no draft yet."""
        until = self.pass_began if self.draft_came is None else min(self.draft_came, self.pass_began)
        return max(until - self.outcome_left, 0.0)

    @property
    def has_draft(self) -> bool:
        """Whether its own draft was there when its pass began."""
        return self.draft_came is not None and self.draft_came <= self.pass_began


def rounds_of(watched: Watched) -> list[list[Round]]:
    """Every request's rounds, in order; the first outcome, which ends the prompt, is no round here."""
    opened = [event for event in watched.orchestrator if event.what == "verifier.open.out"]
    borders = [event.at_us for event in opened[1:]] + [float("inf")]
    requests = []
    for opening, until_us in zip(opened, borders, strict=True):
        window = opening.at_us, until_us
        # Its opening comes before the verifier's, outside of the window.
        drafting = _named(watched.orchestrator, "drafter.outcome.out", window)
        drafted = drafting[0].sequence if drafting else None
        requests.append(_Request(watched, window, opening.sequence, drafted).rounds())
    return requests


class _Request:
    """One request's events, by kind and by committed length."""

    def __init__(self, watched: Watched, window: tuple[float, float], verified: int, drafted: int | None) -> None:
        self._outcomes = _of(_named(watched.verifier, "orchestrator.outcome.out", window), verified)
        passes = _named(watched.verifier, "pass", window)
        self._passes = [one for one in passes if verified in one.sequences]
        self._pass_ends = [one.end_us for one in self._passes]
        self._came = _by_base(_of(_named(watched.orchestrator, "verifier.outcome.in", window), verified))
        self._draft_left = _by_base(_of(_named(watched.orchestrator, "verifier.draft.out", window), verified))
        self._draft_came = _by_base(_of(_named(watched.verifier, "orchestrator.draft.in", window), verified))
        self._told = _of(_named(watched.orchestrator, "drafter.outcome.out", window), drafted)
        self._heard = _of(_named(watched.drafter, "orchestrator.outcome.in", window), drafted)
        self._drafts = _of(_named(watched.drafter, "draft", window), drafted)
        self._draft_ends = [one.end_us for one in self._drafts]
        self._tree_left = _by_base(_of(_named(watched.drafter, "orchestrator.tree.out", window), drafted))
        self._tree_came = _by_base(_of(_named(watched.orchestrator, "drafter.tree.in", window), drafted))
        self._delta_left = [one.at_us for one in _named(watched.orchestrator, "client.delta.out", window)]
        self._delta_came = [one.at_us for one in _named(watched.client, "delta", window)]

    def rounds(self) -> list[Round]:
        found = [self._round(before, after) for before, after in pairwise(self._outcomes)]
        return [one for one in found if one is not None]

    def _round(self, before: TimelineEvent, after: TimelineEvent) -> Round | None:
        at = bisect_right(self._pass_ends, after.at_us) - 1
        if at < 0:
            return None
        run = self._passes[at]
        length = after.base
        came = self._came.get(before.base)
        tree_left = self._tree_left.get(length)
        drafted = self._draft_before(tree_left)
        delta_left = _next(self._delta_left, self._came.get(length))
        return Round(
            length=length,
            num_tokens=after.size,
            outcome_left=before.at_us,
            outcome_came=came,
            drafter_told=_first_at(self._told, before.base, length),
            drafter_heard=_first_at(self._heard, before.base, length),
            draft_began=None if drafted is None else drafted.at_us,
            draft_ended=None if drafted is None else drafted.end_us,
            tree_left=tree_left,
            tree_came=self._tree_came.get(length),
            draft_left=self._draft_left.get(length),
            draft_came=self._draft_came.get(length),
            pass_began=run.at_us,
            pass_ended=run.end_us,
            ended=after.at_us,
            delta_left=delta_left,
            delta_came=_next(self._delta_came, delta_left),
        )

    def _draft_before(self, tree_left: float | None) -> TimelineEvent | None:
        """The draft that a tree is the result of: the last that had ended when the tree left."""
        at = -1 if tree_left is None else bisect_right(self._draft_ends, tree_left) - 1
        return self._drafts[at] if at >= 0 else None


def _named(events: Iterable[TimelineEvent], what: str, window: tuple[float, float]) -> list[TimelineEvent]:
    return [event for event in events if event.what == what and window[0] <= event.at_us < window[1]]


def _of(events: Iterable[TimelineEvent], sequence: int | None) -> list[TimelineEvent]:
    return [event for event in events if event.sequence == sequence]


def _by_base(events: Iterable[TimelineEvent]) -> dict[int, float]:
    """When the first message for each committed length passed."""
    found: dict[int, float] = {}
    for event in events:
        found.setdefault(event.base, event.at_us)
    return found


def _first_at(events: Iterable[TimelineEvent], base: int, length: int) -> float | None:
    """When the message passed that tells of the tokens up to `length`, be they those behind `base` or more."""
    return next((one.at_us for one in events if one.base <= base and one.base + one.size == length), None)


def _next(times: Sequence[float], after: float | None) -> float | None:
    at = len(times) if after is None else bisect_left(times, after)
    return times[at] if at < len(times) else None


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
    began, ended = getattr(one, start), getattr(one, end)
    return began is not None and ended is not None and ended >= began


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]
