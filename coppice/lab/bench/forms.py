"""Forms of one deployment next to each other: how rounds and drafters go together, and how far apart the two are.

`async/sync`, `async/off`, `sync/off`, `ahead/off`, `ahead/async` and `colocated/async` are ratios of tokens/s;
`forward-share-async`, `-sync` and `-ahead` shares of the wall time inside the target's forward; `early-drafts` of the
asynchronous rounds, those that began with a draft that was there when the outcome before was known, and
`early-drafts-ahead` the same where drafters draft ahead; `draft-ahead-hits` of the rounds that those were told to
expect, the ones with a draft for their outcome before it was known; `rerooted-tokens` of the asynchronous tokens,
those accepted from re-rooted drafts. `@20ms` marks a delay, `@T1` a temperature.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coppice.lab.bench import figures
from coppice.lab.bench.client import OFF, ON, Mode
from coppice.lab.bench.comparison import Sample, by_run, speed_ratios
from coppice.lab.bench.harness.experiment import BenchmarkError, ByRun, Samples, at_temperature, known
from coppice.lab.bench.harness.plots import Panel, lines
from coppice.lab.bench.harness.report import Row
from coppice.lab.bench.harness.tables import Table

MAX_DELAY_MS = 10_000
# Less than this is slower than plain decoding beyond what runs differ by.
NEVER_SLOWER = 0.97
ORIGINS = ("fresh", "left_over", "rerooted", "ahead", "redraft")
NOTES = (
    "Forms take turns with all others on the same prompts, and have no prefix cache. A delay is added to every message "
    "between orchestrator and drafter, each way, so that a draft takes twice that longer. Synchronous rounds always "
    "draft (FORCED); all other forms leave it to the planner (AUTO). In the form draft-ahead drafters draft for "
    "likely outcomes while the verifier is busy; in the others only where DRAFT_AHEAD=auto says so.",
    "early-drafts: rounds whose draft was there when the outcome before was known (left over from the last tree, late "
    "and re-rooted, or made ahead), of all rounds. draft-ahead-hits: rounds with a draft for their outcome before "
    "it was known, of those whose tree a drafter was told to expect; 0 where none was. bubble: time per round between "
    "two passes.",
)


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

    Raises BenchmarkError if the delay is out of range, or there is no wire that it could be on.
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
        return f"{ON} {self.kind.value}" + (f" {self.delay_ms} ms" if self.delay_ms else "")

    @property
    def setting(self) -> str:
        """How it is set up, for the reader of the result."""
        rounds = "one process" if self.kind is Kind.COLOCATED else f"{self.kind.value} rounds"
        delay = f"{self.delay_ms} ms each way between orchestrator and drafter" if self.delay_ms else ""
        return ", ".join(filter(None, (rounds, delay, "no prefix cache")))

    @property
    def mode(self) -> Mode:
        """What requests ask for: the planner as it is, which synchronous rounds have none of."""
        return Mode.MODE_FORCED if self.kind is Kind.SYNCHRONOUS else Mode.MODE_AUTO


def parse_forms(names: str, delays: str) -> tuple[Form, ...]:
    """The forms that are named, each but the co-located one with every delay in milliseconds; commas between.

    Raises BenchmarkError if a name is none, or a delay is no number in range.
    """
    try:
        kinds = list(dict.fromkeys(Kind(name.strip()) for name in names.split(",") if name.strip()))
    except ValueError as error:
        known_kinds = ", ".join(kind.value for kind in Kind)
        raise BenchmarkError(f"--forms: {names!r} has one that is none of {known_kinds}") from error
    try:
        times = list(dict.fromkeys(int(part) for part in delays.split(",") if part.strip())) or [0]
    except ValueError as error:
        raise BenchmarkError(f"--delays: needs milliseconds such as 0,5,20, got {delays!r}") from error
    wired = [Form(kind, delay) for delay in times for kind in kinds if kind is not Kind.COLOCATED]
    return (*wired, *(Form(kind) for kind in kinds if kind is Kind.COLOCATED))


SHARES: Mapping[str, tuple[Kind, figures.Figure]] = {
    "forward-share-async": (Kind.ASYNCHRONOUS, figures.forward_share),
    "forward-share-sync": (Kind.SYNCHRONOUS, figures.forward_share),
    "forward-share-ahead": (Kind.DRAFT_AHEAD, figures.forward_share),
    "draft-ahead-hits": (Kind.DRAFT_AHEAD, figures.draft_ahead_hits),
    "early-drafts-ahead": (Kind.DRAFT_AHEAD, figures.early_drafts),
    "early-drafts": (Kind.ASYNCHRONOUS, figures.early_drafts),
    "rerooted-tokens": (Kind.ASYNCHRONOUS, figures.rerooted_tokens),
}


def form_ratios(samples: Samples[Sample], forms: Collection[Form]) -> ByRun:
    return {
        at_temperature(f"{name}@{delay}ms" if delay else name, temperature): values
        for temperature in samples.each("temperature")
        for delay in dict.fromkeys(form.delay_ms for form in forms)
        for name, values in _at(samples, delay, temperature)
    }


def form_remarks(values: Mapping[str, float], rows: Sequence[Row], forms: Collection[Form]) -> list[str]:
    if not forms:
        return []
    slower = [
        f"{name} is {value:.3f}: asynchronous rounds are slower than plain decoding."
        for name, value in values.items()
        if name.startswith("async/off") and value < NEVER_SLOWER
    ]
    early = {row["contender"] for row in rows if row["early_drafts"]}
    waits = [form.name for form in forms if form.kind is Kind.SYNCHRONOUS and form.name in early]
    wrong = [f"{name} began rounds with drafts that were there already: it is not synchronous." for name in waits]
    return [*NOTES, *slower, *wrong]


def _at(samples: Samples[Sample], delay_ms: int, temperature: float) -> Iterator[tuple[str, list[float]]]:
    wired = (Kind.ASYNCHRONOUS, Kind.SYNCHRONOUS, Kind.DRAFT_AHEAD)
    on, sync, ahead = (Form(kind, delay_ms).name for kind in wired)
    pairs = {
        "async/sync": (on, sync),
        "async/off": (on, OFF),
        "sync/off": (sync, OFF),
        "ahead/off": (ahead, OFF),
        "ahead/async": (ahead, on),
    }
    if not delay_ms:
        pairs["colocated/async"] = (Form(Kind.COLOCATED).name, on)
    for name, pair in pairs.items():
        yield name, speed_ratios(samples, *pair, temperature)
    for name, (kind, figure) in SHARES.items():
        yield name, known(by_run(samples, Form(kind, delay_ms).name, temperature, figure))


def add_forms(rows: Iterable[Row], forms: Iterable[Form]) -> None:
    """Say of the forms' rows which forms they are."""
    by_name = {form.name: {"form": form.kind.value, "delay_ms": form.delay_ms} for form in forms}
    for row in rows:
        row |= by_name.get(row["contender"], {})


def _origin(origin: str, row: Mapping[str, Any]) -> str:
    counts = row.get("origins", {}).get(origin, {"rounds": 0, "accepted": 0})
    return f"{counts['rounds']} ({counts['accepted']})"


TABLE = Table(
    "Forms: rounds (accepted tokens) by when their draft was made",
    {
        "tokens/s": "{tokens_per_s:.1f}",
        "x off": "{speed_over_off:.2f}",
        "τ": "{mean_acceptance_length:.2f}",
        "forward": "{forward_share:.0%}",
        "bubble ms": "{bubble_ms:.2f}",
        "early": "{early_drafts:.0%}",
        "hits": "{draft_ahead_hits:.0%}",
        **{origin: partial(_origin, origin) for origin in ORIGINS},
    },
    where=lambda row: "form" in row,
)
# Speed of each form against the delay; plain decoding is 1.
PANEL = Panel(
    "One stream, T={:g}",
    lines,
    "delay_ms",
    "speed_over_off",
    "{form}",
    "ms more, each way, between orchestrator and drafter",
    "tokens/s, plain decoding = 1",
    where=lambda row: "form" in row,
    by="temperature",
    has_base=True,
)
