"""A form of a deployment: how its rounds and its drafters go together, and how far apart the two are."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.coppice_contender import Mode
from coppice.lab.bench.summary import ON

MAX_DELAY_MS = 10_000


class Kind(enum.Enum):
    """How rounds and drafters go together."""

    # Passes never wait for a drafter beyond the linger.
    ASYNCHRONOUS = "asynchronous"
    # Asynchronous, and the drafters draft ahead, whatever that costs on cores that they share with the verifier.
    DRAFT_AHEAD = "draft-ahead"
    # Draft, verify, draft, verify: each round waits for its draft.
    SYNCHRONOUS = "synchronous"
    # Asynchronous, all services in one process.
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Form:
    """One contender's deployment; `delay_ms` is added to each message between orchestrator and drafter, each way.

    Raises:
        BenchmarkError: the delay is out of range, or there is no wire that it could be on.
    """

    kind: Kind
    delay_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms <= MAX_DELAY_MS:
            raise BenchmarkError(f"--delays: {self.delay_ms} is not in [0, {MAX_DELAY_MS}]")
        if self.kind is Kind.COLOCATED and self.delay_ms:
            raise BenchmarkError("--delays: a co-located form has no wire to delay")

    @property
    def name(self) -> str:
        """The contender's."""
        return f"{ON} {self.kind.value}" + (f" {self.delay_ms} ms" if self.delay_ms else "")

    @property
    def mode(self) -> Mode:
        """What requests ask for: the planner as it is, which classic rounds have none of."""
        return Mode.MODE_FORCED if self.kind is Kind.SYNCHRONOUS else Mode.MODE_AUTO

    @property
    def up_option(self) -> str:
        """The option of `coppice up` that this form needs; empty where it is the default."""
        return {Kind.SYNCHRONOUS: "--rounds", Kind.COLOCATED: "--colocated"}.get(self.kind, "")


def parse_forms(names: str, delays: str) -> tuple[Form, ...]:
    """The forms that are named, each but the co-located one with every delay in milliseconds; commas between.

    Raises:
        BenchmarkError: a name is none, or a delay is no number in range.
    """
    kinds = list(dict.fromkeys(_kind(name.strip()) for name in names.split(",") if name.strip()))
    times = _delays(delays)
    wired = [kind for kind in kinds if kind is not Kind.COLOCATED]
    forms = [Form(kind, delay) for delay in times for kind in wired]
    return (*forms, *(Form(kind) for kind in kinds if kind is Kind.COLOCATED))


def _kind(name: str) -> Kind:
    try:
        return Kind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in Kind)
        raise BenchmarkError(f"--forms: {name!r} is none of {known}") from None


def _delays(text: str) -> Sequence[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip())) or [0]
    except ValueError:
        raise BenchmarkError(f"--delays: needs milliseconds such as 0,5,20, got {text!r}") from None
