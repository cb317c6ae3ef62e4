"""Records of what services did during a benchmark, by one clock of the machine, written when they stop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from coppice.lab.bench.harness.experiment import BenchmarkError

# The directory for the records, in the environment of the services that keep some.
DIRECTORY_VARIABLE = "RECORDS_DIRECTORY"
VERIFIER_FILE, DRAFTER_FILE, ORCHESTRATOR_FILE = "verifier.json", "drafter.json", "orchestrator.json"


def now_s() -> float:
    """Seconds of a clock that is the same in all processes of a machine, and in the verifier's engine."""
    return time.monotonic()


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
        """Time of the pass."""
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
    """A draft behind so many tokens, of which `num_new` came since the last one: asked for, begun, ended."""

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


def write_records(path: Path, **kinds: Iterable[Any]) -> None:
    """One list for each kind of record, of their fields in order."""
    path.write_text(json.dumps({name: [astuple(one) for one in kind] for name, kind in kinds.items()}))


def read_records(directory: Path) -> Records:
    """What verifier, drafter and orchestrator have left in a directory.

    Raises BenchmarkError if one of them has left nothing.
    """
    try:
        verifier, drafter, orchestrator = (
            json.loads((directory / name).read_text()) for name in (VERIFIER_FILE, DRAFTER_FILE, ORCHESTRATOR_FILE)
        )
    except (OSError, json.JSONDecodeError) as error:
        raise BenchmarkError(f"a service did not say what it did: {error}") from error
    return Records(
        tuple(_pass(*one) for one in verifier["passes"]),
        tuple(OpeningRecord(*one) for one in verifier["openings"]),
        tuple(TreeRecord(*one) for one in verifier["trees"]),
        tuple(DraftRecord(*one) for one in drafter["drafts"]),
        tuple(CpuRecord(*one) for one in orchestrator["cpu"]),
    )


def _pass(started_s: float, ended_s: float, delivered_s: float, rows: int, rounds: Sequence[Any]) -> PassRecord:
    return PassRecord(started_s, ended_s, delivered_s, rows, tuple(RoundRecord(*one) for one in rounds))
