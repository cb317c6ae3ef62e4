"""Attacks on a port with TLS: before, during and after the handshake."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

from tests.attacks.http2 import PING, Attempt, Connection
from tests.raw_http2 import frame

NUM_FULL = 1_000
NUM_STALLED = 1_000
# Written at a time to each full connection, as long as it takes anything.
FULL_FRAMES = 4_000
# Stalled handshakes send a byte each at most so often.
STALLED_TURN_S = 0.2
# Length of the noise that stands for a handshake, of several records.
NOISE_BYTES = 40_000


def tls_full(attempt: Attempt) -> None:
    """1,000 connections, each full of PINGs that wait for their turn."""
    pings = memoryview(frame(PING, 0, 0, b"8 bytes.") * FULL_FRAMES)

    def step(connection: Connection) -> None:
        connection.stage = connection.send_now(pings, connection.stage)

    attempt.swarm(NUM_FULL, step, pause_s=0.01)


def tls_silent(attempt: Attempt) -> None:
    """1,000 TCP connections that never begin their handshake; those that are lost are opened again."""
    _stall(attempt, lambda _: b"")


def tls_stalled(attempt: Attempt) -> None:
    """1,000 handshakes that send their first message a byte at a time; those that are lost are begun again."""
    hello = client_hello()
    _stall(attempt, lambda number: hello[number : number + 1])


def tls_handshakes(attempt: Attempt) -> None:
    """Complete handshakes as fast as they go, each on a new connection that is closed at once."""
    while True:
        if (connection := attempt.try_open(greets=False)) is not None:
            connection.close()
            attempt.tally["handshakes"] += 1


def tls_half_handshakes(attempt: Attempt) -> None:
    """First messages of handshakes, each on a new connection that is closed when the server has answered."""
    hello = client_hello()
    while True:
        if (connected := attempt.try_connect()) is not None:
            with contextlib.suppress(OSError), connected:
                connected.sendall(hello)
                attempt.tally["answers"] += bool(connected.recv(1))


def tls_noise(attempt: Attempt) -> None:
    """What looks like the first record of a handshake and is none, each time on a new connection."""
    noise = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"\xff" * NOISE_BYTES
    while True:
        if (connected := attempt.try_connect()) is not None:
            with contextlib.suppress(OSError), connected:
                connected.sendall(noise)
                attempt.tally["answers"] += bool(connected.recv(1))


def client_hello() -> bytes:
    """The first message of a handshake as Python's own TLS sends it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def _stall(attempt: Attempt, sent: Callable[[int], bytes]) -> None:
    """Hold connections that have got so far, and send what `sent` says at their n-th turn."""
    held: list[tuple[socket.socket, int] | None] = [None] * NUM_STALLED
    try:
        while True:
            for index, item in enumerate(held):
                if item is None:
                    connected = attempt.try_connect()
                    held[index] = None if connected is None else (connected, 0)
                    if connected is not None:
                        connected.setblocking(False)
                    continue
                connected, number = item
                try:
                    connected.send(sent(number))
                    # Without an exception there is an end, or an answer.
                    is_lost = not connected.recv(1)
                except BlockingIOError:
                    is_lost = False
                except OSError:
                    is_lost = True
                held[index] = (connected, number + 1)
                if is_lost:
                    attempt.tally["closed by server"] += 1
                    connected.close()
                    held[index] = None
            attempt.tally["most at once"] = max(attempt.tally["most at once"], sum(item is not None for item in held))
            attempt.sleep(STALLED_TURN_S)
    finally:
        for item in held:
            if item is not None:
                item[0].close()
