"""Logs of a service: one line per record on stderr, as text or as JSON, with the request that it belongs to.

What a client sends or gets as text is never logged. The standard library does all of it: a formatter of few lines is no
reason for another dependency.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from coppice.core.errors import InvalidRequestError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_REQUEST_ID_BYTES = 128
FORMATS = ("text", "json")
# Whose records LOG_LEVEL is about, by the first part of a logger's name. Libraries say warnings and worse: on DEBUG a
# compiler tells of every instruction, and takes minutes for it.
OURS = ("coppice", "orchestrator", "verifier_svc", "drafter_svc", "__main__")

# The request that the current task works for; empty where there is none.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def of_request(identity: str) -> dict[str, str]:
    """The `extra` of a record that belongs to a request for which the current task does not work alone."""
    return {"request_id": identity}


def check_request_id(identity: str) -> None:
    """Raise InvalidRequestError when an id is longer than a log should have to bear."""
    if len(identity.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError("request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes")


@dataclass(frozen=True)
class LogSettings:
    """What LOG_LEVEL and LOG_FORMAT say."""

    level: str
    # Of loggers that are named.
    levels: Mapping[str, str]
    is_json: bool


def read_settings(env: Mapping[str, str]) -> LogSettings:
    """LOG_LEVEL is our own level, and after it come those of others by name, as in `DEBUG,numba=INFO`.

    Raises:
        ValueError: one of the variables has a bad value; the message names it.
    """
    own, *named = env.get("LOG_LEVEL", "").split(",")
    level = _choice("LOG_LEVEL", own, "INFO", LEVELS)
    is_json = _choice("LOG_FORMAT", env.get("LOG_FORMAT", ""), "text", FORMATS) == "json"
    return LogSettings(level, dict(_named_level(entry) for entry in named), is_json)


def configure_logging(env: Mapping[str, str], rank: int | None = None) -> None:
    """Log as LOG_LEVEL and LOG_FORMAT say.

    A process that follows another one has its `rank` in its records, and at INFO says warnings and worse: the other one
    says the rest.

    Raises:
        ValueError: one of the variables has a bad value; the message names it.
    """
    settings = read_settings(env)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(rank) if settings.is_json else TextFormatter(rank))
    others = max(logging.WARNING, logging.getLevelNamesMapping()[settings.level])
    logging.basicConfig(level=others, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel("WARNING" if rank is not None and settings.level == "INFO" else settings.level)
    # Of messages that cannot be read it tells with a traceback: a peer's nonsense, of which we have our own record.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    for name, level in settings.levels.items():
        logging.getLogger(name).setLevel(level)


class TextFormatter(logging.Formatter):
    """For people. The id is the client's own text, and so is quoted: it cannot look like another record."""

    def __init__(self, rank: int | None = None) -> None:
        who = "" if rank is None else f" rank {rank}"
        super().__init__(f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The record without its exception."""
        text = super().formatMessage(record)
        return f"{text} request_id={json.dumps(identity)}" if (identity := _identity(record)) else text


class JsonFormatter(logging.Formatter):
    """For machines: one object with `time` (RFC 3339, UTC), `level`, `logger`, `message` and, where there are such,
    `rank`, `request_id` and `exception`."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
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


def _named_level(entry: str) -> tuple[str, str]:
    """The logger and the level of `numba=DEBUG`."""
    name, equals, level = (part.strip() for part in entry.partition("="))
    if not name or not equals:
        raise ValueError(f"LOG_LEVEL must be a level, and then pairs such as numba=DEBUG, got {entry!r}")
    return name, _choice(f"LOG_LEVEL: {name}", level, "", LEVELS)


def _choice(name: str, value: str, default: str, choices: tuple[str, ...]) -> str:
    text = value.strip() or default
    known = {choice.lower(): choice for choice in choices}
    if text.lower() not in known:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {text!r}")
    return known[text.lower()]
