"""Grammar of an output: a JSON schema or a regular expression, unparsed."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from coppice.core.errors import InvalidRequestError

# Real schemas have a few kilobytes; the cost of a text grows with its length.
MAX_GRAMMAR_BYTES = 65536
# Properties of one object: compile time is quadratic in their number, 0.1 s for this many.
MAX_PROPERTIES = 1000


class GrammarKind(enum.Enum):
    """Language of a grammar; values are the fields of `Grammar` in `sampling.proto`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a grammar; the verifier compiles it and thereby checks it.

    Raises:
        InvalidRequestError: the text is empty or too long, or a schema has an object with too many properties.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not self.text:
            raise InvalidRequestError(self.field, "must not be empty")
        if len(self.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(self.field, f"must have at most {MAX_GRAMMAR_BYTES} bytes")
        # Each property has a colon, so most texts need no parsing.
        if self.kind is GrammarKind.JSON_SCHEMA and self.text.count(":") > MAX_PROPERTIES:
            most = _most_properties(self.text)
            if most > MAX_PROPERTIES:
                raise InvalidRequestError(
                    self.field, f"has {most} properties in one object, at most {MAX_PROPERTIES} are allowed"
                )

    @property
    def field(self) -> str:
        """Path of the request field, for errors."""
        return f"sampling.grammar.{self.kind.value}"


def _most_properties(text: str) -> int:
    """The largest number of entries in any `properties` of a schema; 0 for a text that is not JSON."""
    try:
        left = [json.loads(text)]
    except (ValueError, RecursionError):
        return 0  # the verifier tells what is wrong with it
    most = 0
    while left:
        value = left.pop()
        if isinstance(value, dict):
            properties = value.get("properties")
            if isinstance(properties, dict):
                most = max(most, len(properties))
            left += value.values()
        elif isinstance(value, list):
            left += value
    return most
