"""Calls of tools in the text of an answer.

A chunk may end anywhere, also inside a tag or between two calls: parsers look at the whole text so far, and what they
have given out never changes. However a text is cut, its pieces join to the same content and calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coppice.core.chat import CallFormat

# The common format of open models (Hermes, Qwen): a JSON object with `name` and `arguments` between these.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Mistral: after this a list in JSON, or name and arguments of one call; its templates refuse ids of another length.
MISTRAL_OPEN, MISTRAL_ID_LENGTH = "[TOOL_CALLS]", 9
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*")
# Llama 3: before calls that are the whole answer, or nothing.
LLAMA_OPEN = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call: the first has id and name, and all parts' `arguments` join to the text of a JSON object."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A part of the reasoning before an answer."""

    text: str


# Content is a plain text.
AnswerPiece = str | CallDelta | ReasoningDelta


class AnswerParser(Protocol):
    """Reads an answer's text as it comes."""

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
        """Add text; returns the pieces that are certain now. `ended`: no more comes."""


class PlainText:
    """An answer without calls."""

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
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

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
        """Add text; returns the content and the calls that are certain now."""
        self._rest += text
        found: list[AnswerPiece] = []
        while self._next_tag(found):
            pass
        if found:
            self._after_call = isinstance(found[-1], CallDelta)
        return found + self._last() if ended else found

    def _next_tag(self, found: list[AnswerPiece]) -> bool:
        """Go on to the next tag; False where there is none yet."""
        if self._before is None:
            at = self._rest.find(OPEN)
            content = self._rest[: at if at >= 0 else certain(self._rest, OPEN)]
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

    def _last(self) -> list[AnswerPiece]:
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


class MistralCalls:
    """Calls at the end of an answer, after content; they come with its end.

    What stands after a mark and is no call of a known tool stays content, with all that follows.
    """

    def __init__(self, names: Collection[str], call_id: str) -> None:
        """`names` are those of the tools; the ids of calls begin with `call_id`, which has no digits."""
        self._names = frozenset(names)
        self._call_id = call_id
        # White space and the beginning of a mark; from the first mark on, everything.
        self._rest = ""
        self._is_open = False

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
        """Add text; returns the content that is certain now, and at the end the calls."""
        self._rest += text
        found: list[AnswerPiece] = []
        if not self._is_open:
            at = self._rest.find(MISTRAL_OPEN)
            self._is_open = at >= 0
            content = self._rest[: at if at >= 0 else certain(self._rest, MISTRAL_OPEN)].rstrip()
            found += [content] if content else []
            self._rest = self._rest[len(content) :]
        if not ended:
            return found
        rest, self._rest = self._rest, ""
        calls, at = self._calls(rest)
        left = rest[at:]
        for index, (name, arguments) in enumerate(calls):
            number = str(index)
            found.append(CallDelta(index, arguments, self._call_id[: MISTRAL_ID_LENGTH - len(number)] + number, name))
        return found if not left or (calls and left.isspace()) else [*found, left]

    def _calls(self, text: str) -> tuple[list[tuple[str, str]], int]:
        """Names and arguments of the calls that a text begins with, and where they end."""
        calls: list[tuple[str, str]] = []
        end = 0
        while (at := _after(text, end)) < len(text) and text.startswith(MISTRAL_OPEN, at):
            at = _after(text, at + len(MISTRAL_OPEN))
            name = None if text.startswith("[", at) else _MISTRAL_NAME.match(text, at)
            value, after = _json_at(text, at if name is None else name.end())
            listed = value if name is None else [{"name": name[1], "arguments": value}]
            found = [_call_of(one, self._names) for one in listed] if isinstance(listed, list) else []
            known = [one for one in found if one is not None]
            if not known or len(known) < len(found):
                break
            calls, end = calls + known, after
        return calls, end


class LlamaCalls:
    """An answer that is nothing but calls, JSON objects with `;` or white space between; others are content."""

    def __init__(self, names: Collection[str], call_id: str) -> None:
        """`names` are those of the tools; the ids of calls begin with `call_id`."""
        self._names = frozenset(names)
        self._call_id = call_id
        # Everything, as long as the answer may be calls.
        self._rest = ""
        self._is_content = False

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
        """Add text; returns it where the answer is no call, else all calls at the end."""
        self._rest += text
        if not self._is_content:
            body = self._rest.lstrip()
            marked = body.startswith(LLAMA_OPEN)
            body = body[len(LLAMA_OPEN) :].lstrip() if marked else body
            if not ended and (not body or body[0] == "{" or (not marked and LLAMA_OPEN.startswith(body))):
                return []
            if ended and (calls := self._calls(body)):
                return [
                    CallDelta(index, arguments, f"{self._call_id}{index}", name)
                    for index, (name, arguments) in enumerate(calls)
                ]
            self._is_content = True
        rest, self._rest = self._rest, ""
        return [rest] if rest else []

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments of calls that are all of a text; none if something else is there."""
        calls: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            value, at = _json_at(text, at)
            # An object with a name alone may be an answer in JSON.
            is_call = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
            call = _call_of(value, self._names) if is_call else None
            if call is None:
                return []
            calls.append(call)
            at = _after(text, at, ";")
        return calls


# How the calls are read that a model makes of itself.
FREE_CALLS: Mapping[CallFormat, type[TaggedCalls] | type[MistralCalls] | type[LlamaCalls]] = {
    CallFormat.HERMES: TaggedCalls,
    CallFormat.MISTRAL: MistralCalls,
    CallFormat.LLAMA3: LlamaCalls,
}


class ForcedCall:
    """An answer that is the arguments of one tool, by its grammar."""

    def __init__(self, name: str, call_id: str) -> None:
        self._name: str | None = name
        self._id = f"{call_id}0"

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
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

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
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
        return _call_of(json.loads(text, parse_constant=_no_number), names)
    except (ValueError, RecursionError):
        return None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, and where it ends; None and the place for what is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _after(text: str, at: int, also: str = "") -> int:
    """The next place with neither white space nor a character of `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def _call_of(call: Any, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call in the form of JSON."""
    try:
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


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def certain(text: str, mark: str) -> int:
    """Length of the text before what may be the beginning of a mark at its end."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return len(text) - size
    return len(text)
