"""Validation of a request: all limits, checked before memory is allocated for it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from coppice.core.chat import FIELD as CHAT
from coppice.core.chat import (
    MAX_MESSAGES,
    MAX_ROLE_BYTES,
    MAX_TOOLS,
    TOOLS,
    ChatMessage,
    ChatTemplate,
    ToolCall,
)
from coppice.core.denoising import Denoising
from coppice.core.errors import InvalidRequestError, UnsupportedError
from coppice.core.log_probs import check_top_log_probs
from coppice.core.sampling import MAX_STOP_STRINGS, MAX_TOKEN_LIST, SamplingParams, StoppingOptions, check_token_ids
from coppice.core.tokenizer import TargetTokenizer
from coppice.obs.logs import MAX_REQUEST_ID_BYTES, check_request_id
from coppice.v1 import inference_pb2, sampling_pb2
from coppice.wire import convert as wire
from coppice.wire.message_sizes import (
    HEAD_BYTES,
    LISTED_ID_BYTES,
    MAX_FIELDS,
    SAMPLING_BYTES,
    SCALAR_BYTES,
    STOPPING_BYTES,
    MessageSizes,
)
from orchestrator.peers.verifier_client import VerifierInfo

MAX_CACHE_SALT_BYTES = 128
TENANT_KEY = "x-tenant-id"
MAX_TENANT_CHARACTERS = 128
# Well above any real number of drafter kinds and length of their names.
MAX_SOURCES = 64
MAX_SOURCE_BYTES = 128
# Bytes of text per token of context: no known vocabulary has longer tokens.
MAX_BYTES_PER_TOKEN = 512
# Cap of a prompt in bytes, or this many bytes per token if that is more: text has about four bytes per token, so a long
# context does not justify hundreds for each. Longer prompts can be sent as token ids.
MAX_PROMPT_BYTES = 4 * 1024 * 1024
LEAST_BYTES_PER_TOKEN = 32
# Takes about a millisecond to tokenize; longer prompts are tokenized off the event loop.
INLINE_PROMPT_CHARACTERS = 4096
# Calls of tools in all messages of a conversation.
MAX_CALLS = 512
# Cost of one chat message in the template, in characters of prompt.
MESSAGE_CHARACTERS = 64

# Runs the encoding of a long prompt when it is its turn.
Encode = Callable[[Callable[[], list[int]]], Awaitable[list[int]]]

_MODES = inference_pb2.SpeculationPolicy


@dataclass(frozen=True)
class GenerationRequest:
    """Validated request: defaults filled in, prompt tokenized."""

    request_id: str
    prompt_ids: tuple[int, ...]
    resume_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingOptions
    acceptance: sampling_pb2.AcceptanceRule
    exactness: sampling_pb2.Exactness
    priority: int
    cache_salt: str
    want_text: bool
    # Texts around reasoning and calls, also where they are special tokens.
    marks: tuple[str, ...]
    want_token_ids: bool
    # None: no log-probabilities; n: those of the generated tokens and of the n likeliest tokens.
    top_log_probs: int | None
    # Whether log-probabilities carry the bytes of their tokens.
    want_token_bytes: bool
    # Whether drafts must be sampled trees (TRAVERSAL acceptance at a temperature).
    samples_drafts: bool
    # Whether to draft, sources to use (empty: all) and most nodes of a draft.
    speculates: bool
    forced: bool
    sources: tuple[str, ...]
    max_nodes: int | None
    denoising: Denoising


def max_prompt_bytes(max_context: int) -> int:
    """Largest size of a text prompt in bytes, for a context of `max_context` tokens."""
    return min(MAX_BYTES_PER_TOKEN * max_context, max(MAX_PROMPT_BYTES, LEAST_BYTES_PER_TOKEN * max_context))


def request_sizes(max_context: int) -> MessageSizes:
    """Maximum size of each field of a GenerateRequest, for a context of `max_context` tokens."""
    sizes = _field_bytes(max_context)
    return MessageSizes(inference_pb2.GenerateRequest, sizes | _conversation_bytes(sizes["messages"]))


def tokenize_sizes(max_context: int) -> MessageSizes:
    """Maximum size of each field of a TokenizeRequest, for a context of `max_context` tokens."""
    sizes = {name: size for name, size in _field_bytes(max_context).items() if name in ("prompt", "messages")}
    return MessageSizes(inference_pb2.TokenizeRequest, sizes | _conversation_bytes(sizes["messages"]))


def detokenize_sizes(max_context: int) -> MessageSizes:
    """Maximum size of the field of a DetokenizeRequest, for a context of `max_context` tokens."""
    return MessageSizes(inference_pb2.DetokenizeRequest, {"token_ids": LISTED_ID_BYTES * max_context})


def _conversation_bytes(most: int) -> dict[str, int]:
    """Limits of nested fields, so that a conversation's messages, tools and calls are counted."""
    return dict.fromkeys(("messages.messages", "messages.messages.tool_calls", "messages.tools"), most)


