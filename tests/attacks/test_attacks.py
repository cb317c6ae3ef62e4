"""A short form of `make attacks`: no request of a good client fails, no service ends, memory has a bound."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
import time
from dataclasses import fields
from typing import Any

import pytest

from tests.attacks import chart_limits, http2, http_attacks, message_attacks
from tests.attacks.http2 import DATA, PING, Attempt, Connection, Target, TimeIsUpError, integer, literal, numbered
from tests.attacks.kinds import ATTACKS, PATHS, chosen
from tests.attacks.message_attacks import check_messages
from tests.attacks.run import HEADER, SLOW, Row, Settings, attacked, counted, is_only_slow, line
from tests.raw_http2 import ACK, END_HEADERS, HEADERS, frame

# Of each way to attack, one: streams, headers, large messages, many of them, handshakes.
ROWS = "rapid-reset,bad-path,large-stop-strings,many-medium,tls:full,http:slow-body,http:pipelined"
SECONDS = 2.0
# Of an attack on a server that does nothing, and how late it may end on a busy machine.
TRY_S, LATE_S = 0.03, 5.0
# More than sockets hold.
LONG_BYTES = 15 << 20
ANSWER_S = 20.0


def test_messages_are_what_they_are_meant_to_be() -> None:
    check_messages()


def test_frames_are_numbered_one_stream_after_the_other() -> None:
    template = frame(HEADERS, END_HEADERS, 1, b"ab")
    expected = b"".join(frame(HEADERS, END_HEADERS, stream, b"ab") for stream in (7, 9, 11))
    assert numbered(template, (5,), 7, 3) == expected


def test_long_headers_have_their_length_in_several_bytes() -> None:
    assert integer(10, 5, 0) == b"\x0a"
    assert integer(1337, 5, 0) == b"\x1f\x9a\x0a"
    assert literal(b"n", b"v" * 127) == b"\0\x01n\x7f\0" + b"v" * 127


def test_limits_are_the_charts() -> None:
    assert chart_limits.mib("512Mi") == 512
    assert chart_limits.mib("2Gi") == 2048
    with pytest.raises(ValueError, match="no quantity"):
        chart_limits.mib("5")
    assert (
        chart_limits.memory_limits_mib().keys()
        == chart_limits.settings().keys()
        == {"orchestrator", "verifier", "drafter", "gateway"}
    )


def test_attacks_are_chosen_by_name() -> None:
    assert [attack.name for attack in chosen("rapid-reset, verifier:rapid-reset")] == [
        "rapid-reset",
        "verifier:rapid-reset",
    ]
    assert chosen("") == list(ATTACKS.values())
    with pytest.raises(ValueError, match="no attack 'other'"):
        chosen("other")
    assert all(attack.what for attack in ATTACKS.values())


def row(ratio: float, *broken: str) -> Row:
    numbers: dict[str, Any] = dict.fromkeys((one.name for one in fields(Row)), 0)
    slow = [f"{SLOW} {ratio:g} times as long, limit 2"] if ratio > 2 else []
    return Row(**{**numbers, "ratio": ratio, "ratios": [ratio], "broken": [*broken, *slow]})


@pytest.mark.parametrize(
    ("attempts", "ratio", "num_broken"),
    [
        ([row(1.5)], 1.5, 0),
        ([row(2.7), row(1.4), row(1.9)], 1.9, 0),
        ([row(2.7), row(2.1), row(1.9)], 2.1, 1),
        # What went wrong once is not measured away.
        ([row(2.7), row(1.4, "1 requests with other tokens"), row(1.9)], 1.4, 1),
        ([row(1.0, "ended: verifier")], 1.0, 1),
    ],
)
def test_the_median_of_latency_counts_and_everything_else_at_once(
    attempts: list[Row], ratio: float, num_broken: int
) -> None:
    found = counted(attempts)
    assert (found.ratio, len(found.broken)) == (ratio, num_broken)
    assert found.ratios == [one.ratio for one in attempts]


def test_only_rows_that_are_slow_and_nothing_else_are_measured_again() -> None:
    assert is_only_slow(row(2.7))
    assert not any(map(is_only_slow, (row(1.5), row(2.7, "ended: verifier"), row(1.0, "ended: verifier"))))


def _accept(server: socket.socket, *, closes: bool) -> None:
    """Accept connections until the server is closed; close each at once, or hold it and never say anything."""
    held = []
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            break
        if closes:
            connection.close()
        else:
            held.append(connection)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    "name", [name for name, attack in ATTACKS.items() if name.startswith(("tls:", "http:")) or ":" not in name]
)
def test_attackers_go_on_until_their_time_is_over(name: str, closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Larger ones take longer to make than the attack lasts.
    monkeypatch.setattr(message_attacks, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(message_attacks, "MEDIUM_BYTES", 1 << 16)
    monkeypatch.setattr(http_attacks, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(http_attacks, "PIPELINED", 100)
    monkeypatch.setattr(http2, "_CONNECT_S", 10 * TRY_S)
    monkeypatch.setattr(http2, "_HANDSHAKE_S", 10 * TRY_S)
    attack = ATTACKS[name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_accept, args=(server,), kwargs={"closes": closes})
        thread.start()
        try:
            port = server.getsockname()[1]
            tls = ssl.create_default_context() if attack.tls else None
            target = Target(attack.service, "127.0.0.1", port, "127.0.0.2", PATHS[attack.service], tls)
            attempt = Attempt(target, time.monotonic() + TRY_S)
            with pytest.raises(TimeIsUpError):
                attack.run(attempt)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    # A handshake with a server that says nothing does not end.
    assert attempt.tally["connections"] + attempt.tally["refused"] >= 1
    assert time.monotonic() < attempt.until_s + LATE_S


def test_answers_do_not_cut_a_frame_in_two() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = Target("orchestrator", "127.0.0.1", server.getsockname()[1], "127.0.0.2", b"/")
        attempt = Attempt(target, time.monotonic() + ANSWER_S)
        with Connection(attempt) as connection:
            peer, _ = server.accept()
            message = frame(DATA, 0, 1, b"x" * LONG_BYTES)
            with peer:
                # Waits to be read while the connection cannot send on.
                peer.sendall(frame(PING, 0, 0, b"8 bytes."))
                received = bytearray()
                reader = threading.Thread(target=_read_late, args=(peer, received, len(message) + 17))
                reader.start()
                connection.send(message)
                connection.take()
                reader.join()
    assert received == message + frame(PING, ACK, 0, b"8 bytes.")


def _read_late(peer: socket.socket, received: bytearray, size: int) -> None:
    """Read so many bytes, once the sender has had to wait."""
    time.sleep(0.3)
    while len(received) < size and (data := peer.recv(1 << 20)):
        received += data


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and pins processes to a core")
async def test_a_stranger_does_no_harm() -> None:
    core = max(os.sched_getaffinity(0))
    settings = Settings(SECONDS, core, quiet_s=1.0, after_s=1.0, limits_latency=False, is_short=True)
    rows = await attacked(chosen(ROWS), settings)
    sys.stdout.write("\n".join([HEADER, *map(line, rows)]) + "\n")
    assert {row.name: row.broken for row in rows if row.broken} == {}
    assert all(row.attack.requests for row in rows)
