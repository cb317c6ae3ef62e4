"""Events of a process with their times, for `coppice bench timeline` and `profile` alone.

Off unless TIMELINE_DIR names a directory. The latest events are kept in memory and written when the service stops. All
processes of one machine read the same monotonic clock, so that their events can be laid side by side.
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
# The latest events that are kept: some minutes of a loaded verifier.
CAPACITY = 2_000_000
SUFFIX = ".timeline.jsonl"


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened at `at_us`, microseconds of the monotonic clock, or began then and took `took_us`.

    `what` is a name such as "verifier.outcome.in": the peer of a stream, the message, and which way it went.
    `sequence` is the sequence's number on that stream, `base` the committed length that the message names, `size` its
    tokens or nodes; of a pass, `sequences` took part, with so many rows. An opening names its request; an outcome
    counts the draft nodes that were verified, and says how long its pass took.
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
        """When it was over."""
        return self.at_us + self.took_us


class Timeline:
    """The latest events of this process. Any thread may add to it."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        self._path = path
        # Plain tuples: what is watched should not wait for objects to be made.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)

    def mark(
        self,
        what: str,
        sequence: int = 0,
        base: int = 0,
        size: int = 0,
        *details: str | int,
    ) -> None:
        """It happens now; `details` are the last fields of an event."""
        self._events.append((what, time.monotonic() * 1e6, 0.0, sequence, base, size, (), *details))

    def took(
        self, what: str, start_s: float, end_s: float, sequence: int = 0, size: int = 0, sequences: Sequence[int] = ()
    ) -> None:
        """It is over; times are readings of the monotonic clock."""
        self._events.append((what, start_s * 1e6, (end_s - start_s) * 1e6, sequence, 0, size, tuple(sequences)))

    def events(self) -> list[TimelineEvent]:
        """What is kept now, in the order in which it was added."""
        return [TimelineEvent(*event) for event in self._events]

    def write(self) -> None:
        """Write what is kept, one JSON list a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in self._events)


class StreamTimeline:
    """Marks the messages of one stream, by the name of the peer."""

    def __init__(self, timeline: Timeline, peer: str) -> None:
        self._timeline = timeline
        self._peer = peer

    def heard(self, message: Any) -> None:
        """The peer has sent a message."""
        self._mark(message, "in")

    def told(self, message: Any) -> None:
        """The peer is sent a message."""
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
    """The timeline of this process; None where TIMELINE_DIR is not set."""
    directory = env.get(VARIABLE, "")
    return Timeline(Path(directory) / f"{service}-{os.getpid()}{SUFFIX}") if directory else None


def read_timeline(path: Path) -> list[TimelineEvent]:
    """What a process has written."""
    with path.open(encoding="utf-8") as lines:
        events = [TimelineEvent(*json.loads(line)) for line in lines]
    return [replace(event, sequences=tuple(event.sequences)) for event in events]
