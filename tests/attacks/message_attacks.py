"""Attacks by messages: large ones, many valid ones, and costly ones."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Callable, Sequence

from coppice.core.sampling import MAX_TOKEN_LIST
from coppice.v1 import drafter_pb2, inference_pb2, tree_pb2, verifier_pb2
from tests.attacks.http2 import (
    DATA,
    INDEXED_CALL,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    Attempt,
    Connection,
    framed,
    literal,
    request_block,
    window_update,
)
from tests.raw_http2 import END_HEADERS, END_STREAM, HEADERS, Header, frame

MIB = 1024 * 1024
LARGE_BYTES = 63 * MIB
MEDIUM_BYTES = int(3.9 * MIB)
NUM_MEDIUM = 50
NUM_LONG, LONG_PROMPT = 4, 1_000_000
# What is held back of each of those, and how much of it is sent a second.
HELD_BYTES, FINISH_BYTES_S = 64 * 1024, 4096
NUM_UNREAD, UNREAD_TOKENS = 500, 256
SMALL_WINDOW = 1_000
# Between two bytes that a slow reader takes.
READ_PAUSE_S = 1.0
NUM_SCHEMAS, SCHEMA_KEYS = 40, 2_600
NUM_GREEDY_CONNECTIONS, NUM_GREEDY_STREAMS, GREEDY_TOKENS = 200, 20, 400
# A client that is told to wait does so before it asks again.
GREEDY_PAUSE_S = 1.0
NUM_GROUPS = 100_000
NUM_WATCHERS, WATCHES_AT_ONCE, MAX_WATCHES, WATCH_HEADER_BYTES = 60, 4, 1_000, 3_650
# Of tenants and salts, at once.
NUM_DISTINCT = 200
# Of the bundled target.
VOCAB, CONTEXT = 4096, 2048
NUM_BIASED, NUM_WIDE, NUM_OUTPUTS = 20, 8, 16
PROMPT = "def add(a, b):\n    return"


def generate(max_tokens: int = 16, **fields: object) -> bytes:
    """A valid request of the public API."""
    request = inference_pb2.GenerateRequest(prompt=PROMPT, **fields)  # type: ignore[arg-type]
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    return request.SerializeToString()


def _with_grammar(**rule: str) -> bytes:
    request = inference_pb2.GenerateRequest(prompt=PROMPT)
    request.stopping.max_tokens = 16
    for name, text in rule.items():
        setattr(request.sampling.grammar, name, text)
    return request.SerializeToString()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 128:
        encoded.append(value % 128 + 128)
        value //= 128
    return bytes((*encoded, value))


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def stop_strings(service: str, size: int) -> bytes:
    """A message of `size` bytes, most of them stop strings of one character; drafters get bad token ids."""
    if service == "drafter":
        sampling = _field(10, b"\x01" * size)  # bad_token_ids
        return b"\x08\x01" + _field(2, _field(1, b"\x01") + _field(2, sampling))
    stopping = b"\x1a\x01x" * (size // 3)
    if service == "verifier":
        return b"\x08\x01" + _field(2, _field(1, b"\x01") + _field(3, stopping))
    return _field(2, PROMPT.encode()) + _field(5, stopping)


def token_ids(service: str, size: int) -> bytes:
    """A message of `size` bytes, most of them token ids of the prompt."""
    if service == "orchestrator":
        return _field(3, _field(1, b"\x01" * size))
    return b"\x08\x01" + _field(2, _field(1, b"\x01" * size))


def check_messages() -> None:
    """Assert that messages made by hand are what they are meant to be."""
    request = inference_pb2.GenerateRequest.FromString(stop_strings("orchestrator", 300))
    assert list(request.stopping.stop_strings) == ["x"] * 100
    assert len(inference_pb2.GenerateRequest.FromString(token_ids("orchestrator", 300)).token_ids.ids) == 300
    verify = verifier_pb2.VerifyRequest.FromString(stop_strings("verifier", 300))
    assert list(verify.open.stopping.stop_strings) == ["x"] * 100
    assert len(verifier_pb2.VerifyRequest.FromString(token_ids("verifier", 300)).open.prompt_token_ids) == 300
    draft = drafter_pb2.DraftRequest.FromString(stop_strings("drafter", 300))
    assert len(draft.open.sampling.bad_token_ids) == 300
    assert len(drafter_pb2.DraftRequest.FromString(token_ids("drafter", 300)).open.prompt_token_ids) == 300


def large_stop_strings(attempt: Attempt) -> None:
    """One message of 63 MiB of stop strings of one character, and another when it is answered."""
    _repeat_calls(attempt, framed(stop_strings(attempt.target.service, LARGE_BYTES)), 1)


def large_token_ids(attempt: Attempt) -> None:
    """Three messages of 63 MiB of token ids at once, and others when they are answered."""
    _repeat_calls(attempt, framed(token_ids(attempt.target.service, LARGE_BYTES)), 3)


def long_prompts(attempt: Attempt) -> None:
    """Four prompts of a million characters at once, and others when they are answered: too long once encoded."""
    request = inference_pb2.GenerateRequest(prompt="a" * LONG_PROMPT)
    _repeat_calls(attempt, framed(request.SerializeToString()), NUM_LONG)


def _send_in_turns(connection: Connection, rest: dict[int, memoryview]) -> None:
    """Send a frame of each stream's message, where its windows let it; wait when none does."""
    sent = 0
    for stream, data in rest.items():
        if stream not in connection.running:
            rest[stream] = data[:0]
        elif data:
            size = connection.send_some(stream, data)
            rest[stream] = data[size:]
            sent += size
    if sent:
        connection.take()
    elif any(rest.values()):
        connection.wait(0.1)


