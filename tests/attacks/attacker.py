"""`python -m tests.attacks.attacker NAME ADDRESS SOURCE SECONDS CORE CA`: one attack, pinned to one core.

With a CA, a file, the port speaks TLS; empty: it does not.
It writes `started` when it begins, then one line of JSON with what it did. NAME `busy` only keeps the core busy.
It ends by itself: SIGALRM ends it 10 s after its time, whatever it does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import ssl
import sys
import time

from tests.attacks.http2 import Attempt, Target, TimeIsUpError, allow_many_files, as_json
from tests.attacks.kinds import ATTACKS, PATHS
from tests.attacks.message_attacks import check_messages

BUSY = "busy"
STARTED = "started"
SLACK_S = 10


def main(name: str, address: str, source: str, seconds: float, core: int, ca: str) -> None:
    """Attack for `seconds`.

    Raises:
        ValueError: an address is not in 127.0.0.0/8, or there is no attack of that name.
    """
    signal.alarm(int(seconds) + SLACK_S)
    os.sched_setaffinity(0, {core})
    allow_many_files()
    check_messages()
    host, _, port = address.rpartition(":")
    for own in (host, source):
        if not ipaddress.ip_address(own).is_loopback:
            raise ValueError(f"{own} is not in 127.0.0.0/8")
    _tell(STARTED)
    until_s = time.monotonic() + seconds
    if name == BUSY:
        while time.monotonic() < until_s:
            sum(range(10_000))
        _tell("{}")
        return
    attack = ATTACKS[name]
    tls = _context(ca) if ca else None
    attempt = Attempt(Target(attack.service, host, int(port), source, PATHS[attack.service], tls), until_s)
    with contextlib.suppress(TimeIsUpError):
        attack.run(attempt)
    _tell(as_json(attempt.tally))


def _context(ca: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    return context


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
