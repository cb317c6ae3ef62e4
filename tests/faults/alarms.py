"""Lines of logs that tell of a bug of ours, and those that look like it: gRPC's own, of headers that are no text.

A flipped byte in an HTTP/2 header of an answer makes gRPC's client log a traceback by the logger that also tells of
errors of ours. It reads the text as Latin-1 instead, and the call ends with its status. Such a traceback has frames of
gRPC's alone and ends with one kind of error. Servers get no such header: their guard refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

TRACEBACK = "Traceback (most recent call last):"
INCIDENT = "incident"
# Lines that are kept of each alarm.
ALARM_LINES = 30
_GRPCS_FRAME = re.compile(r'^  File "src/python/grpcio/grpc/_cython/_cygrpc/[\w./]+\.pyx\.pxi", line \d+, in [\w.]+$')
_NO_TEXT = re.compile(r"^UnicodeDecodeError: 'utf-8' codec can't decode byte")


@dataclass
class Alarm:
    """What a process said from an alarming line on, and when it was heard (`time.monotonic`)."""

    heard_s: float
    lines: list[str] = field(default_factory=list)

    @property
    def is_of_headers(self) -> bool:
        """Whether it is gRPC's traceback of a header that is no text, and nothing else."""
        if not self.lines or self.lines[0] != TRACEBACK:
            return False
        frames = [line for line in self.lines[1:] if line.startswith("  ")]
        end = self.lines[1 + len(frames) : 2 + len(frames)]
        return (
            bool(frames)
            and all(map(_GRPCS_FRAME.match, self.lines[1 : 1 + len(frames)]))
            and bool(end and _NO_TEXT.match(end[0]))
        )


class Alarms:
    """The alarms in the log of one service."""

    def __init__(self, name: str) -> None:
        self._prefix = f"[{name}] "
        self.heard: list[Alarm] = []

    def hear(self, line: str, now_s: float) -> None:
        """Take in a line."""
        line = line.removeprefix(self._prefix)
        if TRACEBACK in line or INCIDENT in line:
            self.heard.append(Alarm(now_s))
        if self.heard and len(self.heard[-1].lines) < ALARM_LINES:
            self.heard[-1].lines.append(line)


def excused(alarm: Alarm, flips_s: Sequence[tuple[float, float]], slack_s: float) -> bool:
    """Whether it is of headers, and bytes were being changed then: in one of `flips_s` or up to `slack_s` later."""
    return alarm.is_of_headers and any(start <= alarm.heard_s <= end + slack_s for start, end in flips_s)
