"""A short form of `make attacks`: no request of a good client fails, no service ends, memory has a bound."""

from __future__ import annotations

import os
import sys

import pytest

from tests.attacks import chart_limits
from tests.attacks.http2 import integer, literal, numbered
from tests.attacks.kinds import ATTACKS, chosen
from tests.attacks.message_attacks import check_messages
from tests.attacks.run import HEADER, Settings, attacked, line
from tests.raw_http2 import END_HEADERS, HEADERS, frame

ROWS = "bad-path,rapid-reset,headers-only,large-stop-strings,large-token-ids,many-medium"
SECONDS = 3.0


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
        == {"orchestrator", "verifier", "drafter"}
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
