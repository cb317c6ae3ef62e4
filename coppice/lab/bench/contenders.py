"""What every contender of a benchmark does: complete one prompt and say what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class BenchmarkError(Exception):
    """A benchmark that cannot go on: the message says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One completion to make. The length is exact: EOS counts as any other token."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class PassTime:
    """How many passes of the target there were, and how long they took together."""

    count: int
    total_s: float


@dataclass(frozen=True, slots=True)
class OriginCounts:
    """Rounds whose draft was made at one time, and the tokens accepted in them."""

    rounds: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counts that a speculating contender reports. Entry d of a by-depth tuple stands for depth d + 1."""

    draft_tokens: int
    accepted_tokens: int
    redraft_tokens: int
    stale_drafts: int
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    # Proposed and accepted tokens by drafter.
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # Of rounds with a draft, by when that was made: `DraftOrigin` of the contracts, in a word.
    origins: Mapping[str, OriginCounts] = field(default_factory=dict)
    # Rounds whose tree a drafter was told to expect; those whose outcome left it and was drafted for, by its rank; and
    # those that verified another tree and ended inside the expected one, where it goes on.
    expected_outcomes: int = 0
    draft_ahead_hits_by_rank: tuple[int, ...] = ()
    outcomes_inside_expected: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One completed task. Wall time and time to first token are the caller's; the rest is reported."""

    token_ids: tuple[int, ...]
    wall_s: float
    ttft_s: float
    # Passes of the target that committed tokens.
    num_rounds: int
    forward_s: float
    linger_s: float = 0.0
    # Between passes, while there was work all along.
    bubble_s: float = 0.0
    # Keyed by the number of rows.
    passes: Mapping[int, PassTime] = field(default_factory=dict)
    speculation: Speculation | None = None


class Contender(Protocol):
    """One way to complete a prompt."""

    @property
    def name(self) -> str:
        """Short and unique within a benchmark."""
        ...

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        ...

    def complete(self, task: Task) -> Completion:
        """Complete one task, alone."""
        ...
