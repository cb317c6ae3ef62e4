"""Attacks on the gateway's port: HTTP/1.1 on raw sockets."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import time
from collections.abc import Callable

from tests.attacks.http2 import Attempt

NUM_SLOW, NUM_IDLE, NUM_STREAMS, NUM_GREEDY = 300, 2_000, 500, 1_000
NUM_BODIES, NUM_LARGE = 700, 16
LARGE_BYTES = 1024 * 1024
NUM_LONG, LONG_PROMPT = 4, 1_000_000
PIPELINED = 6_000
MANY_HEADERS = 10_000
NUM_GRAMMARS = 16
NUM_WIDE = 100
SCHEMA_KEYS = 2_600
_READ_BYTES = 1 << 16
_PROMPT = "def add(a, b):\n    return"


def post(fields: object, path: str = "/v1/completions") -> bytes:
    """A request with a JSON body."""
    return _with_body(fields if isinstance(fields, bytes) else json.dumps(fields).encode(), path)


def _with_body(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(max_tokens: int = 16, **fields: object) -> dict[str, object]:
    """Fields of a valid request."""
    return {"model": "target", "prompt": _PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **fields}


class Exchange:
    """One connection of an attacker: `data` is sent as far as the server takes it; answers are read or not."""

    def __init__(self, connected: socket.socket, number: int) -> None:
        connected.setblocking(False)
        self._socket = connected
        self.number = number
        self.next_s = 0.0
        # Rest of what is to be sent.
        self.data = memoryview(b"")

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def go_on(self, most: int | None = None) -> bool:
        """Send at most `most` bytes of `data`; False where the connection is lost."""
        while self.data:
            try:
                sent = self._socket.send(self.data[:most])
            except BlockingIOError:
                break
            except OSError:
                return False
            self.data = self.data[sent:]
            if most is not None:
                break
        return True

    def read(self, most: int = _READ_BYTES) -> bytes | None:
        """What has come, at most so many bytes; None where the connection is lost."""
        try:
            return self._socket.recv(most) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None


def _swarm(
    attempt: Attempt,
    count: int,
    step: Callable[[Exchange], bool],
    *,
    pause_s: float,
    reads: bool = True,
    is_narrow: bool = False,
) -> None:
    """Hold `count` connections until the time is over; those that are lost, or whose step is False, are opened again.

    With `is_narrow` the sockets of both ends keep few bytes.

    Raises:
        TimeIsUpError: the attack is over.
    """
    numbers = itertools.count()
    held: list[Exchange | None] = [None] * count
    try:
        while True:
            for index, exchange in enumerate(held):
                attempt.check()
                if exchange is None:
                    connected = attempt.try_connect(is_narrow=is_narrow)
                    held[index] = exchange = None if connected is None else Exchange(connected, next(numbers))
                if exchange is None:
                    continue
                answer = exchange.read() if reads else b""
                attempt.tally["bytes read"] += len(answer or b"")
                if answer is None or not step(exchange):
                    attempt.tally["closed"] += 1
                    exchange.close()
                    held[index] = None
            attempt.tally["most at once"] = max(attempt.tally["most at once"], sum(one is not None for one in held))
            attempt.sleep(pause_s)
    finally:
        for exchange in held:
            if exchange is not None:
                exchange.close()


def _again(attempt: Attempt, count: int, make: Callable[[int], bytes], *, pause_s: float, every_s: float = 0.0) -> None:
    """Send what `make` says for the n-th time on each of some connections, and again, `every_s` apart."""
    numbers = itertools.count()

    def step(exchange: Exchange) -> bool:
        if not exchange.data and time.monotonic() >= exchange.next_s:
            exchange.next_s = time.monotonic() + every_s
            exchange.data = memoryview(make(next(numbers)))
            attempt.tally["messages"] += 1
        return exchange.go_on()

    _swarm(attempt, count, step, pause_s=pause_s)


def idle(attempt: Attempt) -> None:
    """2,000 connections that say nothing; those that are lost are opened again."""
    _swarm(attempt, NUM_IDLE, lambda _: True, pause_s=0.05)


def slow_head(attempt: Attempt) -> None:
    """300 connections that send a byte of a header each second."""
    _slow(attempt, NUM_SLOW, b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: ", b"a" * 4096)


def slow_body(attempt: Attempt) -> None:
    """700 connections that declare a body of 1 MiB, send 64 KiB of it, and a byte each second."""
    data = _with_body(b" " * LARGE_BYTES)
    _slow(attempt, NUM_BODIES, data[: 64 * 1024], data[64 * 1024 :])


def _slow(attempt: Attempt, count: int, begin: bytes, rest: bytes) -> None:
    def step(exchange: Exchange) -> bool:
        if exchange.next_s == 0.0:
            exchange.data = memoryview(begin + rest)
        is_begun = len(exchange.data) <= len(rest)
        if is_begun and time.monotonic() < exchange.next_s:
            return True
        exchange.next_s = time.monotonic() + 1.0
        return exchange.go_on(1 if is_begun else len(exchange.data) - len(rest))

    _swarm(attempt, count, step, pause_s=0.02)


def large_bodies(attempt: Attempt) -> None:
    """Bodies of 1 MiB of token ids on 16 connections, and others when they are answered."""
    body = json.dumps({"model": "target", "prompt": [1] * (LARGE_BYTES // 3 - 100), "max_tokens": 1}).encode()
    _again(attempt, NUM_LARGE, lambda _: _with_body(body), pause_s=0.002)


def endless_body(attempt: Attempt) -> None:
    """Bodies in chunks that never end, as fast as they are taken, on 16 connections."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    _again(attempt, NUM_LARGE, lambda _: head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 200, pause_s=0.002)


