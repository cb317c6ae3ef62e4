"""Parsers of what strangers and peers send, without sockets, engines or models: thousands of inputs a second.

An input of a stream is several messages, each with its length before it in two bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message

from coppice.core.chat import ChatTemplate
from coppice.core.errors import CoppiceError
from coppice.core.tokenizer import TargetTokenizer
from coppice.gateway.errors import ApiError
from coppice.gateway.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields, parse
from coppice.gateway.translation import chat_requests, completion_requests
from coppice.net import frames
from coppice.net.guard.connection import Connection
from coppice.net.guard.limits import GuardLimits, Room
from coppice.net.guard.turnstile import Rates, Turnstile
from coppice.v1 import drafter_pb2, inference_pb2, verifier_pb2
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.service import REQUEST_SIZES, DrafterService, DraftStream
from orchestrator.api.validation import request_sizes, validate, wanted_outputs
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.peers.verifier_client import VerifierInfo
from tests.faults.messages import hostile, valid_message
from tests.fuzz.http_bodies import CHAT, COMPLETIONS, TEMPLATE, random_request
from tests.toy_target import CONTEXT, EOS, FINGERPRINT, MODEL, TOKENIZER_JSON, VOCAB
from verifier_svc.service import request_sizes as verifier_sizes
from verifier_svc.stream.request_parser import RequestParser

_NUM_SEEDS = 200
_MOST_MESSAGES = 8
_LENGTH = struct.Struct(">H")
_KINDS: dict[str, type[Any]] = {
    COMPLETIONS: CompletionFields,
    CHAT: ChatFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
}


# Runs a coroutine to its end, always on the same event loop.
Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]


class ParserError(AssertionError):
    """A parser failed in a way that is ours, not its peer's."""


@dataclass(frozen=True)
class Parser:
    """`seeds` are inputs to begin with; `take` raises for whatever no input may cause."""

    seeds: Sequence[bytes]
    take: Callable[[bytes], None]


class Tracebacks(logging.Handler):
    """Errors of ours that were caught and logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def joined(messages: Sequence[bytes]) -> bytes:
    """Messages as one input."""
    return b"".join(_LENGTH.pack(len(one)) + one for one in messages if len(one) < 2**16)


def parted(data: bytes) -> Iterator[bytes]:
    """Messages of an input; the last may be cut."""
    at = 0
    for _ in range(_MOST_MESSAGES):
        if at + _LENGTH.size > len(data):
            return
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield data[at : at + length]
        at += length


def public_parser(chance: random.Random, run: Run) -> Parser:
    """GenerateRequest of a client, up to what the orchestrator runs."""
    info = VerifierInfo(MODEL, FINGERPRINT, VOCAB, CONTEXT, (EOS,), 64, 1, "", 16)
    tokenizer, template = TargetTokenizer(TOKENIZER_JSON), ChatTemplate(TEMPLATE, {"eos_token": "<eos>"})
    sizes = request_sizes(CONTEXT)

    async def encode(job: Callable[[], list[int]]) -> list[int]:
        return job()

    def take(data: bytes) -> None:
        message = _read(inference_pb2.GenerateRequest, data, sizes.check)
        if message is not None:
            try:
                wanted_outputs(message, 8)
                request = _at_once(validate(message, info, tokenizer, template, frozenset({"a"}), ["a"], encode))
            except CoppiceError:
                return
            if not 0 < len(request.prompt_ids) < CONTEXT or not all(0 <= one < VOCAB for one in request.prompt_ids):
                raise ParserError(f"a prompt of {len(request.prompt_ids)} tokens was taken")

    seeds = [one.SerializeToString() for one in _drawn(inference_pb2.GenerateRequest, chance)]
    return Parser(seeds, take)


def verifier_parser(chance: random.Random, run: Run) -> Parser:
    """A stream of VerifyRequest, up to what the engine is asked."""
    info: Any = SimpleNamespace(
        max_context_tokens=CONTEXT, vocab_size=VOCAB, exact=True, feature_size=4, redraft=None, lookup=True, head=True
    )
    sizes = verifier_sizes(CONTEXT)
    engine: Any = SimpleNamespace(open=_nothing, submit=_nothing, close=_nothing)

    def take(data: bytes) -> None:
        parser = RequestParser(engine, info, 0, _nothing)
        for part in parted(data):
            message = _read(verifier_pb2.VerifyRequest, part, sizes.check)
            if message is None:
                return
            parser.take(message)

    return Parser(_streams(verifier_pb2.VerifyRequest, chance), take)


def drafter_parser(chance: random.Random, run: Run) -> Parser:
    """A stream of DraftRequest, up to what the model's thread is asked."""
    drafter: Any = SimpleNamespace(info=DrafterInfo("toy", MODEL, FINGERPRINT, VOCAB, max_length=CONTEXT))
    thread: Any = SimpleNamespace(submit=_nothing)

    async def new_stream() -> DraftStream:
        return DraftStream(DrafterService(drafter, thread, 8, max_sequences=3), _written)

    async def talk(data: bytes) -> None:
        stream = await new_stream()
        for part in parted(data):
            message = _read(drafter_pb2.DraftRequest, part, REQUEST_SIZES.check)
            if message is None:
                break
            try:
                stream._handle(message)
            except CoppiceError as error:
                stream._fail(message.sequence_id, error)
        await stream.close()

    return Parser(_streams(drafter_pb2.DraftRequest, chance), lambda data: run(talk(data)))


