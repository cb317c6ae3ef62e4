"""When requests arrive: a Poisson process, or a recorded trace. All times are fixed before the first request."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from coppice.lab.bench.load.manner import ATTENTIVE, Manner

TIME_COLUMN = "TIMESTAMP"
TOKENS_COLUMN = "GeneratedTokens"


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

    Others, such as the ContextTokens of Azure's traces, are not read.

    Raises:
        TraceError: the file cannot be read, a column is missing, a line is broken, or there is none.
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