def many_medium(attempt: Attempt) -> None:
    """50 connections that each send a message of 3.9 MiB; the last 64 KiB of each come slowly."""
    data = memoryview(framed(stop_strings(attempt.target.service, MEDIUM_BYTES)))
    block = request_block(attempt.target.path)

    def step(connection: Connection) -> None:
        connection.take()
        if not connection.running:
            connection.open_stream(block)
            connection.stage = 0
        stream = next(iter(connection.running))
        rest = data[connection.stage :]
        if len(rest) > HELD_BYTES:
            rest = rest[: min(MAX_FRAME_BYTES, len(rest) - HELD_BYTES)]
        elif time.monotonic() >= connection.next_s:
            connection.next_s = time.monotonic() + 1.0
            rest = rest[:FINISH_BYTES_S]
        else:
            return
        connection.stage += connection.send_some(stream, rest, ends=connection.stage + len(rest) == len(data))

    attempt.swarm(NUM_MEDIUM, step, pause_s=0.001)


def no_window(attempt: Attempt) -> None:
    """500 complete valid calls for 256 tokens, by a client that takes no byte of their answers."""
    _unread(attempt, 0)


def small_window(attempt: Attempt) -> None:
    """The same, by a client that takes the first 1,000 bytes of each answer."""
    _unread(attempt, SMALL_WINDOW)


def slow_streams(attempt: Attempt) -> None:
    """500 complete valid calls for 256 tokens, by a client that takes a byte of each answer a second."""
    _unread(attempt, 0, lambda running: b"".join([window_update(stream, 1) for stream in running]))


def slow_connection(attempt: Attempt) -> None:
    """The same, by a client that takes the connection's first 64 KiB, and then a byte of all answers a second."""
    _unread(attempt, MAX_WINDOW, lambda _: window_update(0, 1))


