"""The endpoints that generate: one request's way from HTTP to the orchestrator and back."""

from __future__ import annotations

import asyncio
import random
import string
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import grpc

from coppice.core.chat import CallFormat, Reasoning
from coppice.gateway.choices import AnswerChoice, ChatChoice, CompletionChoice, Wanted, usage_fields
from coppice.gateway.endpoint import Endpoint, caller_metadata
from coppice.gateway.errors import broken_answer, from_rpc
from coppice.gateway.exchange import ClientGoneError, HttpExchange
from coppice.gateway.fields import ChatFields, ChosenTool, CompletionFields, GenerationFields
from coppice.gateway.reasoning import ReasonedAnswer
from coppice.gateway.tool_calls import FREE_CALLS, MISTRAL_ID_LENGTH, AnswerParser, ForcedCall, PlainText, RequiredCall
from coppice.gateway.translation import CallRequests, chat_requests, completion_requests, has_grammar, renaming
from coppice.gateway.upstream import Call, Metadata, ServedModel
from coppice.v1 import inference_pb2

# After a client that left before its answer was complete.
_WARY_S = 1.0


NewChoice = Callable[[int, inference_pb2.GetModelInfoResponse], AnswerChoice]


@dataclass(frozen=True)
class AnswerForm:
    """Names of an API's answers."""

    prefix: str
    whole: str
    chunk: str


@dataclass(frozen=True)
class Wish:
    """Rest of a body once its requests are made: the model that it means, and the shape of its answer.

    `new_choice` makes the choice of an index, without text, for the served model; `rename` gives fields of the contract
    their names in HTTP.
    """

    model: str
    is_streamed: bool
    num_outputs: int
    tells_usage: bool
    counts_usage: bool
    new_choice: NewChoice
    rename: Callable[[str], str]


class Generate(Endpoint):
    """An endpoint that generates."""

    form: ClassVar[AnswerForm]
    # Time of the event loop until which clients are expected to leave at once.
    _wary_until_s = 0.0

    @abstractmethod
    def requests(self, fields: Any, identity: str) -> CallRequests:
        """Requests of the contract, one per prompt.

        Raises:
            ApiError: a field cannot be served.
        """

    @abstractmethod
    def choices(self, fields: Any) -> NewChoice:
        """Maker of the answer's choices, without text, by index; it keeps none of the fields."""

    async def respond(self, exchange: HttpExchange, fields: GenerationFields, identity: str) -> None:
        """Answer whole, or in a stream of events."""
        metadata = caller_metadata(exchange.headers, fields.user)
        generating = self._generate(exchange, self._wish(fields), self.requests(fields, identity), metadata, identity)
        # The body may be large, and its answer take long.
        del fields
        try:
            await generating
        except ClientGoneError:
            self._wary_until_s = asyncio.get_running_loop().time() + _WARY_S
            raise

    def _wish(self, fields: GenerationFields) -> Wish:
        options = fields.stream_options
        return Wish(
            model=fields.model,
            is_streamed=bool(fields.stream),
            num_outputs=1 if fields.n is None else fields.n,
            tells_usage=options is not None and bool(options.include_usage),
            counts_usage=options is not None and bool(options.continuous_usage_stats),
            new_choice=self.choices(fields),
            rename=renaming(fields),
        )

    async def _generate(
        self, exchange: HttpExchange, wish: Wish, requests: CallRequests, metadata: Metadata, identity: str
    ) -> None:
        timeout_s = self.timeout_s(exchange)
        exchange.becomes(len(requests.prompts))
        # Where clients have left, others that leave at once cost no generation.
        if asyncio.get_running_loop().time() < self._wary_until_s:
            await exchange.stays()
        model = await self._upstream.model_named(wish.model, metadata)
        begin = partial(self._upstream.generate, requests.shared)
        caller = (exchange.client, exchange.connection)
        calls = [begin(prompt, metadata, timeout_s, *caller) for prompt in requests.prompts]
        del requests, begin
        try:
            answer = Answer(self.form, model, wish, identity)
            async with exchange.watched(lambda: _cancel(calls)):
                if wish.is_streamed:
                    async with exchange.kept_alive(self._config.keep_alive_s):
                        await _stream(exchange, calls, answer, wish.rename)
                else:
                    async for place, message in received(calls, wish.rename):
                        answer.add(place, message)
                    answer.check_ended(len(calls))
                    await exchange.answer(200, answer.whole(), answer.headers())
        finally:
            _cancel(calls)


