"""The requests of a load, and when they are sent: so many at once, at random or as in a trace, in a step.

All times of arrivals are fixed before the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import itertools
import math
import random
import statistics
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from coppice.lab.bench.client import ATTENTIVE, Answer, Fate, Manner, Task, Window
from coppice.lab.bench.load.figures import Span

# Of the logarithm of a lognormal length.
SPREAD = 0.6
# Those who leave do so at any moment up to this long after they have asked.
LEAVE_WITHIN_S = 2.0
# Lengths that stand for all of them.
NUM_USUAL = 4096
TIME_COLUMN = "TIMESTAMP"
TOKENS_COLUMN = "GeneratedTokens"


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in turn, with output lengths drawn evenly from [min_tokens, max_tokens].

    A prompt always has the same seed, so that a shorter output is the beginning of a longer one. With several turns
    prompts are those of conversations, one conversation after the other: a prompt has all turns before in it, and the
    length of its output is always the same.
    """

    prompts: tuple[tuple[int, ...], ...]
    min_tokens: int = 32
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    # Lengths around the geometric mean of the bounds and cut to them, instead of evenly drawn: many short, a few long.
    lognormal: bool = False
    num_turns: int = 1
    # Share of the requests whose clients leave early.
    leaving: float = 0.0

    def request(self, number: int, num_tokens: int | None = None) -> Task:
        """The request of a number; `num_tokens` replaces the drawn length, as far as outputs may be long."""
        prompt = number % len(self.prompts)
        if self.num_turns > 1:
            num_tokens = self.length(prompt)
        elif num_tokens is None:
            num_tokens = self.length(number)
        length = min(max(num_tokens, 1), self.max_tokens)
        return Task(self.prompts[prompt], length, self.temperature, self.seed + prompt, prompt=prompt)

    def longest(self, prompt: int) -> Task:
        """The request whose output begins with all others' of this prompt."""
        return self.request(prompt, self.max_tokens)

    def manner(self, number: int) -> Manner:
        """How the client of a request's number behaves."""
        rng = random.Random(f"{self.seed} {number} manner")
        leaves = rng.random() < self.leaving
        return Manner(leave_after_s=rng.uniform(0.0, LEAVE_WITHIN_S)) if leaves else ATTENTIVE

    def salt(self, number: int, window: Window) -> str:
        """The salt of a conversation's requests: that of all conversations until the first comes again.

        Empty without turns: requests then share nothing.
        """
        num_conversations = len(self.prompts) // self.num_turns
        return f"{window.salt} {number // num_conversations}" if self.num_turns > 1 else ""

    @property
    def mean_tokens(self) -> float:
        """Expected length of an output."""
        if self.num_turns > 1:
            return statistics.fmean(map(self.length, range(len(self.prompts))))
        if self.lognormal:
            return statistics.fmean(map(self.length, range(NUM_USUAL)))
        return (self.min_tokens + self.max_tokens) / 2

    def length(self, number: int) -> int:
        """Tokens of an output: by its request's number, or by its prompt's where there are turns."""
        rng = random.Random(f"{self.seed} {number}")
        if not self.lognormal:
            return rng.randint(self.min_tokens, self.max_tokens)
        return lognormal_length(rng, self.min_tokens, self.max_tokens)


def lognormal_length(rng: random.Random, shortest: int, longest: int) -> int:
    """A length within the bounds, the logarithm normal around the middle of theirs where it is not cut."""
    length = round(math.sqrt(shortest * longest) * rng.lognormvariate(0.0, SPREAD))
    return min(max(length, shortest), longest)


class TraceError(ValueError):
    """A trace that cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come, seconds from the beginning; a trace says how many tokens it generated, too."""

    at_s: float
    num_tokens: int | None = None
    manner: Manner = ATTENTIVE