def answer_parser(chance: random.Random, run: Run) -> Parser:
    """DraftResponse of a drafter, at the orchestrator; errors are logged there, and found in the log."""
    handler: Any = SimpleNamespace(
        request_id="", on_tree=_nothing, on_ahead=_nothing, on_drafters_changed=_nothing, on_drafter_replaced=_nothing
    )

    async def new_client() -> DrafterClient:
        return DrafterClient("127.0.0.1:1", FINGERPRINT)

    client = run(new_client())
    logger = logging.getLogger("orchestrator.peers.drafter_client")
    found = Tracebacks()
    logger.addHandler(found)
    logger.propagate = False

    async def hear(data: bytes) -> None:
        for part in parted(data):
            message = _read(drafter_pb2.DraftResponse, part)
            if message is None:
                return
            client._handlers[message.sequence_id] = handler
            client.on_message(message)
        client._handlers.clear()
        if found.seen:
            raise ParserError(found.seen.pop())

    return Parser(_streams(drafter_pb2.DraftResponse, chance), lambda data: run(hear(data)))


def body_parser(chance: random.Random, run: Run) -> Parser:
    """Bodies at the gateway, up to the orchestrator's request; the first byte says which kind."""
    kinds = list(_KINDS.values())

    def take(data: bytes) -> None:
        kind = kinds[data[0] % len(kinds)] if data else CompletionFields
        try:
            fields = parse(data[1:], kind)
            if isinstance(fields, CompletionFields):
                requests = completion_requests(fields, "x")
            elif isinstance(fields, ChatFields):
                requests = chat_requests(fields, "x")
            else:
                return
        except ApiError as error:
            if not 400 <= error.status < 500:
                raise ParserError(f"status {error.status}") from error
            return
        for prompt in requests.prompts:
            inference_pb2.GenerateRequest.FromString(requests.shared + prompt)

    drawn = [random_request(chance) for _ in range(_NUM_SEEDS)]
    seeds = [bytes([list(_KINDS).index(path)]) + body for path, body in drawn]
    return Parser(seeds, take)


