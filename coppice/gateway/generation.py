"""The endpoints that generate: one request's way from HTTP to the orchestrator and back."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from coppice.gateway.choices import AnswerChoice, ChatChoice, CompletionChoice, Wanted, usage_fields
from coppice.gateway.config import GatewayConfig
from coppice.gateway.errors import SERVER, ApiError, from_rpc, invalid
from coppice.gateway.exchange import ClientGoneError, HttpExchange
from coppice.gateway.fields import ChatFields, CompletionFields, GenerationFields, parse
from coppice.gateway.translation import chat_request, completion_requests, renaming
from coppice.gateway.upstream import Call, Metadata, ServedModel, Upstream
from coppice.net.access_token import METADATA_KEY
from coppice.obs.logs import MAX_REQUEST_ID_BYTES, request_id
from coppice.v1 import inference_pb2

logger = logging.getLogger(__name__)

TENANT_KEY = "x-tenant-id"
REQUEST_ID = "x-request-id"
REQUEST_TIMEOUT = "x-request-timeout"
_MIB = 1024 * 1024


@dataclass(frozen=True)
class AnswerForm:
    """Names of an API's answers, and its choices."""

    prefix: str
    whole: str
    chunk: str
    choice: type[ChatChoice] | type[CompletionChoice]


class Endpoint:
    """An endpoint that takes a JSON object, as an ASGI application; subclasses answer its fields."""

    kind: ClassVar[type[BaseModel]]

    def __init__(self, upstream: Upstream, config: GatewayConfig) -> None:
        self._upstream = upstream
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; errors in OpenAI's shape."""
        identity = uuid.uuid4().hex
        exchange = HttpExchange(scope, receive, send)
        try:
            identity = _identity(exchange) or identity
            request_id.set(identity)
            exchange.headers_sent[REQUEST_ID] = identity
            fields = parse(await exchange.json_body(self._config.max_body_mib * _MIB), self.kind)
            await self.respond(exchange, fields, identity)
        except ApiError as error:
            await exchange.refuse(error)
        except ClientGoneError:
            logger.debug("the client has left")
        except asyncio.CancelledError:
            # Only at the end of the process's grace; the task ends with this answer.
            await exchange.refuse(ApiError(503, "the server is stopping", SERVER, code="unavailable"))
        except Exception:
            # Its text may have what is private; the id finds it in the log.
            logger.exception("unexpected error")
            await exchange.refuse(ApiError(500, f"internal error, request {identity}", SERVER))

    async def respond(self, exchange: HttpExchange, fields: Any, identity: str) -> None:
        """Answer valid fields.

        Raises:
            ApiError: they are refused.
            ClientGoneError: the client has left.
        """
        raise NotImplementedError

    def timeout_s(self, exchange: HttpExchange) -> float:
        """Seconds that a request may take: what it asks for, at most what is configured.

        Raises:
            ApiError: it asks for what is no number above 0.
        """
        text = exchange.headers.get(REQUEST_TIMEOUT)
        if text is None:
            return self._config.request_timeout_s
        try:
            wanted_s = float(text)
        except ValueError:
            wanted_s = 0.0
        if not wanted_s > 0:
            raise invalid(REQUEST_TIMEOUT, "must be a number of seconds above 0")
        return min(wanted_s, self._config.request_timeout_s)


class Generate(Endpoint):
    """An endpoint that generates."""

    form: ClassVar[AnswerForm]

    def requests(self, fields: Any, identity: str) -> list[inference_pb2.GenerateRequest]:
        """Requests of the contract, one per prompt.

        Raises:
            ApiError: a field cannot be served.
        """
        raise NotImplementedError

    async def respond(self, exchange: HttpExchange, fields: GenerationFields, identity: str) -> None:
        """Answer whole, or in a stream of events."""
        metadata = caller_metadata(exchange.headers, fields.user)
        timeout_s = self.timeout_s(exchange)
        requests = self.requests(fields, identity)
        model = await self._upstream.model_named(fields.model, metadata)
        calls = [self._upstream.generate(request, metadata, timeout_s) for request in requests]
        answer = Answer(self.form, model, fields, len(calls), identity)
        rename = renaming(fields)
        try:
            async with exchange.watched(lambda: _cancel(calls)):
                if fields.stream:
                    async with exchange.kept_alive(self._config.keep_alive_s):
                        await _stream(exchange, calls, answer, fields, rename)
                else:
                    async for place, message in received(calls, rename):
                        answer.add(place, message)
                    await exchange.answer(200, answer.whole(), answer.headers())
        finally:
            _cancel(calls)


class Completions(Generate):
    """/v1/completions."""

    kind = CompletionFields
    form = AnswerForm("cmpl-", "text_completion", "text_completion", CompletionChoice)

    def requests(self, fields: CompletionFields, identity: str) -> list[inference_pb2.GenerateRequest]:
        """Requests of the contract, one per prompt."""
        return completion_requests(fields, identity)


class ChatCompletions(Generate):
    """/v1/chat/completions."""

    kind = ChatFields
    form = AnswerForm("chatcmpl-", "chat.completion", "chat.completion.chunk", ChatChoice)

    def requests(self, fields: ChatFields, identity: str) -> list[inference_pb2.GenerateRequest]:
        """The request of the contract."""
        return [chat_request(fields, identity)]


