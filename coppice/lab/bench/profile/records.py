"""Records of what services did under load, by one clock of the machine, from the timelines that they keep."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coppice.lab.bench.services import kept_events
from coppice.obs.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One sequence's round in a pass: where it began, what it committed, and the draft nodes that it verified."""

    request_id: str
    base_length: int
    num_committed: int
    num_nodes: int

    @property
    def length(self) -> int:
        """Tokens committed when it was over."""
        return self.base_length + self.num_committed


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: the model computed from `started_s` to `ended_s`, and outcomes were on their way at `delivered_s`.

    `rounds` are those that ended with it, in the order in which they were told; other rows are a prompt's.
    """

    started_s: float
    ended_s: float
    delivered_s: float
    rows: int
    rounds: tuple[RoundRecord, ...]

    @property
    def pass_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class OpeningRecord:
    """A request's sequence was opened at the verifier."""

    request_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """A tree with nodes came to the verifier."""

    request_id: str
    base_length: int
    at_s: float


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """A draft after so many tokens, of which `num_new` came since the last one: asked for, begun, ended."""

    request_id: str
    base_length: int
    num_new: int
    asked_s: float
    started_s: float
    ended_s: float
    num_nodes: int


@dataclass(frozen=True, slots=True)
class CpuRecord:
    """The CPU time that the orchestrator's process had taken by then, in seconds."""

    at_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Records:
    """Of one topology's services, each kind in order of time."""

    passes: tuple[PassRecord, ...]
    openings: tuple[OpeningRecord, ...]
    trees: tuple[TreeRecord, ...]
    drafts: tuple[DraftRecord, ...]
    cpu: tuple[CpuRecord, ...]

    def within(self, start_s: float, end_s: float) -> Records:
        """Those that began in a part of the time."""
        return Records(
            tuple(one for one in self.passes if start_s <= one.started_s < end_s),
            tuple(one for one in self.openings if start_s <= one.at_s < end_s),
            tuple(one for one in self.trees if start_s <= one.at_s < end_s),
            tuple(one for one in self.drafts if start_s <= one.started_s < end_s),
            tuple(one for one in self.cpu if start_s <= one.at_s < end_s),
        )


def read_records(directory: Path, cpu: Sequence[CpuRecord]) -> Records:
    """Records of the timelines that verifier and drafter have written; raises BenchmarkError if one has not."""
    return records_of(kept_events(directory, "verifier"), kept_events(directory, "drafter"), cpu)


def records_of(
    verifier: Sequence[TimelineEvent], drafter: Sequence[TimelineEvent], cpu: Sequence[CpuRecord]
) -> Records:
    """Records of one stream of each service, of which events are named as `StreamTimeline` does."""
    passes: list[PassRecord] = []
    rounds: list[list[RoundRecord]] = []
    openings, trees, names = [], [], dict[int, str]()
    # Passes that each sequence took part in and that have no outcome yet: parts of its prompt, and what is on its way.
    pending: dict[int, deque[int]] = defaultdict(deque)
    for event in sorted(verifier, key=lambda one: one.end_us):
        name, at_s = names.get(event.sequence, ""), event.at_us / 1e6
        match event.what:
            case "orchestrator.open.in":
                names[event.sequence] = event.request_id
                openings.append(OpeningRecord(event.request_id, at_s))
            case "orchestrator.draft.in" if event.size:
                trees.append(TreeRecord(name, event.base, at_s))
            case "pass":
                for sequence in event.sequences:
                    pending[sequence].append(len(passes))
                passes.append(PassRecord(at_s, event.end_us / 1e6, event.end_us / 1e6, event.size, ()))
                rounds.append([])
            case "orchestrator.outcome.out":
                number = pending[event.sequence].popleft()
                while pending[event.sequence] and abs(1e6 * passes[number].pass_s - event.pass_us) > 1:
                    number = pending[event.sequence].popleft()
                rounds[number].append(RoundRecord(name, event.base, event.size, event.num_verified))
                passes[number] = replace(passes[number], delivered_s=at_s)
    # The model may begin again before the last outcome of a pass is on its way.
    begins_s = [*(one.started_s for one in passes[1:]), math.inf]
    ended = zip(passes, rounds, begins_s, strict=True)
    return Records(
        tuple(replace(one, delivered_s=min(one.delivered_s, s), rounds=tuple(each)) for one, each, s in ended),
        tuple(openings),
        tuple(trees),
        tuple(_drafts(drafter)),
        tuple(cpu),
    )


def _drafts(drafter: Sequence[TimelineEvent]) -> Iterator[DraftRecord]:
    names, known, opened_s = dict[int, str](), dict[int, int](), dict[int, float]()
    heard_s: dict[tuple[int, int], float] = {}
    made: dict[int, TimelineEvent] = {}
    for event in sorted(drafter, key=lambda one: one.end_us):
        sequence, at_s = event.sequence, event.at_us / 1e6
        match event.what:
            case "orchestrator.open.in":
                names[sequence], known[sequence], opened_s[sequence] = event.request_id, 0, at_s
            case "orchestrator.outcome.in":
                heard_s[sequence, event.base + event.size] = at_s
            case "draft":
                made[sequence] = event
            case "orchestrator.tree.out" if sequence in made:
                draft, num_new = made.pop(sequence), event.base - known[sequence]
                asked_s = max(opened_s[sequence], heard_s.pop((sequence, event.base), 0.0))
                times = asked_s, draft.at_us / 1e6, draft.end_us / 1e6
                yield DraftRecord(names[sequence], event.base, num_new, *times, draft.size)
                known[sequence] = event.base
