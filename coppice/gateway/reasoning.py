"""Reasoning in the text of an answer, before its content and calls."""

from __future__ import annotations

from enum import Enum, auto

from coppice.core.chat import THINK
from coppice.gateway.tool_calls import AnswerParser, AnswerPiece, ReasoningDelta, certain

OPEN, CLOSE = THINK


class _Part(Enum):
    """The part of an answer that comes now."""

    START = auto()
    REASONING = auto()
    # White space after the reasoning.
    BETWEEN = auto()
    ANSWER = auto()


class ReasonedAnswer:
    """Reasoning up to its end tag, then what another parser reads.

    White space around the tags is neither. Without a tag at its beginning, an answer has no reasoning, unless the
    prompt has opened it.
    """

    def __init__(self, answer: AnswerParser, is_open: bool) -> None:
        """`is_open`: the prompt ends with the tag."""
        self._answer = answer
        self._is_open = is_open
        self._part = _Part.START
        # Text that is not given out: white space, and what may be a tag.
        self._rest = ""
        self._has_reasoned = False

    def push(self, text: str, ended: bool) -> list[AnswerPiece]:
        """Add text; returns the pieces that are certain now."""
        self._rest += text
        if self._part is _Part.START:
            self._start(ended)
        found: list[AnswerPiece] = []
        if self._part is _Part.REASONING and (reasoning := self._reasoning(ended)):
            found.append(ReasoningDelta(reasoning))
        if self._part is _Part.BETWEEN:
            self._rest = self._rest.lstrip()
            if self._rest:
                self._part = _Part.ANSWER
        rest = ""
        if self._part is _Part.ANSWER:
            rest, self._rest = self._rest, ""
        return found + self._answer.push(rest, ended)

    def _start(self, ended: bool) -> None:
        body = self._rest.lstrip()
        if body.startswith(OPEN):
            self._part, self._rest = _Part.REASONING, body[len(OPEN) :]
        elif ended or not OPEN.startswith(body):
            self._part = _Part.REASONING if self._is_open else _Part.ANSWER

    def _reasoning(self, ended: bool) -> str:
        """Reasoning that is certain now."""
        if not self._has_reasoned:
            self._rest = self._rest.lstrip()
        at = self._rest.find(CLOSE)
        if at < 0 and ended:
            shown, self._rest = self._rest, ""
        else:
            shown = self._rest[: at if at >= 0 else certain(self._rest, CLOSE)].rstrip()
            self._rest = self._rest[at + len(CLOSE) if at >= 0 else len(shown) :]
        self._has_reasoned |= bool(shown)
        if at >= 0:
            self._part = _Part.BETWEEN
        return shown