def frame_parser(chance: random.Random, run: Run) -> Parser:
    """HTTP/2 of a client at the guard, with HPACK; what the guard passes on must be HTTP/2 again."""
    limits = GuardLimits(2**20, 16, streaming=frozenset({b"/a"}), unary=frozenset({b"/b"}))
    rates = Rates(1e9, 1e9, 1e9, 1e9)

    async def talk(data: bytes) -> None:
        server = _Transport()
        connection = Connection(
            "127.0.0.1:1", limits, Room(limits), Turnstile(rates), lambda end: _dialed(end, server), _nothing, _nothing
        )
        client = _Transport()
        connection.client_end.connection_made(client)
        for part in (frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0), *parted(data)):
            connection.client_end.data_received(part)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        connection.abort()
        for sent in (server.sent.removeprefix(frames.PREFACE), client.sent):
            rest, at = bytearray(sent), 0
            while (read := frames.read_frame(rest, at)) is not None:
                at += frames.HEAD_BYTES + len(read[3])
            if at != len(rest):
                raise ParserError("half a frame was passed on")

    return Parser(_conversations(chance), lambda data: run(talk(data)))


PARSERS: dict[str, Callable[[random.Random, Run], Parser]] = {
    "orchestrator": public_parser,
    "verifier": verifier_parser,
    "drafter": drafter_parser,
    "answers": answer_parser,
    "gateway": body_parser,
    "http2": frame_parser,
}


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _dialed(end: asyncio.Protocol, transport: asyncio.Transport) -> asyncio.Task[asyncio.Transport | None]:
    async def dial() -> asyncio.Transport | None:
        end.connection_made(transport)
        return transport

    return asyncio.get_running_loop().create_task(dial())


def _read(kind: type[Message], data: bytes, check: Callable[[bytes], None] = lambda _: None) -> Any:
    """A message that a door would read; None if the bytes are none, or too large."""
    try:
        check(data)
        return kind.FromString(data)
    except (CoppiceError, DecodeError):
        return None


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise ParserError("a parser waits")


async def _written(_: object) -> None:
    pass


def _nothing(*_: object) -> None:
    pass


def _drawn(kind: type[Message], chance: random.Random) -> list[Any]:
    drawn = [valid_message(kind, chance) if number % 2 else hostile(kind, chance) for number in range(_NUM_SEEDS)]
    return [one for one in drawn if one is not None]


def _streams(kind: type[Message], chance: random.Random) -> list[bytes]:
    """Streams of one or two sequences, which are opened first where the peer opens any."""
    messages = _drawn(kind, chance)
    opening = [one for one in messages if one.WhichOneof("event") == "open"] or messages
    seeds = []
    for _ in range(_NUM_SEEDS):
        stream = [chance.choice(opening), *chance.choices(messages, k=chance.randint(1, 5))]
        for one in stream:
            one.sequence_id = chance.choice((1, 1, 1, 2))
        seeds.append(joined([one.SerializeToString() for one in stream]))
    return seeds


def _conversations(chance: random.Random) -> list[bytes]:
    """Calls over HTTP/2: headers, data in pieces, resets, windows, pings and settings."""
    seeds = []
    for _ in range(_NUM_SEEDS):
        stream, parts = 2 * chance.randrange(4) + 1, []
        head = b"\x83\x86\x44" + bytes([2]) + chance.choice((b"/a", b"/b", b"/c"))[:2] + b"\x41\x01x"
        message = b"\0" + struct.pack(">I", 5) + b"hello"
        for kind, flags, payload in (
            (frames.HEADERS, frames.END_HEADERS, head),
            (frames.DATA, 0, message[:4]),
            (frames.DATA, chance.choice((0, frames.END_STREAM)), message[4:]),
            (frames.WINDOW_UPDATE, 0, struct.pack(">I", chance.choice((1, 65_535, 2**31 - 1)))),
            (frames.RST_STREAM, 0, struct.pack(">I", frames.CANCEL)),
            (frames.PING, 0, b"12345678"),
            (frames.SETTINGS, 0, struct.pack(">HI", chance.randrange(8), chance.choice((0, 1, 2**31)))),
            (frames.HEADERS, 0, head[:3]),
            (frames.CONTINUATION, frames.END_HEADERS, head[3:]),
            (frames.GOAWAY, 0, bytes(8)),
        ):
            if chance.random() < 0.7:
                about = 0 if kind in (frames.PING, frames.SETTINGS, frames.GOAWAY) else stream
                parts.append(frames.frame(kind, flags, about, payload))
        seeds.append(joined(parts[:_MOST_MESSAGES]))
    return seeds