class Answer:
    """An answer that grows: its choices, in chunks and whole."""

    def __init__(
        self, form: AnswerForm, model: ServedModel, fields: GenerationFields, num_prompts: int, identity: str
    ) -> None:
        self._form = form
        self._head = {"id": form.prefix + identity, "created": int(time.time()), "model": model.name}
        self._fingerprint = {"system_fingerprint": model.info.serving_fingerprint or None}
        self._num_outputs = 1 if fields.n is None else fields.n
        # False and None ask for none; /v1/completions has a number, which may be 0.
        log_probs = getattr(fields, "logprobs", None)
        wanted = Wanted(log_probs is not None and log_probs is not False, bool(fields.return_token_ids))
        # Bounded by what the orchestrator takes; made when they begin.
        self._make: Callable[[int], AnswerChoice] = lambda index: form.choice(index, wanted)
        self._choices: dict[int, AnswerChoice] = {}
        self._tells_usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)

    def add(self, place: int, message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
        """Add a message of the prompt at `place`; returns the chunk, None if there is nothing to say."""
        index = place * self._num_outputs + message.output_index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._make(index)
        shown = choice.add(message)
        return None if shown is None else self._chunk([shown])

    def usage_chunk(self) -> dict[str, Any] | None:
        """The chunk after all others, which has the usage; None unless asked for."""
        return {**self._chunk([]), "usage": self._usage()} if self._tells_usage else None

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, after all messages."""
        choices = [choice.whole() for choice in self._ordered()]
        head = {**self._head, "object": self._form.whole, **self._fingerprint}
        return {**head, "choices": choices, "usage": self._usage()}

    def headers(self) -> dict[str, str]:
        """Statistics of the answer as headers: tokens per pass of the target, and the time to the first token."""
        counts = [choice.statistics for choice in self._ordered()]
        rounds = sum(one["rounds"] for one in counts)
        tokens = sum(choice.usage.completion_tokens for choice in self._ordered())
        return {
            "x-coppice-rounds": str(rounds),
            "x-coppice-mean-acceptance-length": f"{tokens / rounds if rounds else 0.0:.3f}",
            "x-coppice-ttft-ms": f"{min(one['ttft_ms'] for one in counts):.3f}",
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {**self._head, "object": self._form.chunk, **self._fingerprint, "choices": choices}
        return {**head, "usage": None} if self._tells_usage else head

    def _ordered(self) -> list[AnswerChoice]:
        return [self._choices[index] for index in sorted(self._choices)]

    def _usage(self) -> dict[str, Any]:
        return usage_fields(self._ordered(), self._num_outputs)


async def received(
    calls: Sequence[Call], rename: Callable[[str], str]
) -> AsyncIterator[tuple[int, inference_pb2.GenerateResponse]]:
    """Messages of calls as they come, each with its call's place; the first failure ends all.

    Raises:
        ApiError: a call has failed.
    """
    try:
        if len(calls) == 1:
            async for message in calls[0]:
                yield 0, message
            return
        async for place, message in _merged(calls):
            yield place, message
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, rename) from error


async def _merged(calls: Sequence[Call]) -> AsyncIterator[tuple[int, inference_pb2.GenerateResponse]]:
    # Bounded: a client that reads slowly slows the calls down.
    queue: asyncio.Queue[tuple[int, inference_pb2.GenerateResponse | BaseException | None]] = asyncio.Queue(len(calls))

    async def read(place: int, call: Call) -> None:
        try:
            async for message in call:
                await queue.put((place, message))
            await queue.put((place, None))
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            await queue.put((place, error))

    readers = [asyncio.create_task(read(place, call)) for place, call in enumerate(calls)]
    try:
        left = len(calls)
        while left:
            place, message = await queue.get()
            if isinstance(message, BaseException):
                raise message
            if message is None:
                left -= 1
            else:
                yield place, message
    finally:
        for reader in readers:
            reader.cancel()


async def _stream(
    exchange: HttpExchange,
    calls: Sequence[Call],
    answer: Answer,
    fields: GenerationFields,
    rename: Callable[[str], str],
) -> None:
    async for place, message in received(calls, rename):
        chunk = answer.add(place, message)
        if chunk is not None:
            await exchange.event(chunk)
    if (last := answer.usage_chunk()) is not None:
        await exchange.event(last)
    await exchange.end()


def caller_metadata(headers: Headers, user: str | None = None) -> Metadata:
    """Metadata of the caller's calls: its token as it is; without one, `user` is the tenant.

    Raises:
        ApiError: a header or the user cannot be sent on.
    """
    tokens = headers.getlist(METADATA_KEY)
    if tokens:
        if len(tokens) > 1 or not _is_printable(tokens[0]):
            raise ApiError(401, "a valid bearer token is needed", "authentication_error", code="invalid_api_key")
        return ((METADATA_KEY, tokens[0]),)
    if not user:
        return ()
    if not _is_printable(user):
        raise invalid("user", "must be printable ASCII")
    return ((TENANT_KEY, user),)


def _identity(exchange: HttpExchange) -> str:
    """Id that the client has chosen for its request; empty if it has none.

    Raises:
        ApiError: it is too long, or cannot be a header.
    """
    identity = exchange.headers.get(REQUEST_ID, "")
    if len(identity) > MAX_REQUEST_ID_BYTES or not _is_printable(identity):
        raise invalid(REQUEST_ID, f"must be at most {MAX_REQUEST_ID_BYTES} characters of printable ASCII")
    return identity


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _cancel(calls: Sequence[Call]) -> None:
    for call in calls:
        call.cancel()
