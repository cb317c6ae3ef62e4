"""Forms of one deployment next to each other: how rounds and drafters go together, and how far apart the two are."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass

from coppice.cli.topology import LOCAL
from coppice.lab.bench import figures
from coppice.lab.bench.client import OFF, ON, Mode
from coppice.lab.bench.comparison import Sample, by_run, speed_ratios
from coppice.lab.bench.harness.experiment import BenchmarkError, ByRun, Samples, at_temperature, known
from coppice.lab.bench.harness.plots import Panel
from coppice.lab.bench.harness.report import Row
from coppice.lab.bench.harness.tables import Table

MAX_DELAY_MS = 10_000
# Less than this is slower than plain decoding beyond what runs differ by.
NEVER_SLOWER = 0.97


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


# Ratios of tokens per second: whose, over whose; None is plain decoding.
SPEEDS: Mapping[str, tuple[Kind, Kind | None]] = {
    "async/sync": (Kind.ASYNCHRONOUS, Kind.SYNCHRONOUS),
    "async/off": (Kind.ASYNCHRONOUS, None),
    "sync/off": (Kind.SYNCHRONOUS, None),
    "ahead/off": (Kind.DRAFT_AHEAD, None),
    "ahead/async": (Kind.DRAFT_AHEAD, Kind.ASYNCHRONOUS),
    "colocated/async": (Kind.COLOCATED, Kind.ASYNCHRONOUS),
}
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
    """Those of the forms that are there, at each temperature and delay."""
    found: ByRun = {}
    delays = dict.fromkeys(form.delay_ms for form in forms)
    for temperature, delay in itertools.product(samples.each("temperature"), delays):
        names: dict[Kind | None, str] = {form.kind: form.name for form in forms if form.delay_ms == delay}
        names[None] = OFF
        values = {
            name: speed_ratios(samples, names.get(first, ""), names.get(second, ""), temperature)
            for name, (first, second) in SPEEDS.items()
        }
        values |= {
            name: known(by_run(samples, names.get(kind, ""), temperature, figure))
            for name, (kind, figure) in SHARES.items()
        }
        at = f"@{delay}ms" if delay else ""
        found |= {at_temperature(name + at, temperature): value for name, value in values.items()}
    return found


def form_remarks(values: Mapping[str, float], rows: Sequence[Row], forms: Collection[Form]) -> list[str]:
    slower = [
        f"{name} is {value:.3f}: asynchronous rounds are slower than plain decoding."
        for name, value in values.items()
        if forms and name.startswith("async/off") and value < NEVER_SLOWER
    ]
    early = {row["contender"] for row in rows if row["early_drafts"]}
    waits = [form.name for form in forms if form.kind is Kind.SYNCHRONOUS and form.name in early]
    wrong = [f"{name} began rounds with drafts that were there already: it is not synchronous." for name in waits]
    return slower + wrong


TABLE = Table(
    "Forms: rounds/accepted tokens by when their draft was made",
    "tokens_per_s speed_over_off mean_acceptance_length forward_share bubble_ms early_drafts draft_ahead_hits origins",
    where=lambda row: "form" in row,
)
# Speed of each form against the delay; plain decoding is 1.
PANEL = Panel(
    "One stream, T={:g}",
    "speed_over_off",
    "delay_ms",
    "{form}",
    where=lambda row: "form" in row,
    by="temperature",
    xlabel="ms more, each way, between orchestrator and drafter",
    has_base=True,
)


CHUNK_BYTES = 65_536


@contextlib.asynccontextmanager
async def delayed(address: str, delay_s: float) -> AsyncIterator[str]:
    """HOST:PORT of a proxy for `address` whose bytes arrive after a delay, in order; latency takes no bandwidth."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ExceptionGroup), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(far_writer):
                await asyncio.gather(_pass(reader, far_writer, delay_s), _pass(far_reader, writer, delay_s))

    server = await asyncio.start_server(serve, LOCAL, 0)
    try:
        yield f"{LOCAL}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass one direction's bytes, and its end."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due_s, data = await chunks.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        data = b"."
        while data:
            data = await reader.read(CHUNK_BYTES)
            chunks.put_nowait((loop.time() + delay_s, data))
