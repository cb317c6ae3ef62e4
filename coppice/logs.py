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

from coppice.errors import InvalidRequestError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_REQUEST_ID_BYTES = 128
FORMATS = ("text", "json")

# The request that the current task works for; empty where there is none.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def of_request(identity: str) -> dict[str, str]:
    """The `extra` of a record that belongs to a request for which the current task does not work alone."""
    return {"request_id": identity}


def check_request_id(identity: str) -> None:
    """Raise InvalidRequestError when an id is longer than a log should have to bear."""
    if len(identity.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError("request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes")


def configure_logging(env: Mapping[str, str]) -> None:
    """Log as LOG_LEVEL and LOG_FORMAT say.

    Raises:
        ValueError: one of them has a bad value; the message names it.
    """
    level = _choice(env, "LOG_LEVEL", "INFO", LEVELS)
    formatter = _choice(env, "LOG_FORMAT", "text", FORMATS)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if formatter == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Of messages that cannot be read it tells with a traceback: a peer's nonsense, of which we have our own record.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)


class TextFormatter(logging.Formatter):
    """For people. The id is the client's own text, and so is quoted: it cannot look like another record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The record without its exception."""
        text = super().formatMessage(record)
        return f"{text} request_id={json.dumps(identity)}" if (identity := _identity(record)) else text


class JsonFormatter(logging.Formatter):
    """For machines: one object with `time` (RFC 3339, UTC), `level`, `logger`, `message` and, where there are such,
    `request_id` and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identity := _identity(record):
            fields["request_id"] = identity
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _identity(record: logging.LogRecord) -> str:
    named: str | None = getattr(record, "request_id", None)
    return named or request_id.get()


def _choice(env: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    text = env.get(name, "").strip() or default
    known = {choice.lower(): choice for choice in choices}
    if text.lower() not in known:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {text!r}")
    return known[text.lower()]
