"""The timeline: requests one after another, the events that services kept of them, where the time of a round goes.

verifier ─outcome─▶ orchestrator ─outcome─▶ drafter ─tree─▶ orchestrator ─draft─▶ verifier ─pass─▶ the next outcome
                         └─ delta ─▶ client
"""

from __future__ import annotations

import math
import statistics
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from coppice.cli.topology import TopologySpec
from coppice.client import Client, RequestFailedError
from coppice.lab.bench.client import Mode, Policy, Task, model_info
from coppice.lab.bench.comparison import Setup
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios, known
from coppice.lab.bench.harness.report import Report, Shown, document
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.services import kept_events, measure_on, start_all
from coppice.obs.timeline import VARIABLE, Timeline, TimelineEvent

# No sequence's number.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Watched:
    """What each process kept. One request at a time, one drafter, one verifier."""

    client: Sequence[TimelineEvent]
    orchestrator: Sequence[TimelineEvent]
    drafter: Sequence[TimelineEvent]
    verifier: Sequence[TimelineEvent]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the committed tokens that it starts from, how many it commits, and when what happened.

    `at` has microseconds of the machine's clock, from `outcome_left`, an outcome's leaving of the verifier, to `ended`,
    the next one's. What did not happen in this round is not there. A round whose tree was left over from the last one,
    or came late, has its pass before its draft.
    """

    length: int
    num_tokens: int
    at: Mapping[str, float]

    def us(self, start: str, end: str) -> float | None:
        """From one thing to another; None where one of them did not happen, or they came the other way round."""
        took = self.at[end] - self.at[start] if start in self.at and end in self.at else -1.0
        return None if took < 0 else took

    @property
    def waited_us(self) -> float:
        """How long nothing kept the verifier from the pass but that there was no draft yet."""
        until = min(self.at.get("draft_came", math.inf), self.at["pass_began"])
        return max(until - self.at["outcome_left"], 0.0)

    @property
    def has_draft(self) -> bool:
        """Whether its own draft was there when its pass began."""
        return self.us("draft_came", "pass_began") is not None


def rounds_of(watched: Watched) -> list[list[Round]]:
    """Every request's rounds, in order; the first outcome, which ends the prompt, is no round here."""
    opened = [event for event in watched.orchestrator if event.what == "verifier.open.out"]
    borders = [event.at_us for event in opened[1:]] + [float("inf")]
    return [_request(watched, opening, until_us) for opening, until_us in zip(opened, borders, strict=True)]


def _request(watched: Watched, opening: TimelineEvent, until_us: float) -> list[Round]:
    """The rounds of the request that was opened so."""

    def named(of: Sequence[TimelineEvent], what: str, sequence: int | None = None) -> list[TimelineEvent]:
        return [
            event
            for event in of
            if event.what == what and opening.at_us <= event.at_us < until_us and sequence in (None, event.sequence)
        ]

    def by_base(of: Sequence[TimelineEvent], what: str, sequence: int) -> dict[int, float]:
        """When the first message for each committed length passed."""
        return {event.base: event.at_us for event in reversed(named(of, what, sequence))}

    verified, told = opening.sequence, named(watched.orchestrator, "drafter.outcome.out")
    # Its opening comes before the verifier's, outside of the window.
    drafted = told[0].sequence if told else NOBODY
    told = [event for event in told if event.sequence == drafted]
    outcomes = named(watched.verifier, "orchestrator.outcome.out", verified)
    passes = [one for one in named(watched.verifier, "pass") if verified in one.sequences]
    outcome_came = by_base(watched.orchestrator, "verifier.outcome.in", verified)
    draft_left = by_base(watched.orchestrator, "verifier.draft.out", verified)
    draft_came = by_base(watched.verifier, "orchestrator.draft.in", verified)
    heard = named(watched.drafter, "orchestrator.outcome.in", drafted)
    drafts = named(watched.drafter, "draft", drafted)
    trees_left = by_base(watched.drafter, "orchestrator.tree.out", drafted)
    tree_came = by_base(watched.orchestrator, "drafter.tree.in", drafted)
    deltas_left = [one.at_us for one in named(watched.orchestrator, "client.delta.out")]
    deltas_came = [one.at_us for one in named(watched.client, "delta")]
    found = []
    for before, after in pairwise(outcomes):
        run, length = _last_ended(passes, after.at_us), after.base
        if run is None:
            continue
        tree_left = trees_left.get(length)
        # The draft that a tree is the result of: the last that had ended when the tree left.
        draft = None if tree_left is None else _last_ended(drafts, tree_left)
        delta_left = _next(deltas_left, outcome_came.get(length))
        times = {
            "outcome_left": before.at_us,
            "outcome_came": outcome_came.get(before.base),
            "drafter_told": _first_at(told, before.base, length),
            "drafter_heard": _first_at(heard, before.base, length),
            "draft_began": None if draft is None else draft.at_us,
            "draft_ended": None if draft is None else draft.end_us,
            "tree_left": tree_left,
            "tree_came": tree_came.get(length),
            "draft_left": draft_left.get(length),
            "draft_came": draft_came.get(length),
            "pass_began": run.at_us,
            "pass_ended": run.end_us,
            "ended": after.at_us,
            "delta_left": delta_left,
            "delta_came": _next(deltas_came, delta_left),
        }
        at = {name: time for name, time in times.items() if time is not None}
        found.append(Round(length, after.size, at))
    return found


