"""From the fields of HTTP to a request of the gRPC contract, and back to the fields' names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.client import ACCEPTANCE
from coppice.gateway.errors import invalid, unsupported
from coppice.gateway.fields import (
    MAX_PROMPTS,
    ChatFields,
    ChosenTool,
    CompletionFields,
    GenerationFields,
    MessageFields,
    SpeculationFields,
    ToolFields,
)
from coppice.v1 import inference_pb2, sampling_pb2

# Of OpenAI's API; the contract's own default temperature is 0, and its completions go on to the context's end.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_MODES = {
    "auto": inference_pb2.SpeculationPolicy.MODE_AUTO,
    "off": inference_pb2.SpeculationPolicy.MODE_OFF,
    "forced": inference_pb2.SpeculationPolicy.MODE_FORCED,
}
# Fields with the same name in both, by message of the contract.
_SAMPLING = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_STOPPING = ("min_tokens", "ignore_eos")
_RENAMED = {
    "num_outputs": "n",
    "token_ids": "prompt",
    "messages.tools": "tools",
    "messages.tool_calls": "messages",
    "stopping.stop_strings": "stop",
    "response.top_log_probs": "top_logprobs",
    "x-tenant-id": "user",
    "request_id": "x-request-id",
}
# Characters with a meaning in regular expressions of Rust's crate.
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


@dataclass(frozen=True)
class CallRequests:
    """Serialized GenerateRequests of one body, each in two parts: what all have in common, and its own prompt.

    Protocol Buffers merge messages whose bytes are joined.
    """

    shared: bytes
    prompts: tuple[bytes, ...]


def completion_requests(fields: CompletionFields, request_id: str) -> CallRequests:
    """One request for each prompt.

    Raises:
        ApiError: a field cannot be served.
    """
    prompts = fields.prompts
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid("prompt", f"must be 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
    request = _request(fields, request_id)
    if not request.stopping.HasField("max_tokens"):
        request.stopping.max_tokens = max(DEFAULT_COMPLETION_TOKENS, fields.min_tokens or 0)
    _ask_log_probs(request, fields.logprobs)
    return CallRequests(request.SerializeToString(), tuple(map(_prompt, prompts)))


def _prompt(prompt: str | list[int]) -> bytes:
    """A request's part for one prompt."""
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(prompt=prompt).SerializeToString()
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt)).SerializeToString()


def chat_requests(fields: ChatFields, request_id: str) -> CallRequests:
    """The request for a conversation.

    Raises:
        ApiError: a field cannot be served.
    """
    request = _request(fields, request_id)
    _check_tools(fields)
    used = () if fields.tool_choice == "none" else fields.tools or ()
    request.messages.CopyFrom(conversation(fields.messages, used))
    if fields.max_completion_tokens is not None:
        request.stopping.max_tokens = fields.max_completion_tokens
    _ask_log_probs(request, (fields.top_logprobs or 0) if fields.logprobs else None)
    return CallRequests(request.SerializeToString(), (b"",))


def conversation(messages: Sequence[MessageFields], tools: Sequence[ToolFields]) -> inference_pb2.ChatMessages:
    """A conversation, and the tools that its answer may call."""
    said = inference_pb2.ChatMessages(tools=[json.dumps(tool.model_dump(exclude_none=True)) for tool in tools])
    for message in messages:
        # Templates know the older of the two names.
        role = "system" if message.role == "developer" else message.role
        one = said.messages.add(
            role=role, content=message.text, tool_call_id=message.tool_call_id or "", name=message.name or ""
        )
        for call in message.tool_calls or ():
            one.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    return said


def _check_tools(fields: ChatFields) -> None:
    if fields.tool_choice in (None, "auto"):
        if fields.tools and fields.parallel_tool_calls is False:
            raise unsupported("parallel_tool_calls", "cannot be false unless tool_choice asks for a call")
        # What a model calls of itself is not held to a schema.
        if any(tool.function.strict for tool in fields.tools or ()):
            raise unsupported("tools", "strict is kept only where tool_choice asks for a call")


def _call_grammar(tools: Sequence[ToolFields], choice: str | ChosenTool | None) -> sampling_pb2.Grammar | None:
    """Grammar of a call that is asked for: arguments of the chosen tool, or a call of any; None where none is."""
    if isinstance(choice, ChosenTool):
        [schema] = [_parameters(tool) for tool in tools if tool.function.name == choice.function.name]
        return json_grammar(schema)
    return json_grammar(_any_call(tools)) if choice == "required" else None


def _any_call(tools: Sequence[ToolFields]) -> Mapping[str, Any]:
    """JSON schema of a call of any of these tools."""
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        schema = dict(_parameters(tool))
        # References go by the root.
        for place in ("$defs", "definitions"):
            meanings = schema.pop(place, {})
            if not isinstance(meanings, dict):
                raise invalid("tools", f"{place} of parameters must be an object")
            for name, meaning in meanings.items():
                if shared.setdefault(place, {}).setdefault(name, meaning) != meaning:
                    raise unsupported("tools", f"two give {name!r} another meaning in {place}")
        properties = {"name": {"const": tool.function.name}, "arguments": schema}
        calls.append(
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        )
    return {"anyOf": calls, **shared}