def max_request_bytes(max_context: int) -> int:
    """Largest size of a GenerateRequest in bytes, for a context of `max_context` tokens."""
    sizes = _field_bytes(max_context)
    # A oneof: only the largest counts.
    inputs = [sizes.pop(name) for name in ("prompt", "token_ids", "messages")]
    return sum(sizes.values()) + max(inputs) + SCALAR_BYTES


def _field_bytes(max_context: int) -> dict[str, int]:
    """Largest size in bytes of each field with a length, by name."""
    return {
        "request_id": MAX_REQUEST_ID_BYTES,
        "prompt": max_prompt_bytes(max_context),
        "token_ids": LISTED_ID_BYTES * max_context,
        # All text of a conversation but roles counts as its prompt; the rest are heads of fields, three more in a call.
        "messages": max_prompt_bytes(max_context)
        + MAX_MESSAGES * MAX_ROLE_BYTES
        + (MAX_FIELDS + 3 * MAX_CALLS) * HEAD_BYTES,
        "sampling": SAMPLING_BYTES,
        "stopping": STOPPING_BYTES,
        "response": SCALAR_BYTES,
        "speculation": (HEAD_BYTES + MAX_SOURCE_BYTES) * MAX_SOURCES + SCALAR_BYTES,
        "resume_token_ids": LISTED_ID_BYTES * max_context,
        "cache_salt": MAX_CACHE_SALT_BYTES,
    }


async def validate(
    message: inference_pb2.GenerateRequest,
    info: VerifierInfo,
    tokenizer: TargetTokenizer,
    template: ChatTemplate,
    known_sources: frozenset[str],
    connected_sources: Sequence[str],
    encode: Encode,
) -> GenerationRequest:
    """Check a request and fill in its defaults.

    Raises:
        InvalidRequestError: the caller's mistake; names the field.
        UnsupportedError: valid, but not offered by this version.
    """
    _check_sizes(message, info.max_context_tokens)
    _check_supported(message, info)
    check_request_id(message.request_id)
    if len(message.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError("cache_salt", f"must have at most {MAX_CACHE_SALT_BYTES} bytes")
    sampling = wire.sampling_from_proto(message.sampling)
    if not message.sampling.HasField("seed"):
        sampling = replace(sampling, seed=secrets.randbits(64))
    stopping = wire.stopping_from_proto(message.stopping)
    check_top_log_probs("response.top_log_probs", message.response.top_log_probs)
    _check_vocabulary(message, sampling, stopping, info.vocab_size)
    _check_sources(message.speculation, known_sources, connected_sources)
    _check_resume(message, stopping)
    ids = await _input_ids(message, info, tokenizer, template, encode)
    _check_context(message, len(ids), info.max_context_tokens)
    policy = message.speculation
    samples_drafts = wire.samples_drafts(policy.acceptance, sampling.temperature)
    if samples_drafts and sampling.grammar is not None:
        raise UnsupportedError("sampling.grammar: is not offered together with speculation.acceptance TRAVERSAL")
    max_nodes = policy.max_nodes if policy.HasField("max_nodes") else None
    return GenerationRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=ids,
        resume_ids=tuple(message.resume_token_ids),
        sampling=sampling,
        stopping=stopping,
        acceptance=policy.acceptance or sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW,
        exactness=policy.exactness,
        samples_drafts=samples_drafts,
        priority=message.priority,
        cache_salt=message.cache_salt,
        want_text=not message.response.HasField("text") or message.response.text,
        marks=template.marks(bool(message.messages.tools)) if message.messages.messages else (),
        want_token_ids=not message.response.HasField("token_ids") or message.response.token_ids,
        top_log_probs=message.response.top_log_probs if message.response.HasField("top_log_probs") else None,
        want_token_bytes=message.response.token_bytes,
        speculates=policy.mode != _MODES.MODE_OFF and max_nodes != 0,
        forced=policy.mode == _MODES.MODE_FORCED,
        sources=tuple(policy.sources),
        max_nodes=max_nodes,
        denoising=wire.denoising_from_proto(policy.denoising),
    )