class Completions(Generate):
    """/v1/completions."""

    kind = CompletionFields
    form = AnswerForm("cmpl-", "text_completion", "text_completion")

    def requests(self, fields: CompletionFields, identity: str) -> CallRequests:
        """Requests of the contract, one per prompt."""
        return completion_requests(fields, identity)

    def choices(self, fields: CompletionFields) -> NewChoice:
        """Maker of choices without text."""
        wanted = Wanted(fields.logprobs is not None, bool(fields.return_token_ids))
        return lambda index, model: CompletionChoice(index, wanted)


class ChatCompletions(Generate):
    """/v1/chat/completions."""

    kind = ChatFields
    form = AnswerForm("chatcmpl-", "chat.completion", "chat.completion.chunk")

    def requests(self, fields: ChatFields, identity: str) -> CallRequests:
        """The request of the contract."""
        return chat_requests(fields, identity)

    def choices(self, fields: ChatFields) -> NewChoice:
        """Maker of choices without text."""
        wanted, new_parser = Wanted(bool(fields.logprobs), bool(fields.return_token_ids)), _parsers(fields)
        may_reason = not has_grammar(fields)

        def new_choice(index: int, model: inference_pb2.GetModelInfoResponse) -> AnswerChoice:
            parser = new_parser(_call_format(model))
            if model.reasoning and may_reason:
                parser = ReasonedAnswer(parser, model.reasoning == Reasoning.OPEN)
            return ChatChoice(index, wanted, parser)

        return new_choice


class Answer:
    """An answer that grows: its choices, in chunks and whole."""

    def __init__(self, form: AnswerForm, model: ServedModel, wish: Wish, identity: str) -> None:
        self._form = form
        self._head = {"id": form.prefix + identity, "created": int(time.time()), "model": model.name}
        self._fingerprint = {"system_fingerprint": model.info.serving_fingerprint or None}
        self._info = model.info
        self._wish = wish
        # Made when their outputs begin: the number is the request's, and may be refused.
        self._choices: dict[int, AnswerChoice] = {}

    def add(self, place: int, message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
        """Add a message of the prompt at `place`; returns the chunk, None if there is nothing to say.

        Raises:
            ApiError: no output may go on with this message.
        """
        if message.output_index >= self._wish.num_outputs:
            raise broken_answer("an output that was not asked for")
        index = place * self._wish.num_outputs + message.output_index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._wish.new_choice(index, self._info)
        elif choice.statistics:
            raise broken_answer("an output goes on after its end")
        shown = choice.add(message)
        return None if shown is None else self._chunk([shown])

    def check_ended(self, num_prompts: int) -> None:
        """Raise ApiError unless every output of each prompt has ended."""
        if sum(bool(one.statistics) for one in self._choices.values()) != num_prompts * self._wish.num_outputs:
            raise broken_answer("it ends before its outputs")

    def usage_chunk(self) -> dict[str, Any] | None:
        """The chunk after all others, which has the usage; None unless asked for."""
        return {**self._chunk([]), "usage": self._usage()} if self._wish.tells_usage else None

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
        if not self._wish.tells_usage:
            return head
        return {**head, "usage": self._usage() if self._wish.counts_usage else None}

    def _ordered(self) -> list[AnswerChoice]:
        return [self._choices[index] for index in sorted(self._choices)]

    def _usage(self) -> dict[str, Any]:
        return usage_fields(self._choices, self._wish.num_outputs)


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
    rename: Callable[[str], str],
) -> None:
    async for place, message in received(calls, rename):
        chunk = answer.add(place, message)
        if chunk is not None:
            await exchange.event(chunk)
    answer.check_ended(len(calls))
    if (last := answer.usage_chunk()) is not None:
        await exchange.event(last)
    await exchange.end()


def _parsers(fields: ChatFields) -> Callable[[CallFormat], AnswerParser]:
    """Maker of readers of the calls that an answer may have, by the model's format."""
    names, choice = [tool.function.name for tool in fields.tools or ()], fields.tool_choice
    if not names or choice == "none":
        return lambda form: PlainText()
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        return lambda form: ForcedCall(name, _call_id(form))
    if choice == "required":
        return lambda form: RequiredCall(names, _call_id(form))
    return lambda form: FREE_CALLS[form](names, _call_id(form))


def _call_format(model: inference_pb2.GetModelInfoResponse) -> CallFormat:
    # Empty without a template; such a chat is refused. That of a newer orchestrator may not be known here.
    return CallFormat(model.call_format) if model.call_format in set(CallFormat) else CallFormat.HERMES


def _call_id(form: CallFormat) -> str:
    """Beginning of the ids of an answer's calls, before their numbers."""
    if form is CallFormat.MISTRAL:
        # No secret, and without digits: numbers follow.
        return "".join(random.choices(string.ascii_letters, k=MISTRAL_ID_LENGTH - 1))
    return f"call_{uuid.uuid4().hex[:24]}"


def _cancel(calls: Sequence[Call]) -> None:
    for call in calls:
        call.cancel()