def _last_ended(events: Sequence[TimelineEvent], at_us: float) -> TimelineEvent | None:
    """The last of events, in the order in which they ended, that had by then."""
    at = bisect_right(events, at_us, key=lambda one: one.end_us) - 1
    return events[at] if at >= 0 else None


def _first_at(events: Iterable[TimelineEvent], base: int, length: int) -> float | None:
    """When the message passed that tells of the tokens up to `length`, be they those after `base` or more."""
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
        times = sorted(known(one.us(start, end) for one in rounds))
        row: dict[str, Any] = {"name": name, "rounds": len(times)}
        if times:
            p90 = times[round(0.9 * (len(times) - 1))]
            row |= {"us_p50": round(statistics.median(times), 1), "us_p90": round(p90, 1)}
        rows.append(row)
    return rows


def ratios(requests: Sequence[Sequence[Round]]) -> dict[str, float]:
    """What the rounds of all requests come to.

    `forward-share`: of the time between outcomes, that inside the target's forward; `waiting-share`: that in which the
    verifier had no draft to begin with. `bubble_ms`: the median time from one pass's end to the next one's beginning.
    `drafted-share`: of the rounds, those whose own draft was there when their pass began.
    """
    rounds = [one for request in requests for one in request]
    round_us = [one.at["ended"] - one.at["outcome_left"] for one in rounds]
    wall_us = sum(round_us)
    bubbles = [two.at["pass_began"] - one.at["pass_ended"] for request in requests for one, two in pairwise(request)]
    return {
        "forward-share": sum(one.at["pass_ended"] - one.at["pass_began"] for one in rounds) / wall_us,
        "waiting-share": sum(one.waited_us for one in rounds) / wall_us,
        "drafted-share": sum(one.has_draft for one in rounds) / len(rounds),
        "bubble_ms": statistics.median(bubbles) / 1000,
        "waiting_ms": statistics.median([one.waited_us for one in rounds]) / 1000,
        "round_ms": statistics.median(round_us) / 1000,
        "tokens-per-round": sum(one.num_tokens for one in rounds) / len(rounds),
    }


NUM_WARM_UP_REQUESTS = 2

SHOWN = Shown(
    tables=(Table("One round, hop by hop: microseconds", "us_p50 us_p90 rounds"),), ratio_title="Over all rounds"
)


async def measure_timeline(setup: Setup, spec: TopologySpec) -> Report:
    """The report of requests one after another.

    Services keep their events; there is no prefix cache, which would draft next to the drafter.

    Raises BenchmarkError if a request failed or had no rounds, ChildError if a service did not start, or ended.
    """
    machine, plan = describe_machine(), setup.plan
    with tempfile.TemporaryDirectory() as name:
        directory, client = Path(name), Timeline(Path(name) / "client")
        spec = replace(spec, env={**spec.env, VARIABLE: name, "CACHE_DRAFTER": "false"})
        await measure_on(spec, start_all, lambda topology: _ask(setup, client, topology.address))
        services = ("orchestrator", "drafter", "verifier")
        watched = Watched(client.events(), *(kept_events(directory, service) for service in services))
    requests = counted_rounds(watched)
    settings = {
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperatures[0],
        "seed": plan.seed,
        "prompts": [one.origin for one in setup.prompts],
    }
    rows = hop_rows([one for rounds in requests for one in rounds])
    return document("timeline", machine, settings, rows, Ratios(ratios(requests), {}))


async def _ask(setup: Setup, kept: Timeline, address: str) -> None:
    """Send every prompt in its turn, after a warm-up, and keep when the client's deltas come."""
    plan, policy = setup.plan, Policy("timeline", Mode.MODE_FORCED)
    async with Client(address) as client:
        encoded, _ = setup.encoded((await model_info(client)).max_context_tokens)
        for number, prompt_ids in enumerate([*encoded[:1] * NUM_WARM_UP_REQUESTS, *encoded]):
            task = Task(tuple(prompt_ids), plan.max_tokens, plan.temperatures[0], plan.seed)
            try:
                async for chunk in client.stream_request(policy.message(task)):
                    kept.mark("delta", size=len(chunk.token_ids))
            except RequestFailedError as error:
                raise BenchmarkError(f"request {number} failed: {error}") from error


def counted_rounds(watched: Watched) -> list[list[Round]]:
    """The rounds of each request after the warm-up. Raises BenchmarkError if there are none."""
    requests = [rounds for rounds in rounds_of(watched)[NUM_WARM_UP_REQUESTS:] if len(rounds) > 1]
    if not requests:
        raise BenchmarkError("no request had two rounds: take more tokens")
    return requests