def wanted_outputs(message: inference_pb2.GenerateRequest, max_outputs: int) -> int:
    """Number of outputs requested.

    Raises:
        InvalidRequestError: zero, above `max_outputs`, or several with `resume_token_ids`.
    """
    wanted = message.num_outputs if message.HasField("num_outputs") else 1
    if not 1 <= wanted <= max_outputs:
        raise InvalidRequestError("num_outputs", f"must be in [1, {max_outputs}], got {wanted}")
    if wanted > 1 and message.resume_token_ids:
        raise InvalidRequestError(
            "num_outputs", "must be 1 with resume_token_ids: resume each output by itself, with its own seed"
        )
    return wanted


def certain_tokens(message: inference_pb2.GenerateRequest, max_context: int) -> int:
    """Lower bound on the new tokens of each output that ends without an error; arbitrary for invalid requests.

    At most the room in the context of `max_context` tokens, as far as it is known before the prompt is encoded.
    """
    stopping = message.stopping
    may_stop = not stopping.ignore_eos or stopping.stop_strings or stopping.stop_token_ids
    if may_stop or message.sampling.HasField("grammar") or not stopping.HasField("max_tokens"):
        wanted = stopping.min_tokens
    else:
        wanted = stopping.max_tokens
    room = max_context - max(1, len(message.token_ids.ids))
    return max(1, min(wanted, room) - len(message.resume_token_ids))


