"""What peers count and time of an orchestrator's messages. Times are of their own clock."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message


@dataclass
class Traffic:
    """Messages and bytes by direction, and how long the orchestrator took with each round that had a draft.

    A round's time is that from the outcome's leaving the verifier to its coming to the drafter, and from the draft's
    leaving the drafter to its coming to the verifier: both ways through the network and two services' libraries.
    """

    messages: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    largest: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_rounds: int = 0
    round_us: list[float] = field(default_factory=list)
    # By request and committed length: what of a round has been seen.
    _outcome_left_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _to_drafter_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _draft_left_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def reset(self) -> None:
        """Begin anew."""
        fresh = Traffic()
        for name in vars(fresh):
            setattr(self, name, getattr(fresh, name))

    def report(self) -> dict[str, Any]:
        """What was counted and timed, as JSON takes it."""
        return {
            "num_rounds": self.num_rounds,
            "round_us": self.round_us,
            "messages": dict(self.messages),
            "bytes": dict(self.num_bytes),
            "largest": dict(self.largest),
        }

    def count(self, way: str, message: Message) -> None:
        """A message of a round went this way."""
        size = message.ByteSize()
        self.messages[way] += 1
        self.num_bytes[way] += size
        self.largest[way] = max(self.largest[way], size)

    def outcome_leaves(self, request: int, length: int) -> None:
        """The verifier sends an outcome after which so many tokens are committed."""
        self.num_rounds += 1
        self._outcome_left_s[request, length] = time.perf_counter()

    def outcome_comes(self, request: int, length: int) -> None:
        """The drafter has it."""
        now_s = time.perf_counter()
        left_s = self._outcome_left_s.pop((request, length), None)
        if left_s is not None:
            self._to_drafter_s[request, length] = now_s - left_s

    def draft_leaves(self, request: int, length: int) -> None:
        """The drafter sends a draft behind so many tokens."""
        self._draft_left_s[request, length] = time.perf_counter()

    def draft_comes(self, request: int, length: int) -> None:
        """The verifier has it."""
        now_s = time.perf_counter()
        left_s = self._draft_left_s.pop((request, length), None)
        there_s = self._to_drafter_s.pop((request, length), None)
        if left_s is not None and there_s is not None:
            self.round_us.append(1e6 * (there_s + now_s - left_s))