def _parameters(tool: ToolFields) -> Mapping[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def renaming(fields: GenerationFields) -> Callable[[str], str]:
    """From a field of the contract to the one that the request has for it."""
    own: dict[str, str] = {}
    if isinstance(fields, ChatFields) and fields.max_completion_tokens is not None:
        own["stopping.max_tokens"] = "max_completion_tokens"
    if isinstance(fields, CompletionFields):
        own["response.top_log_probs"] = "logprobs"
    grammars = _grammars(fields)
    if grammars:
        own |= dict.fromkeys(
            ("sampling.grammar", "sampling.grammar.json_schema", "sampling.grammar.regex"), next(iter(grammars))
        )
    names = _RENAMED | own

    def rename(field: str) -> str:
        if field in names:
            return names[field]
        head, _, rest = field.partition(".")
        return rest if rest and head in ("sampling", "stopping", "response") else field

    return rename


def _request(fields: GenerationFields, request_id: str) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(request_id=request_id, cache_salt=fields.cache_salt or "")
    sampling, stopping = request.sampling, request.stopping
    sampling.temperature = DEFAULT_TEMPERATURE
    _copy(fields, sampling, _SAMPLING)
    _copy(fields, stopping, _STOPPING)
    if fields.max_tokens is not None:
        stopping.max_tokens = fields.max_tokens
    if fields.top_k is not None:
        sampling.top_k = max(fields.top_k, 0)
    if fields.seed is not None:
        sampling.seed = fields.seed % 2**64
    if fields.n is not None:
        request.num_outputs = fields.n
    if fields.priority is not None:
        request.priority = fields.priority
    stopping.stop_strings.extend([fields.stop] if isinstance(fields.stop, str) else fields.stop or ())
    stopping.stop_token_ids.extend(fields.stop_token_ids or ())
    sampling.allowed_token_ids.extend(fields.allowed_token_ids or ())
    for token, bias in (fields.logit_bias or {}).items():
        sampling.logit_bias[_token_id(token)] = bias
    counts = fields.stream_options is not None and bool(fields.stream_options.continuous_usage_stats)
    request.response.token_ids = counts or bool(fields.return_token_ids)
    _set_grammar(sampling, _grammars(fields))
    if fields.speculation is not None:
        _set_speculation(request.speculation, fields.speculation)
    return request


def _copy(fields: GenerationFields, message: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if (value := getattr(fields, name)) is not None:
            setattr(message, name, value)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 2**32):
        raise invalid("logit_bias", f"{text[:20]!r} is not a token id")
    return int(text)


def _ask_log_probs(request: inference_pb2.GenerateRequest, number: int | None) -> None:
    if number is not None:
        request.response.top_log_probs = number
        request.response.token_bytes = True


def _set_speculation(policy: inference_pb2.SpeculationPolicy, fields: SpeculationFields) -> None:
    if fields.mode is not None:
        policy.mode = _MODES[fields.mode]
    policy.sources.extend(fields.sources or ())
    if fields.max_nodes is not None:
        policy.max_nodes = fields.max_nodes
    if fields.acceptance is not None:
        policy.acceptance = ACCEPTANCE[fields.acceptance]


def _grammars(fields: GenerationFields) -> dict[str, sampling_pb2.Grammar]:
    """Grammars by the field that asks for one."""
    found: dict[str, sampling_pb2.Grammar] = {}
    form, guide = fields.response_format, fields.structured_outputs
    if isinstance(fields, ChatFields) and (call := _call_grammar(fields.tools or (), fields.tool_choice)) is not None:
        found["tool_choice"] = call
    if form is not None and form.type != "text":
        found["response_format"] = json_grammar(ANY_OBJECT if form.json_schema is None else form.json_schema.schema_)
    if fields.guided_json is not None:
        found["guided_json"] = json_grammar(fields.guided_json)
    if fields.guided_regex is not None:
        found["guided_regex"] = sampling_pb2.Grammar(regex=fields.guided_regex)
    if fields.guided_choice is not None:
        found["guided_choice"] = _choice("guided_choice", fields.guided_choice)
    if guide is not None and guide.json_ is not None:
        found["structured_outputs.json"] = json_grammar(guide.json_)
    if guide is not None and guide.regex is not None:
        found["structured_outputs.regex"] = sampling_pb2.Grammar(regex=guide.regex)
    if guide is not None and guide.choice is not None:
        found["structured_outputs.choice"] = _choice("structured_outputs.choice", guide.choice)
    return found


def has_grammar(fields: GenerationFields) -> bool:
    """Whether the answer is held to a grammar."""
    return bool(_grammars(fields))


def _set_grammar(sampling: sampling_pb2.SamplingParams, grammars: Mapping[str, sampling_pb2.Grammar]) -> None:
    if len(grammars) > 1:
        first, second, *_ = grammars
        raise invalid(second, f"excludes {first}")
    for grammar in grammars.values():
        sampling.grammar.CopyFrom(grammar)


def json_grammar(schema: Mapping[str, Any] | str) -> sampling_pb2.Grammar:
    """Grammar of a JSON schema, an object or its text."""
    return sampling_pb2.Grammar(json_schema=schema if isinstance(schema, str) else json.dumps(schema))


def _choice(field: str, texts: list[str]) -> sampling_pb2.Grammar:
    if not texts or not all(texts):
        raise invalid(field, "must have texts that are not empty")
    escaped = [_SPECIAL.sub(lambda match: "\\" + match[0], text) for text in texts]
    return sampling_pb2.Grammar(regex=f"({'|'.join(escaped)})")
