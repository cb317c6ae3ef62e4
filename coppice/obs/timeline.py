"""Timed events of a process, for `coppice bench timeline` and `profile`.

Off unless TIMELINE_DIR names a directory. The latest events are kept in memory and written at shutdown. Processes of a
machine share the monotonic clock, so their events can be aligned.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

VARIABLE = "TIMELINE_DIR"
# Events kept: some minutes of a loaded verifier.
CAPACITY = 2_000_000
SUFFIX = ".timeline.jsonl"


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """An event at `at_us`, in microseconds of the monotonic clock, lasting `took_us`.

    `what` is a name such as "verifier.outcome.in": peer, message and direction. `sequence` is the sequence's id on the
    stream, `base` the message's committed length, `size` its tokens or nodes; for a pass, `sequences` are its members
    and `size` its rows. An opening has its request id; an outcome has the draft nodes verified and the duration of its
    pass.
    """

    what: str
    at_us: float
    took_us: float = 0.0
    sequence: int = 0
    base: int = 0
    size: int = 0
    sequences: tuple[int, ...] = ()
    request_id: str = ""
    num_verified: int = 0
    pass_us: int = 0

    @property
    def end_us(self) -> float:
        """End of the event."""
        return self.at_us + self.took_us


class Timeline:
    """Latest events of this process. Safe on any thread."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        self._path = path
        # Plain tuples: cheap to record.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)

    def mark(
        self,
        what: str,
        sequence: int = 0,
        base: int = 0,
        size: int = 0,
        *details: str | int,
    ) -> None:
        """Record an event now; `details` are the last fields of an event."""
        self._events.append((what, time.monotonic() * 1e6, 0.0, sequence, base, size, (), *details))

    def took(
        self, what: str, start_s: float, end_s: float, sequence: int = 0, size: int = 0, sequences: Sequence[int] = ()
    ) -> None:
        """Record a finished event; times are seconds of the monotonic clock."""
        self._events.append((what, start_s * 1e6, (end_s - start_s) * 1e6, sequence, 0, size, tuple(sequences)))

    def events(self) -> list[TimelineEvent]:
        """Events kept, in order."""
        return [TimelineEvent(*event) for event in self._events]

    def write(self) -> None:
        """Write the events, one JSON list per line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in self._events)


class StreamTimeline:
    """Records the messages of one stream, under the peer's name."""

    def __init__(self, timeline: Timeline, peer: str) -> None:
        self._timeline = timeline
        self._peer = peer

    def heard(self, message: Any) -> None:
        """The peer sent a message."""
        self._mark(message, "in")

    def told(self, message: Any) -> None:
        """The peer was sent a message."""
        self._mark(message, "out")

    def over(self) -> None:
        """The stream has ended."""

    def _mark(self, message: Any, way: str) -> None:
        kind = message.WhichOneof("event")
        body = getattr(message, kind) if kind else None
        tree = getattr(body, "tree", None)
        size = len(getattr(body if tree is None else tree, "token_ids", ()))
        base = getattr(body, "base_length", 0)
        details = getattr(body, "request_id", ""), getattr(body, "draft_nodes", 0), getattr(body, "pass_us", 0)
        self._timeline.mark(f"{self._peer}.{kind}.{way}", message.sequence_id, base, size, *details)


def open_timeline(service: str, env: Mapping[str, str]) -> Timeline | None:
    """Timeline of this process; None without TIMELINE_DIR."""
    directory = env.get(VARIABLE, "")
    return Timeline(Path(directory) / f"{service}-{os.getpid()}{SUFFIX}") if directory else None


def read_timeline(path: Path) -> list[TimelineEvent]:
    """Events written by a process."""
    with path.open(encoding="utf-8") as lines:
        events = [TimelineEvent(*json.loads(line)) for line in lines]
    return [replace(event, sequences=tuple(event.sequences)) for event in events]