def long_prompts(attempt: Attempt) -> None:
    """Prompts of a million characters on 4 connections: too long once encoded."""
    body = json.dumps(completion(prompt="a" * LONG_PROMPT)).encode()
    _again(attempt, NUM_LONG, lambda _: _with_body(body), pause_s=0.002)


def stop_strings(attempt: Attempt) -> None:
    """Bodies of 1 MiB of stop strings of one character."""
    body = json.dumps(completion(stop=["x"] * (LARGE_BYTES // 5 - 100))).encode()
    _again(attempt, NUM_LARGE, lambda _: _with_body(body), pause_s=0.002)


def deep_json(attempt: Attempt) -> None:
    """JSON arrays inside one another, 500,000 deep."""
    body = b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    _again(attempt, NUM_LARGE, lambda _: _with_body(body), pause_s=0.002)


def huge_head(attempt: Attempt) -> None:
    """A header value of 1 MiB, or 10,000 headers, in turn."""
    heads = (
        b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"".join(b"x-%d: a\r\n" % n for n in range(MANY_HEADERS)) + b"\r\n",
    )
    _again(attempt, NUM_LARGE, lambda number: heads[number % 2], pause_s=0.002)


def pipelined(attempt: Attempt) -> None:
    """6,000 requests at a time on 50 connections, whose answers are not read."""
    data = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * PIPELINED

    def step(exchange: Exchange) -> bool:
        if not exchange.data:
            exchange.data = memoryview(data)
        return exchange.go_on()

    _swarm(attempt, 50, step, pause_s=0.002, reads=False)


def health(attempt: Attempt) -> None:
    """/health and paths that there are not, as fast as possible, on two connections."""
    paths = (b"/health", b"/v1/none", b"/", b"/v1/models")
    requests = [b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path for path in paths]
    _again(attempt, 2, lambda number: requests[number % 4] * 8, pause_s=0.0005)


def reconnects(attempt: Attempt) -> None:
    """Connections opened and closed as fast as possible, half of them with a request."""
    request = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    while True:
        if (connected := attempt.try_connect()) is not None:
            with contextlib.suppress(OSError), connected:
                connected.sendall(request if attempt.tally["connections"] % 2 else b"")


def aborts(attempt: Attempt) -> None:
    """Valid requests for 256 tokens in a stream, whose connection is closed at once, as fast as possible."""
    request = post(completion(256, stream=True))
    while True:
        if (connected := attempt.try_connect()) is not None:
            with contextlib.suppress(OSError), connected:
                connected.sendall(request)
                attempt.tally["messages"] += 1


def unread(attempt: Attempt) -> None:
    """500 streams of 256 tokens that nobody reads."""
    request = post(completion(256, stream=True, logprobs=5))

    def step(exchange: Exchange) -> bool:
        if exchange.next_s == 0.0:
            exchange.next_s = 1.0
            exchange.data = memoryview(request)
        return exchange.go_on()

    _swarm(attempt, NUM_STREAMS, step, pause_s=0.05, reads=False)


def slow_reads(attempt: Attempt) -> None:
    """500 streams of 400 tokens, of each of which a byte is read a second, through sockets that keep few bytes."""
    request = post(completion(400, stream=True, logprobs=5))

    def step(exchange: Exchange) -> bool:
        if exchange.next_s == 0.0:
            exchange.data = memoryview(request)
        if time.monotonic() >= exchange.next_s:
            exchange.next_s = time.monotonic() + 1.0
            if (read := exchange.read(1)) is None:
                return False
            attempt.tally["bytes read"] += len(read)
        return exchange.go_on()

    _swarm(attempt, NUM_STREAMS, step, pause_s=0.05, reads=False, is_narrow=True)


def garbage(attempt: Attempt) -> None:
    """Random bytes, the preface of HTTP/2, broken lines, lengths and chunks, each on a new connection."""
    chance = random.Random(0)
    broken = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\nx",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"GET /%ff%00\xff HTTP/1.1\r\nHost: \xff\r\n\r\n",
        post(b'{"prompt": "\xff\xfe'),
    )
    while True:
        if (connected := attempt.try_connect()) is not None:
            with contextlib.suppress(OSError), connected:
                number = attempt.tally["connections"] % (len(broken) + 1)
                connected.sendall(chance.randbytes(4096) if number == len(broken) else broken[number])


def schemas(attempt: Attempt) -> None:
    """16 JSON schemas of 2,600 keys at once, and others when they are answered."""

    def make(number: int) -> bytes:
        schema = {"type": "object", "properties": {f"k{number:05}_{key:04}": {} for key in range(SCHEMA_KEYS)}}
        kind = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return post(completion(response_format=kind))

    _again(attempt, NUM_GRAMMARS, make, pause_s=0.01, every_s=0.5)


def regexes(attempt: Attempt) -> None:
    """16 costly regular expressions at once, and others when they are answered."""
    make = lambda number: post(completion(guided_regex="[a-z]?" * (9_000 - number % 4_000)))  # noqa: E731
    _again(attempt, NUM_GRAMMARS, make, pause_s=0.01, every_s=0.5)


def many_prompts(attempt: Attempt) -> None:
    """Bodies of 73 KB with 64 prompts, a long grammar, 1,000 biases and 16 stop strings on 100 connections."""
    data = post(
        completion(
            1,
            prompt=["a"] * 64,
            guided_regex="(a|b|c)*" + f"({'a' * 60})?" * 900,
            logit_bias={str(token): 0.1 for token in range(1000)},
            stop=["x" * 250] * 16,
        )
    )
    _again(attempt, NUM_WIDE, lambda _: data, pause_s=0.01, every_s=0.2)


def users(attempt: Attempt) -> None:
    """Valid requests, each of another `user` and `cache_salt`, on 200 connections."""
    make = lambda number: post(completion(4, user=f"user-{number}", cache_salt=str(number)))  # noqa: E731
    _again(attempt, 200, make, pause_s=0.01, every_s=0.1)


def greedy(attempt: Attempt) -> None:
    """1,000 connections with a valid request for 400 tokens each, all read, as a greedy client might send them."""
    data = post(completion(400, stream=True))
    _again(attempt, NUM_GREEDY, lambda _: data, pause_s=0.01, every_s=20.0)
