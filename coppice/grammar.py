"""What an output has to look like: a JSON schema or a regular expression, as text that nobody has read yet."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coppice.errors import InvalidRequestError

# Schemas that people write have a few kilobytes; what a text may cost grows with its length.
MAX_GRAMMAR_BYTES = 65536


class GrammarKind(enum.Enum):
    """How a grammar is written; values are the fields of `Grammar` in `sampling.proto`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar's text; whether it means anything is found out by the verifier, which compiles it.

    Raises:
        InvalidRequestError: the text is empty or too long.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not self.text:
            raise InvalidRequestError(self.field, "must not be empty")
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(self.field, f"must have at most {MAX_GRAMMAR_BYTES} bytes")

    @property
    def field(self) -> str:
        """The field that the text came in, for errors."""
        return f"sampling.grammar.{self.kind.value}"