def _unread(attempt: Attempt, window: int, more: Callable[[set[int]], bytes] = lambda _: b"") -> None:
    """Hold 500 calls whose streams have a window; `more` makes the frames, of open streams, that are sent each second.

    Streams that are refused end, and are opened again, though not as fast as it goes.
    """
    block = request_block(attempt.target.path)
    message = framed(generate(UNREAD_TOKENS))

    def body(connection: Connection) -> None:
        while True:
            while len(connection.running) < min(NUM_UNREAD, connection.max_streams):
                while connection.window < len(message):
                    connection.wait(0.1)
                stream = connection.open_stream(block)
                connection.send(frame(DATA, END_STREAM, stream, message))
                connection.window -= len(message)
                connection.tally["messages"] += 1
                connection.take()
            if time.monotonic() >= connection.next_s:
                connection.next_s = time.monotonic() + READ_PAUSE_S
                connection.send(more(connection.running))
            connection.wait(0.2)
            attempt.sleep(0.05)

    attempt.repeat(body, {INITIAL_WINDOW_SIZE: window})


def schemas(attempt: Attempt) -> None:
    """40 JSON schemas of 2,600 keys at once, and others when they are answered."""
    _grammars(attempt, _schemas)


def regexes(attempt: Attempt) -> None:
    """16 costly regular expressions at once, and others when they are answered."""
    _grammars(attempt, _regexes)


