"""Calls of tools in the text of an answer.

A chunk may end anywhere, also inside a tag or between two calls: parsers look at the whole text so far, and what they
have given out never changes. However a text is cut, its pieces join to the same content and calls.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

# The common format of open models (Hermes, Qwen): a JSON object with `name` and `arguments` between these.
OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call: the first has id and name, and all parts' `arguments` join to the text of a JSON object."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class AnswerParser(Protocol):
    """Reads an answer's text as it comes."""

    def push(self, text: str, ended: bool) -> list[str | CallDelta]:
        """Add text; returns the content (str) and the calls that are certain now. `ended`: no more comes."""


class PlainText:
    """An answer without calls."""

    def push(self, text: str, ended: bool) -> list[str | CallDelta]:
        """Add text; all of it is content."""
        return [text] if text else []


class TaggedCalls:
    """Calls between tags, with content around them.

    White space before a call, and between a call and the end, is no content. What stands between tags and is no call of
    a known tool stays content.
    """

    def __init__(self, names: Collection[str], call_id: str) -> None:
        """`names` are those of the tools; the ids of calls begin with `call_id`."""
        self._names = frozenset(names)
        self._call_id = call_id
        self._num_calls = 0
        # Whether a call was the last that was given out.
        self._after_call = False
        # Text that is not given out: outside a call white space and the beginning of a tag, inside it everything.
        self._rest = ""
        # White space before the tag of a call that is open; None outside.
        self._before: str | None = None
        # Where to look for the end of that call.
        self._looked = 0

    def push(self, text: str, ended: bool) -> list[str | CallDelta]:
        """Add text; returns the content and the calls that are certain now."""
        self._rest += text
        found: list[str | CallDelta] = []
        while self._next_tag(found):
            pass
        if found:
            self._after_call = isinstance(found[-1], CallDelta)
        return found + self._last() if ended else found

    def _next_tag(self, found: list[str | CallDelta]) -> bool:
        """Go on to the next tag; False where there is none yet."""
        if self._before is None:
            at = self._rest.find(OPEN)
            content = self._rest[: at if at >= 0 else _certain(self._rest)]
            shown = content.rstrip()
            if at < 0:
                # White space before what may be a tag is kept back, too.
                found += [shown] if shown else []
                self._rest = self._rest[len(shown) :]
                return False
            found += [shown] if shown else []
            self._before, self._rest, self._looked = content[len(shown) :], self._rest[at + len(OPEN) :], 0
            return True
        at = self._rest.find(CLOSE, self._looked)
        if at < 0:
            self._looked = max(0, len(self._rest) - len(CLOSE) + 1)
            return False
        body, before = self._rest[:at], self._before
        self._rest, self._before = self._rest[at + len(CLOSE) :], None
        call = self._call(body)
        found.append(f"{before}{OPEN}{body}{CLOSE}" if call is None else call)
        return True

    def _last(self) -> list[str | CallDelta]:
        rest, before = self._rest, self._before
        self._rest, self._before = "", None
        if before is not None:
            # A model may end its answer in place of the last tag.
            call = self._call(rest)
            return [f"{before}{OPEN}{rest}" if call is None else call]
        return [rest] if rest and not (self._after_call and rest.isspace()) else []

    def _call(self, body: str) -> CallDelta | None:
        named = parsed_call(body, self._names)
        if named is None:
            return None
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return CallDelta(index, named[1], f"{self._call_id}{index}", named[0])


class ForcedCall:
    """An answer that is the arguments of one tool, by its grammar."""

    def __init__(self, name: str, call_id: str) -> None:
        self._name: str | None = name
        self._id = f"{call_id}0"

    def push(self, text: str, ended: bool) -> list[str | CallDelta]:
        """Add text; all of it is arguments."""
        if self._name is not None and (text or ended):
            name, self._name = self._name, None
            return [CallDelta(0, text, self._id, name)]
        return [CallDelta(0, text)] if text else []


class RequiredCall:
    """An answer that is one call, a JSON object by its grammar; a tool's name is known only with all of it."""

    def __init__(self, names: Collection[str], call_id: str) -> None:
        self._names = frozenset(names)
        self._id = f"{call_id}0"
        self._text: list[str] = []

    def push(self, text: str, ended: bool) -> list[str | CallDelta]:
        """Add text; returns the call at the end, or the text of one that was cut off."""
        self._text.append(text)
        if not ended:
            return []
        whole = "".join(self._text)
        named = parsed_call(whole, self._names)
        if named is None:
            return [whole] if whole else []
        return [CallDelta(0, named[1], self._id, named[0])]


def parsed_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments, as the text of a JSON object, of a call; None for what is no call of one of these tools."""
    try:
        call: Any = json.loads(text, parse_constant=_no_number)
        arguments = call["arguments"] if "arguments" in call else call.get("parameters", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_no_number)
        if call["name"] not in names or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        # Half a surrogate pair is JSON, but no text.
        written.encode()
        return call["name"], written
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _certain(text: str) -> int:
    """Length of the text before what may be the beginning of a tag at its end."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return len(text) - size
    return len(text)