def poisson_arrivals(rate_per_s: float, duration_s: float, seed: str) -> list[Arrival]:
    """Arrivals of a Poisson process in [0, duration): independent gaps, exponential with mean 1 / rate."""
    rng = random.Random(seed)
    arrivals = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < duration_s:
        arrivals.append(Arrival(at_s))
        at_s += rng.expovariate(rate_per_s)
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """The arrivals of a CSV file with the columns TIMESTAMP (ISO 8601) and GeneratedTokens, the earliest at 0.

    Others, such as the ContextTokens of Azure's traces, are not read. Raises TraceError if the file cannot be read, a
    column is missing, a line is broken, or there is none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            for column in (TIME_COLUMN, TOKENS_COLUMN):
                if column not in (reader.fieldnames or ()):
                    raise TraceError(f"{path}:1: has no column {column}")
            # A list, because line_num moves with the reader.
            parsed = [_parse(row, f"{path}:{reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error
    if not parsed:
        raise TraceError(f"{path}: holds no request")
    try:
        parsed.sort(key=lambda item: item[0])
    except TypeError as error:
        raise TraceError(f"{path}: some times have a time zone, others have none") from error
    first = parsed[0][0]
    return [Arrival((time - first).total_seconds(), num_tokens) for time, num_tokens in parsed]


def trace_beginning(trace: Sequence[Arrival], duration_s: float, speed: float) -> list[Arrival]:
    """What a trace played `speed` times as fast has in its first `duration_s` seconds."""
    played = (Arrival(arrival.at_s / speed, arrival.num_tokens) for arrival in trace)
    return [arrival for arrival in played if arrival.at_s < duration_s]


def _parse(row: dict[str, str | None], place: str) -> tuple[datetime, int]:
    try:
        time = datetime.fromisoformat((row[TIME_COLUMN] or "").strip())
        num_tokens = int(row[TOKENS_COLUMN] or "")
    except ValueError as error:
        raise TraceError(f"{place}: {error}") from error
    if num_tokens < 0:
        raise TraceError(f"{place}: {TOKENS_COLUMN} must be at least 0, got {num_tokens}")
    return time, num_tokens


# A client that was turned away comes again after this long, as a polite one would.
PAUSE_S = 0.1


async def converse(window: Window, workload: Workload, number: int, arrival: Arrival | None = None) -> Answer:
    """Send one request, or each turn of one conversation when the last has ended; the last answer.

    A turn that is refused or fails ends the conversation; after one whose client left, the next is sent.
    """
    salt, intended_s = workload.salt(number, window), None if arrival is None else arrival.at_s
    for turn in range(number * workload.num_turns, (number + 1) * workload.num_turns):
        manner = workload.manner(turn) if arrival is None or arrival.manner == ATTENTIVE else arrival.manner
        task = workload.request(turn, None if arrival is None else arrival.num_tokens)
        answer = await window.ask(task, intended_s, manner, salt)
        if answer.fate not in (Fate.COMPLETED, Fate.LEFT):
            break
        intended_s = None
    return answer


@contextlib.asynccontextmanager
async def closed_loop(window: Window, workload: Workload) -> AsyncIterator[Callable[[int], None]]:
    """A function that says how many workers there are, each of which sends its next request when its last has ended.

    Those who are too many, and at the end all, are cancelled with their requests.
    """
    numbers, workers = itertools.count(), list[asyncio.Task[None]]()

    async def work() -> None:
        while True:
            if (await converse(window, workload, next(numbers))).fate not in (Fate.COMPLETED, Fate.LEFT):
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:

        def resize(num_workers: int) -> None:
            while len(workers) < num_workers:
                workers.append(group.create_task(work()))
            _cancel(workers[num_workers:])
            del workers[num_workers:]

        try:
            yield resize
        finally:
            resize(0)


async def open_loop(window: Window, workload: Workload, arrivals: Sequence[Arrival], drain_s: float) -> None:
    """Send every request at its time, however slow the answers to others; cancel those that last too long.

    Requests may take until `drain_s` after the last arrival.
    """
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, arrival in enumerate(arrivals):
            await window.wait_until(arrival.at_s)
            tasks.append(group.create_task(converse(window, workload, number, arrival)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            _cancel(late)


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


# A warm-up that has not ended by then ends.
WARM_UP_LIMIT_S = 60.0
# How long requests may take after the last arrival; an overload of 1.2 leaves a fifth of a window's work over.
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """So many requests at once, for so long after a warm-up.

    The warm-up ends when as many requests have ended as run at once: prompts that began together are read by then, and
    outputs of different lengths have pulled the requests apart.
    """

    concurrency: int
    duration_s: float

    @property
    def name(self) -> str:
        """For example c16."""
        return f"c{self.concurrency}"

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        async with closed_loop(window, workload) as resize:
            resize(self.concurrency)
            await window.wait_for_ended(self.concurrency, WARM_UP_LIMIT_S)
            span = Span(start_s := window.now(), start_s + self.duration_s)
            await window.wait_until(span.end_s)
        return span


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Requests that arrive at random: `rate` is a share of what saturates the server without speculation."""

    rate: float
    rate_per_s: float
    duration_s: float
    seed: int

    @property
    def name(self) -> str:
        """For example r0.6."""
        return f"r{self.rate:g}"

    def arrivals(self, run: int) -> list[Arrival]:
        """The same for every policy, others in every run."""
        return poisson_arrivals(self.rate_per_s, self.duration_s, f"{self.seed} {self.rate:g} {run}")

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        await open_loop(window, workload, self.arrivals(run), DRAIN_S)
        return _whole(window, self.duration_s)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Requests that arrive when those of a trace did."""

    arrivals: tuple[Arrival, ...]
    duration_s: float
    name: str = "trace"

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        await open_loop(window, workload, self.arrivals, DRAIN_S)
        return _whole(window, self.duration_s)


@dataclass(frozen=True, slots=True)
class Level:
    """So many requests at once, in a part of a window."""

    concurrency: int
    span: Span


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One request at a time for `duration_s`, then many for twice as long, then one again."""

    concurrency: int
    duration_s: float
    name: str = "step"

    @property
    def levels(self) -> tuple[Level, Level, Level]:
        """In order. Many requests take a while to begin, all at once."""
        ends_s = [count * self.duration_s for count in (0, 1, 3, 4)]
        before, at, after = (Span(start_s, end_s) for start_s, end_s in pairwise(ends_s))
        return Level(1, before), Level(self.concurrency, at), Level(1, after)

    async def drive(self, window: Window, workload: Workload, run: int) -> Span:
        async with closed_loop(window, workload) as resize:
            for level in self.levels:
                resize(level.concurrency)
                await window.wait_until(level.span.end_s)
        return Span(0.0, self.levels[-1].span.end_s)


OpenLoad = PoissonLoad | TraceLoad
Load = ClosedLoad | OpenLoad | StepLoad


def _whole(window: Window, duration_s: float) -> Span:
    """Once the last answer has come."""
    return Span(0.0, max(duration_s, window.now()))
