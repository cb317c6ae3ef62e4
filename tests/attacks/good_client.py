"""`python -m tests.attacks.good_client ADDRESS lasting|new TENANT CA`: valid requests, one after the other.

`lasting` keeps one connection; `new` opens one for each request, with pauses. Each writes a line of JSON for what the
prompts give undisturbed, then one for each request, until it is told to end by SIGTERM. CA: see attacker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from coppice.client import Client, Options, RequestFailedError
from coppice.net.tls import ChannelTls

LASTING, NEW = "lasting", "new"
MAX_TOKENS = 16
TIMEOUT_S = 10.0
NEW_PAUSE_S = 0.2
FAILED_PAUSE_S = 0.05
LOST, CANCELLED = "LOST", "CANCELLED"
REGEX = "[a-z]{1,8}( [a-z]{1,8}){3,40}"
PROMPTS = (
    "def add(a, b):\n    return",
    "for index in range(10):\n",
    "class Stack:\n    def __init__(self):\n",
)
# A quarter has a grammar.
CASES: tuple[tuple[str, str | None], ...] = (*((prompt, None) for prompt in PROMPTS), (PROMPTS[0], REGEX))


async def main(address: str, kind: str, tenant: str, ca: str) -> None:
    """Ask once for what is right, then go on until told to end."""
    connect = partial(Client, address, tenant, tls=ChannelTls(ca) if ca else None)
    async with connect() as client:
        right = [await _tokens(client, case) for case in range(len(CASES))]
    _tell({"right": right})
    number = 0
    async with contextlib.AsyncExitStack() as stack:
        lasting = await stack.enter_async_context(connect()) if kind == LASTING else None
        while True:
            case = number % len(CASES)
            number += 1
            start = time.monotonic()
            status, tokens, detail = await _asked(connect, lasting, case)
            _tell(
                {
                    "kind": kind,
                    "start": start,
                    "end": time.monotonic(),
                    "status": status,
                    "detail": detail,
                    "same": status != "OK" or tokens == right[case],
                }
            )
            await asyncio.sleep(FAILED_PAUSE_S if status != "OK" else NEW_PAUSE_S if kind == NEW else 0.0)


async def _asked(connect: Callable[[], Client], lasting: Client | None, case: int) -> tuple[str, list[int], str]:
    """The status of a request, OK or another, its tokens, and what the status says."""
    try:
        async with asyncio.timeout(TIMEOUT_S + 1), _connected(connect, lasting) as client:
            return "OK", await _tokens(client, case), ""
    except RequestFailedError as error:
        return error.code.name, [], error.details
    except TimeoutError:
        return LOST, [], ""
    except asyncio.CancelledError:
        # We are told to end by a signal alone, so that this is the server's doing.
        return CANCELLED, [], ""


@contextlib.asynccontextmanager
async def _connected(connect: Callable[[], Client], lasting: Client | None) -> AsyncIterator[Client]:
    if lasting is not None:
        yield lasting
        return
    async with connect() as client:
        yield client


async def _tokens(client: Client, case: int) -> list[int]:
    prompt, regex = CASES[case]
    options = Options(max_tokens=MAX_TOKENS, temperature=0.0, regex=regex)
    return list((await client.generate(prompt, options, TIMEOUT_S)).token_ids)


def _tell(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