def wanted_tenant(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Tenant named in the metadata `x-tenant-id`; empty if there is none.

    Raises:
        InvalidRequestError: the name is too long.
    """
    tenant = next((value for key, value in metadata if key == TENANT_KEY and isinstance(value, str)), "")
    if len(tenant) > MAX_TENANT_CHARACTERS:
        raise InvalidRequestError(TENANT_KEY, f"must have at most {MAX_TENANT_CHARACTERS} characters")
    return tenant


def _check_sizes(message: inference_pb2.GenerateRequest, max_context: int) -> None:
    """Check lengths of lists before any is copied: a message may hold millions of entries."""
    sampling, stopping = message.sampling, message.stopping
    sizes = (
        ("token_ids", len(message.token_ids.ids), max_context),
        ("resume_token_ids", len(message.resume_token_ids), max_context),
        ("sampling.logit_bias", len(sampling.logit_bias), MAX_TOKEN_LIST),
        ("sampling.allowed_token_ids", len(sampling.allowed_token_ids), MAX_TOKEN_LIST),
        ("sampling.bad_token_ids", len(sampling.bad_token_ids), MAX_TOKEN_LIST),
        ("stopping.stop_strings", len(stopping.stop_strings), MAX_STOP_STRINGS),
        ("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_TOKEN_LIST),
        ("speculation.sources", len(message.speculation.sources), MAX_SOURCES),
    )
    for sized in sizes:
        _check_length(*sized)


def _check_supported(message: inference_pb2.GenerateRequest, info: VerifierInfo) -> None:
    policy = message.speculation
    # proto3 enums are open: unknown numbers pass through.
    known = (
        ("mode", policy.mode, _MODES.Mode.values()),
        ("acceptance", policy.acceptance, sampling_pb2.AcceptanceRule.values()),
        ("exactness", policy.exactness, sampling_pb2.Exactness.values()),
    )
    for name, value, values in known:
        if value not in values:
            raise InvalidRequestError(f"speculation.{name}", f"{value} is not a known value")
    if policy.acceptance and policy.acceptance not in info.acceptance_rules:
        rule = sampling_pb2.AcceptanceRule.Name(policy.acceptance).removeprefix("ACCEPTANCE_RULE_")
        raise UnsupportedError(f"speculation.acceptance: the verifier does not offer {rule}")


def _check_vocabulary(
    message: inference_pb2.GenerateRequest,
    sampling: SamplingParams,
    stopping: StoppingOptions,
    vocab_size: int,
) -> None:
    named = {
        "token_ids": tuple(message.token_ids.ids),
        "resume_token_ids": tuple(message.resume_token_ids),
        "stopping.stop_token_ids": stopping.stop_token_ids,
        **sampling.named_token_ids(),
    }
    for field, token_ids in named.items():
        check_token_ids(field, token_ids, vocab_size)


def _check_sources(policy: inference_pb2.SpeculationPolicy, known: frozenset[str], connected: Sequence[str]) -> None:
    for source in policy.sources:
        if source not in known:
            names = ", ".join(connected) or "none"
            raise InvalidRequestError("speculation.sources", f"{source!r} is not a drafter here; connected: {names}")


def _check_resume(message: inference_pb2.GenerateRequest, stopping: StoppingOptions) -> None:
    resumed = len(message.resume_token_ids)
    if resumed and not message.sampling.HasField("seed") and message.sampling.temperature > 0:
        raise InvalidRequestError(
            "sampling.seed", "must be the interrupted call's seed when resume_token_ids are given"
        )
    # Equal is valid: a call may be interrupted after its last token, and its resumption returns the end.
    if stopping.max_tokens is not None and resumed > stopping.max_tokens:
        raise InvalidRequestError("resume_token_ids", f"{resumed} tokens, more than max_tokens {stopping.max_tokens}")


async def _input_ids(
    message: inference_pb2.GenerateRequest,
    info: VerifierInfo,
    tokenizer: TargetTokenizer,
    template: ChatTemplate,
    encode: Encode,
) -> tuple[int, ...]:
    if message.WhichOneof("input") != "token_ids":

        def check(text: str) -> None:
            _check_context(message, tokenizer.least_tokens(text), info.max_context_tokens, "at least ")

        return await prompt_ids(message, info, tokenizer, template, encode, check=check)
    if not message.token_ids.ids:
        raise InvalidRequestError("token_ids", "must not be empty")
    return tuple(message.token_ids.ids)


async def prompt_ids(
    message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    info: VerifierInfo,
    tokenizer: TargetTokenizer,
    template: ChatTemplate,
    encode: Encode,
    adds_special: bool = True,
    check: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...]:
    """Token ids of a request's text or conversation; `adds_special` is for a text.

    `check` may refuse the text, a conversation's in its template, before it is encoded.

    Raises:
        InvalidRequestError: there is none, it is too long or encodes to no tokens, or the template refuses it.
        UnsupportedError: the target has no chat template, or one without a place for tools.
    """
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("prompt", "exactly one of prompt, token_ids and messages must be set")
    conversation = message.messages
    _check_length(CHAT, len(conversation.messages), MAX_MESSAGES)
    _check_length(TOOLS, len(conversation.tools), MAX_TOOLS)
    _check_length(f"{CHAT}.tool_calls", sum(len(one.tool_calls) for one in conversation.messages), MAX_CALLS)
    if not (message.prompt or conversation.messages):
        raise InvalidRequestError(kind, "must not be empty")
    calls = [call for one in conversation.messages for call in one.tool_calls]
    texts = [message.prompt, *conversation.tools]
    texts += [text for one in conversation.messages for text in (one.content, one.tool_call_id, one.name)]
    texts += [text for call in calls for text in (call.id, call.name, call.arguments)]
    most = max_prompt_bytes(info.max_context_tokens)
    size = sum(map(len, texts))
    # Encode only if the text might be too long.
    if size > most or (4 * size > most and sum(len(text.encode()) for text in texts) > most):
        text = f"has more than {most} bytes, and the context is of {info.max_context_tokens} tokens"
        raise InvalidRequestError(kind, text)
    said = [_chat_message(one) for one in conversation.messages]

    def encoded() -> list[int]:
        # Templates contain the special tokens themselves.
        text = template.render(said, conversation.tools) if said else message.prompt
        check(text)
        return tokenizer.encode(text, adds_special=adds_special and not said)

    # Several short messages also cost the template time.
    parts = len(said) + len(calls) + len(conversation.tools)
    is_short = size + parts * MESSAGE_CHARACTERS <= INLINE_PROMPT_CHARACTERS
    ids = encoded() if is_short else await encode(encoded)
    if not ids:
        raise InvalidRequestError(kind, "encodes to no tokens")
    # A tokenizer may have added tokens without a row in the model's embedding.
    check_token_ids(kind, tuple(ids), info.vocab_size)
    return tuple(ids)


def _chat_message(message: inference_pb2.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return ChatMessage(message.role, message.content, calls, message.tool_call_id, message.name)


def _check_length(field: str, size: int, most: int) -> None:
    if size > most:
        raise InvalidRequestError(field, f"has {size} entries, at most {most} are allowed")


def _check_context(message: inference_pb2.GenerateRequest, num_prompt: int, max_context: int, bound: str = "") -> None:
    total = num_prompt + len(message.resume_token_ids)
    # A resumed output may already fill the context.
    if total > max_context or num_prompt >= max_context:
        raise InvalidRequestError(
            message.WhichOneof("input") or "prompt",
            f"{bound}{total} tokens leave no room in the context of {max_context} tokens",
        )
