"""The verifier's engine with a memory of its passes: a list entry for each pass, opening and draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coppice.lab.bench.profile.records import OpeningRecord, PassRecord, RoundRecord, TreeRecord, now_s
from verifier_svc.engine.counts import EngineCounts
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.stream.events import Event, OutcomeEvent
from verifier_svc.stream.outbox import Sink


@dataclass
class Kept:
    """What has happened so far."""

    passes: list[PassRecord] = field(default_factory=list)
    openings: list[OpeningRecord] = field(default_factory=list)
    trees: list[TreeRecord] = field(default_factory=list)


class RecordedEngine(Engine):
    """Everything is written down where it comes by anyway: at the door, where passes are counted, and on its way out.

    One stream is followed, as there is one orchestrator.
    """

    # Outlives the engine, which is made and stopped out of reach.
    kept: ClassVar[Kept] = Kept()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._times = _PassTimes()
        super().__init__(*arguments, **{**options, "counts": self._times})
        self._names: dict[SequenceKey, str] = {}

    def open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        """Queue a sequence."""
        self._names[key] = spec.request_id
        self.kept.openings.append(OpeningRecord(spec.request_id, now_s()))
        super().open(key, spec)

    def submit(self, key: SequenceKey, draft: Draft) -> None:
        """Put a draft into a sequence's mailbox."""
        if len(draft.tree):
            self.kept.trees.append(TreeRecord(self._names.get(key, ""), draft.base_length, now_s()))
        super().submit(key, draft)

    def attach(self, stream: int, sink: Sink) -> None:
        """Events of a stream's sequences go to `sink` from now on, and what they say of the pass is kept."""

        def deliver(events: Sequence[Event]) -> None:
            sink(events)
            self._keep(stream, events)

        super().attach(stream, deliver)

    def _keep(self, stream: int, events: Sequence[Event]) -> None:
        rounds = tuple(
            RoundRecord(
                self._names[SequenceKey(stream, event.sequence_id)],
                event.outcome.base_length,
                len(event.outcome.token_ids),
                event.outcome.draft_nodes,
            )
            for event in events
            if isinstance(event, OutcomeEvent)
        )
        delivered_s, last = now_s(), self._times.take()
        # Passes before the last one were over prompts that had not ended, and had no outcome to deliver.
        self.kept.passes += [PassRecord(*one[:2], one[1], one[2], ()) for one in last[:-1]]
        self.kept.passes += [PassRecord(*one[:2], delivered_s, one[2], rounds) for one in last[-1:]]


class _PassTimes(EngineCounts):
    """Counts for operators that also keep the passes since they were last taken."""

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[tuple[float, float, int]] = []

    def pass_over(self, num_rows: int, started_s: float, ended_s: float) -> float:
        """A forward pass has ended; returns the bubble before it."""
        self._passes.append((started_s, ended_s, num_rows))
        return super().pass_over(num_rows, started_s, ended_s)

    def take(self) -> list[tuple[float, float, int]]:
        """The passes since: when the model began and ended, and rows."""
        passes, self._passes = self._passes, []
        return passes
