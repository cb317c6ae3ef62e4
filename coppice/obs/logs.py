"""Logs of a service: one line per record on stderr, as text or JSON, with the request's id.

Texts of clients are never logged. A short formatter on the standard library needs no further dependency.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from coppice.core.errors import InvalidRequestError
from coppice.settings import Rule, Settings

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_REQUEST_ID_BYTES = 128
# Records of one kind in a second.
MOST_ALIKE = 20
# Loggers under LOG_LEVEL, by the first part of their name. Libraries log warnings and above: at DEBUG, numba logs
# every instruction, which takes minutes.
OURS = ("coppice", "orchestrator", "verifier_svc", "drafter_svc", "__main__")

# Id of the request that the current task works for; empty without one.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def of_request(identity: str) -> dict[str, str]:
    """The `extra` of a record about a request, from a task shared by several."""
    return {"request_id": identity}


def check_request_id(identity: str) -> None:
    """Raise InvalidRequestError if an id is too long for logs."""
    if len(identity.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError("request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Logger and level of each part of LOG_LEVEL; the first is a level without a logger."""
    own, *others = text.split(",")
    named = [("", own), *((name, level) for name, _, level in (part.partition("=") for part in others))]
    return [(name.strip(), level.strip().upper()) for name, level in named]


def _are_levels(text: str) -> bool:
    own, *others = _pairs(text)
    return own[1] in LEVELS and all(name and level in LEVELS for name, level in others)


class LogSettings(Settings):
    """Settings of logs."""

    log_level: Annotated[
        str, Rule(f"one of {', '.join(LEVELS)}, and then pairs such as numba=DEBUG after commas", _are_levels)
    ] = Field(default="INFO", description="Level of our own records, then levels of libraries by name.")
    log_format: Annotated[Literal["text", "json"], BeforeValidator(str.lower)] = Field(
        default="text", description="Records for people, or one JSON object each."
    )

    @property
    def level(self) -> str:
        """Level of our own loggers."""
        return _pairs(self.log_level)[0][1]

    @property
    def levels(self) -> dict[str, str]:
        """Levels of named loggers."""
        return dict(_pairs(self.log_level)[1:])


def configure_logging(env: Mapping[str, str], rank: int | None = None) -> None:
    """Configure logging from LOG_LEVEL and LOG_FORMAT.

    A tensor-parallel worker has its `rank` in its records, and at INFO only logs warnings and above.

    Raises:
        ConfigError: a variable is invalid; the message names it.
    """
    settings = LogSettings.from_env(env)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(rank) if settings.log_format == "json" else TextFormatter(rank))
    handler.addFilter(FewAlike())
    others = max(logging.WARNING, logging.getLevelNamesMapping()[settings.level])
    logging.basicConfig(level=others, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel("WARNING" if rank is not None and settings.level == "INFO" else settings.level)
    # Silence its traceback for each unreadable message; we log those ourselves.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    for name, level in settings.levels.items():
        logging.getLogger(name).setLevel(level)


class FewAlike:
    """Filter that passes at most `MOST_ALIKE` records of a kind in a second, so that no client can flood a log.

    A kind is a logger and a text without its arguments. The next record of it tells how many were left out.
    """

    def __init__(self) -> None:
        self._second = 0
        self._passed: Counter[tuple[str, object]] = Counter()
        self._left_out: Counter[tuple[str, object]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record passes."""
        if (second := int(record.created)) != self._second:
            self._second = second
            self._passed.clear()
        kind = (record.name, record.msg)
        self._passed[kind] += 1
        if self._passed[kind] > MOST_ALIKE:
            # Few texts of ours come so often.
            self._left_out[kind] += 1
            return False
        if num_left_out := self._left_out.pop(kind, 0):
            record.msg = f"{record.msg} ({num_left_out} more like it left out)"
        return True


class TextFormatter(logging.Formatter):
    """Text records. The request id is the client's text, so it is quoted: it cannot imitate another record."""

    def __init__(self, rank: int | None = None) -> None:
        who = "" if rank is None else f" rank {rank}"
        super().__init__(f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format the record without its exception."""
        text = super().formatMessage(record)
        return f"{text} request_id={json.dumps(identity)}" if (identity := _identity(record)) else text


class JsonFormatter(logging.Formatter):
    """JSON records: objects with `time` (RFC 3339, UTC), `level`, `logger`, `message` and, if present, `rank`,
    `request_id` and `exception`."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, str | int] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._rank is not None:
            fields["rank"] = self._rank
        if identity := _identity(record):
            fields["request_id"] = identity
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _identity(record: logging.LogRecord) -> str:
    named: str | None = getattr(record, "request_id", None)
    return named or request_id.get()
