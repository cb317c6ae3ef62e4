"""Conversations, and a checkpoint's chat template, which renders them to prompts.

Templates are Jinja programs. They run in a sandbox with the environment that `transformers` provides, so a checkpoint
renders the same prompt in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, NoReturn

from coppice.core.errors import InvalidRequestError, UnsupportedError

FIELD = "messages"
TOOLS = "messages.tools"
MAX_MESSAGES = 1024
MAX_ROLE_BYTES = 64
MAX_TOOLS = 128
MAX_NAME_BYTES = 128
# Tags of reasoning.
THINK = ("<think>", "</think>")


class CallFormat(StrEnum):
    """Format of the calls of tools in an answer.

    Hermes and Qwen: JSON between tags. Mistral: after a token, a list in JSON, or a name and arguments for each call.
    Llama 3: the answer is JSON.
    """

    HERMES = "hermes"
    MISTRAL = "mistral"
    LLAMA3 = "llama3"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts around the parts of calls, which may be special tokens."""
        return _MARKS[self]


_MARKS = {
    CallFormat.HERMES: ("<tool_call>", "</tool_call>"),
    CallFormat.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    # Without its `<|python_tag|>`, an answer is the same call.
    CallFormat.LLAMA3: (),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is the text of a JSON object.

    Raises:
        InvalidRequestError: a text is too long, there is no name, or the arguments are no JSON object.
    """

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        _check_names("a tool call", self.id, self.name)
        if not self.name:
            raise InvalidRequestError(FIELD, "a tool call must have a name")
        _object(FIELD, "arguments of a tool call", self.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. Roles are up to the template.

    Raises:
        InvalidRequestError: the role is empty, or a name is too long.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.role.encode()) <= MAX_ROLE_BYTES:
            raise InvalidRequestError(FIELD, f"a role must have 1 to {MAX_ROLE_BYTES} bytes")
        _check_names("a message", self.tool_call_id, self.name)

    def for_template(self) -> dict[str, Any]:
        """The message as templates know it; fields that are empty are left out."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return fields | {field: text for field, text in named.items() if text}


class Reasoning(StrEnum):
    """Place of the reasoning in an answer: between tags, or up to the end tag, since the prompt opens it."""

    TAGS = "tags"
    OPEN = "open"


class ChatTemplate:
    """Chat template of a checkpoint (empty: none), with its special tokens by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """Prompt for the next answer, which may call `tools`, texts of JSON objects.

        Raises:
            InvalidRequestError: the template refuses the conversation, or renders an empty prompt; or a tool is no JSON
                object.
            UnsupportedError: there is no template, it is not valid, or it has no place for tools.
        """
        template = self._template
        if isinstance(template, str):
            raise UnsupportedError(f"{FIELD}: {template}")
        described = [_object(TOOLS, "a tool", tool) for tool in tools]
        if described and not self._has_tools:
            raise UnsupportedError(f"{TOOLS}: the target's chat template has no place for tools")
        try:
            prompt: str = template.render(
                messages=[message.for_template() for message in messages],
                add_generation_prompt=True,
                tools=described or None,
                documents=None,
                **self._special_tokens,
            )
            # No text has half a character.
            prompt.encode()
        except RecursionError as error:
            raise InvalidRequestError(FIELD, "the chat template does not come to an end") from error
        except Exception as error:
            # Of any type: a template's own error, or its failure on unexpected input.
            raise InvalidRequestError(FIELD, f"the chat template refuses them: {_reason(error)}") from error
        if not prompt:
            raise InvalidRequestError(FIELD, "the chat template makes an empty prompt of them")
        return prompt

    @property
    def call_format(self) -> CallFormat | None:
        """The format that the template names, else that of Hermes; None without a template."""
        if not self._source:
            return None
        if "<tool_call>" in self._source:
            return CallFormat.HERMES
        if "[TOOL_CALLS]" in self._source:
            return CallFormat.MISTRAL
        is_llama = "<|python_tag|>" in self._source or '"parameters":' in self._source
        return CallFormat.LLAMA3 if is_llama else CallFormat.HERMES

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """Place of the reasoning in answers; None if the template names no tag of it."""
        if not any(tag in self._source for tag in THINK):
            return None
        try:
            prompt = self.render([ChatMessage("user", "-")])
        except (InvalidRequestError, UnsupportedError):
            return Reasoning.TAGS
        return Reasoning.OPEN if prompt.rstrip().endswith(THINK[0]) else Reasoning.TAGS

    def marks(self, has_tools: bool) -> tuple[str, ...]:
        """Texts around the parts of an answer, which may be special tokens."""
        calls = self.call_format.marks if has_tools and self.call_format else ()
        return calls + (THINK if self.reasoning else ())

    @cached_property
    def _has_tools(self) -> bool:
        """Whether a valid template reads `tools`."""
        from jinja2 import meta

        return "tools" in meta.find_undeclared_variables(_environment().parse(self._source))

    @cached_property
    def _template(self) -> Any:
        """The compiled template, or a text that says why there is none."""
        if not self._source:
            return "the target has no chat template; send a prompt"
        # Imported late: only chats need it.
        import jinja2

        try:
            return _environment().from_string(self._source)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            # What it is translated to may be no Python, or too deep.
            return f"the target's chat template cannot be used: {_reason(error)}"


def _check_names(what: str, *names: str) -> None:
    if any(len(name.encode()) > MAX_NAME_BYTES for name in names):
        raise InvalidRequestError(FIELD, f"ids and names of {what} must have at most {MAX_NAME_BYTES} bytes")


def _object(field: str, what: str, text: str) -> dict[str, Any]:
    """The JSON object of a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(field, f"{what} must be a JSON object")
    return value


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}`: marks assistant text for training; renders its body."""

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
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
