"""Conversations, and the chat template of a checkpoint that makes a prompt of one.

A template is a program in Jinja. It runs in a sandbox with what `transformers` gives to templates, so that the same
checkpoint makes the same prompt here and there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from coppice.core.errors import InvalidRequestError, UnsupportedError

FIELD = "messages"
MAX_MESSAGES = 1024
MAX_ROLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What one side says. The template knows the roles.

    Raises:
        InvalidRequestError: there is no role, or it is too long.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if not 0 < len(self.role.encode()) <= MAX_ROLE_BYTES:
            raise InvalidRequestError(FIELD, f"a role must have 1 to {MAX_ROLE_BYTES} bytes")


class ChatTemplate:
    """The template of a checkpoint, empty where it has none, with its special tokens' texts by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt for the next answer.

        Raises:
            InvalidRequestError: the template refuses the conversation, or makes nothing of it.
            UnsupportedError: there is no template, or it is none that can be used.
        """
        template = self._template
        try:
            prompt: str = template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except RecursionError as error:
            raise InvalidRequestError(FIELD, "the chat template does not come to an end") from error
        except Exception as error:
            # Of any kind: the template's own words, or its way of failing with what it did not expect.
            raise InvalidRequestError(FIELD, f"the chat template refuses them: {_reason(error)}") from error
        if not prompt:
            raise InvalidRequestError(FIELD, "the chat template makes an empty prompt of them")
        return prompt

    @cached_property
    def _template(self) -> Any:
        if not self._source:
            raise UnsupportedError(f"{FIELD}: the target has no chat template; send a prompt")
        # Here, so that only those who use templates pay for loading it.
        import jinja2

        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateError as error:
            raise UnsupportedError(f"{FIELD}: the target's chat template cannot be used: {_reason(error)}") from error


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}`: marks, for training, what an assistant says; its text is that of its body."""

        tags = {"generation"}  # noqa: RUF012  as Jinja declares it

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