def _grammars(attempt: Attempt, make: Callable[[int], list[bytes]]) -> None:
    def body(connection: Connection) -> None:
        connection.send(window_update(0, MAX_WINDOW // 2))
        while True:
            # Others than those of a connection before, which are remembered.
            attempt.tally["turns"] += 1
            _call_all(connection, [framed(message) for message in make(attempt.tally["turns"])])

    attempt.repeat(body)


def _schemas(turn: int) -> list[bytes]:
    return [
        _with_grammar(
            json_schema=json.dumps(
                {"type": "object", "properties": {f"k{turn:02d}_{number}_{key:04d}": {} for key in range(SCHEMA_KEYS)}}
            )
        )
        for number in range(NUM_SCHEMAS)
    ]


def _regexes(turn: int) -> list[bytes]:
    """Some are compiled for seconds and then refused, some fail with a token, some are costly with each token."""
    seed = turn % 500
    texts = [
        *("a?" * (15_900 - number - 4 * seed) for number in range(4)),
        *("[a-z]?" * (10_000 - number - 4 * seed) for number in range(4)),
        *("x" * (60_000 - number - 4 * seed) for number in range(4)),
        *(
            f"(({first}|{second}|c){{1,{60 + seed}}}{first}{{0,60}}){{1,60}}"
            for first, second in ("ab", "de", "fg", "hi")
        ),
    ]
    return [_with_grammar(regex=text) for text in texts]


def _call_all(connection: Connection, messages: list[bytes], more: Sequence[Header] = ()) -> None:
    """Make these calls at once on one connection, and wait for their ends."""
    block = request_block(connection.attempt.target.path, more)
    rest = {connection.open_stream(block): memoryview(message) for message in messages}
    while any(rest.values()):
        _send_in_turns(connection, rest)
    connection.tally["messages"] += len(messages)
    while connection.running:
        connection.wait(0.5)


def greedy(attempt: Attempt) -> None:
    """200 connections with 20 valid calls for 400 tokens each, all read, as a greedy client might send them."""
    _valid_calls(attempt, NUM_GREEDY_CONNECTIONS, NUM_GREEDY_STREAMS, lambda _: (b"", generate(GREEDY_TOKENS)))


def tenants(attempt: Attempt) -> None:
    """Valid calls, each of another `x-tenant-id`, 200 at once."""
    message = generate(4)
    _valid_calls(attempt, 4, NUM_DISTINCT // 4, lambda number: (b"tenant-%d" % number, message), pause_s=0.01)


def salts(attempt: Attempt) -> None:
    """Valid calls of one tenant with long prompts, each with another `cache_salt`, 200 at once."""
    prompt = PROMPT * 40

    def make(number: int) -> tuple[bytes, bytes]:
        request = inference_pb2.GenerateRequest(prompt=prompt, cache_salt=f"salt {number}")
        request.stopping.max_tokens = 4
        return b"salts", request.SerializeToString()

    _valid_calls(attempt, 4, NUM_DISTINCT // 4, make, pause_s=0.01)


def biases(attempt: Attempt) -> None:
    """Calls for 64 tokens, 20 at once, with as many biases as are allowed, or one for each token: those are refused."""

    def make(number: int) -> tuple[bytes, bytes]:
        request = inference_pb2.GenerateRequest.FromString(generate(64))
        request.sampling.temperature = 1.0
        for token in range(MAX_TOKEN_LIST if number % 2 else VOCAB):
            request.sampling.logit_bias[token] = token % 7 / 10
        return b"", request.SerializeToString()

    made = [make(0), make(1)]
    _valid_calls(attempt, 4, NUM_BIASED // 4, lambda number: made[number % 2], pause_s=0.01)


def outputs(attempt: Attempt) -> None:
    """Valid calls for 16 outputs of the longest context each, 8 at once."""
    request = inference_pb2.GenerateRequest.FromString(generate(CONTEXT - 64))
    request.num_outputs = NUM_OUTPUTS
    _valid_calls(attempt, 4, NUM_WIDE // 4, lambda _: (b"", request.SerializeToString()))


def _valid_calls(
    attempt: Attempt,
    num_connections: int,
    num_streams: int,
    make: Callable[[int], tuple[bytes, bytes]],
    pause_s: float = GREEDY_PAUSE_S,
) -> None:
    """Hold so many calls open on each connection; `make` gives tenant and message of the nth call.

    A connection whose calls have ended sends its next ones `pause_s` later.
    """
    numbers = itertools.count()

    def step(connection: Connection) -> None:
        connection.take()
        if connection.stage == 0:
            connection.stage = 1
            connection.send(window_update(0, MAX_WINDOW // 2))
        most = min(num_streams, connection.max_streams)
        if len(connection.running) == most or time.monotonic() < connection.next_s:
            return
        connection.next_s = time.monotonic() + pause_s
        while len(connection.running) < most and connection.window > MAX_FRAME_BYTES:
            tenant, message = make(next(numbers))
            more = [(b"x-tenant-id", tenant)] if tenant else []
            stream = connection.open_stream(request_block(attempt.target.path, more))
            connection.send_some(stream, memoryview(framed(message)))
            connection.tally["messages"] += 1

    attempt.swarm(num_connections, step, {INITIAL_WINDOW_SIZE: MAX_WINDOW}, pause_s=0.005)


def gzip_bomb(attempt: Attempt) -> None:
    """Messages of 64 KiB, compressed, that are 63 MiB of zeros, eight at once."""
    data = framed(gzip.compress(bytes(LARGE_BYTES)), is_compressed=True)
    _repeat_calls(attempt, data, 8, [(b"grpc-encoding", b"gzip")])


def too_large_and_held(attempt: Attempt) -> None:
    """A message declared as 4 GiB on a stream that takes nothing, and as much of it as the server lets in."""

    def body(connection: Connection) -> None:
        stream = connection.open_stream(request_block(attempt.target.path))
        connection.send(frame(DATA, 0, stream, b"\0\xff\xff\xff\xff"))
        connection.flood(itertools.repeat((frame(DATA, 0, stream, bytes(MAX_FRAME_BYTES)), 1)))

    attempt.repeat(body, {INITIAL_WINDOW_SIZE: 0})


def watches(attempt: Attempt) -> None:
    """Calls of the health service that last for ever, with 7 KiB of metadata each from HPACK's table."""
    metadata = literal(b"x-a", b"a" * WATCH_HEADER_BYTES, is_indexed=True)

    def step(connection: Connection) -> None:
        connection.take()
        block = request_block(b"/grpc.health.v1.Health/Watch")
        again = b"\xbe\xbe"
        calls = []
        for _ in range(WATCHES_AT_ONCE):
            stream = connection.next_stream
            if stream > 2 * MAX_WATCHES:
                break
            connection.next_stream += 2
            head = frame(HEADERS, END_HEADERS, stream, block + (metadata + again[:1] if stream == 1 else again))
            calls.append(head + frame(DATA, END_STREAM, stream, framed(b"")))
        connection.send(b"".join(calls))
        connection.tally["streams"] += len(calls)

    attempt.swarm(NUM_WATCHERS, step, {INITIAL_WINDOW_SIZE: MAX_WINDOW}, pause_s=0.005)


def large_drafts(attempt: Attempt) -> None:
    """Drafts of 200,000 nodes and of 4,000, in turn, of sequences that are not open, on four connections."""
    drafts = [framed(_chain(num_nodes)) for num_nodes in (200_000, 4_000)]

    def step(connection: Connection) -> None:
        connection.take()
        if connection.stage == 0:
            connection.stage = connection.open_stream(request_block(attempt.target.path))
        if connection.stage not in connection.running:
            connection.stage = 0
            return
        for draft in drafts:
            connection.send_message(connection.stage, draft, ends=False)

    attempt.swarm(4, step, {INITIAL_WINDOW_SIZE: MAX_WINDOW}, pause_s=0.001)


def _chain(num_nodes: int) -> bytes:
    tree = tree_pb2.TokenTree(token_ids=[node % 100 for node in range(num_nodes)], parents=range(-1, num_nodes - 1))
    draft = verifier_pb2.Draft(base_length=3, tree=tree)
    return verifier_pb2.VerifyRequest(sequence_id=1, draft=draft).SerializeToString()


def groups(attempt: Attempt) -> None:
    """Unknown groups of protobuf inside one another, 100,000 deep, eight at once."""
    number = 77
    message = _varint(number << 3 | 3) * NUM_GROUPS + _varint(number << 3 | 4) * NUM_GROUPS
    _repeat_calls(attempt, framed(message), 8)


def health(attempt: Attempt) -> None:
    """Valid calls of the health service, as fast as it goes, on two connections of 100 calls at once."""
    _pipelined(attempt, b"/grpc.health.v1.Health/Check", framed(b""))


def reflection(attempt: Attempt) -> None:
    """Valid calls of the reflection service for a file with all that it imports, in the same way."""
    symbol = b"coppice.v1.InferenceService"
    _pipelined(attempt, b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", framed(_field(4, symbol)))


def _pipelined(attempt: Attempt, path: bytes, message: bytes) -> None:
    def step(connection: Connection) -> None:
        connection.take()
        if connection.stage == 0:
            connection.stage = 1
            connection.send(window_update(0, MAX_WINDOW // 2))
            connection.open_stream(request_block(path, is_indexed=True))
            connection.send_message(1, message)
        calls = []
        most = min(100, connection.max_streams)
        while len(connection.running) < most and connection.window > len(message):
            stream = connection.next_stream
            connection.next_stream += 2
            connection.running.add(stream)
            connection.window -= len(message)
            head = frame(HEADERS, END_HEADERS, stream, INDEXED_CALL)
            calls.append(head + frame(DATA, END_STREAM, stream, message))
        connection.send(b"".join(calls))
        connection.tally["messages"] += len(calls)

    attempt.swarm(2, step, {INITIAL_WINDOW_SIZE: MAX_WINDOW}, pause_s=0.0005)


def _repeat_calls(attempt: Attempt, data: bytes, count: int, more: Sequence[Header] = ()) -> None:
    """Send `count` such messages at once on one connection, wait for their answers, and send them again."""

    def body(connection: Connection) -> None:
        while True:
            _call_all(connection, [data] * count, more)

    attempt.repeat(body)
