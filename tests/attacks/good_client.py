"""`python -m tests.attacks.good_client ADDRESS lasting|new TENANT CA`: valid requests, one after the other.

`lasting` keeps one connection; `new` opens one for each request, with pauses. Each writes a line of JSON for what the
prompts give undisturbed, then one for each request, until it is told to end by SIGTERM. CA: see attacker.py. ADDRESS is
a URL where it speaks to the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType
from typing import Protocol, Self

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


class Door(Protocol):
    """A connection to a service, as an asynchronous context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def tokens(self, prompt: str, regex: str | None) -> list[int]:
        """Tokens of an answer.

        Raises:
            RefusedError: there is none.
        """


class RefusedError(Exception):
    """Status and text of a request that failed."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class GrpcDoor:
    """The orchestrator."""

    def __init__(self, address: str, tenant: str, ca: str) -> None:
        self._client = Client(address, tenant, tls=ChannelTls(ca) if ca else None)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def tokens(self, prompt: str, regex: str | None) -> list[int]:
        """See `Door`."""
        options = Options(max_tokens=MAX_TOKENS, temperature=0.0, regex=regex)
        try:
            return list((await self._client.generate(prompt, options, TIMEOUT_S)).token_ids)
        except RequestFailedError as error:
            raise RefusedError(error.code.name, error.details) from error


class HttpDoor:
    """The gateway."""

    def __init__(self, url: str, tenant: str) -> None:
        self._user = {"user": tenant} if tenant else {}
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    async def tokens(self, prompt: str, regex: str | None) -> list[int]:
        """See `Door`."""
        fields: dict[str, object] = {"model": "target", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        fields |= {"return_token_ids": True, **self._user} | ({} if regex is None else {"guided_regex": regex})
        try:
            # It has nothing else to do meanwhile, and threads would wait for each other on a busy machine.
            status, body = self._posted(json.dumps(fields))
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise RefusedError(LOST, repr(error)) from error
        if status != http.HTTPStatus.OK:
            raise RefusedError(str(status), body[:300].decode("utf-8", "replace"))
        found: list[int] = json.loads(body)["choices"][0]["token_ids"]
        return found

    def _posted(self, body: str) -> tuple[int, bytes]:
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def door_of(address: str, tenant: str, ca: str) -> Door:
    """A connection to a gateway's URL, or to an orchestrator."""
    return HttpDoor(address, tenant) if "://" in address else GrpcDoor(address, tenant, ca)


async def main(address: str, kind: str, tenant: str, ca: str) -> None:
    """Ask once for what is right, then go on until told to end."""
    connect = partial(door_of, address, tenant, ca)
    async with connect() as door:
        right = [await door.tokens(*CASES[case]) for case in range(len(CASES))]
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


async def _asked(connect: Callable[[], Door], lasting: Door | None, case: int) -> tuple[str, list[int], str]:
    """The status of a request, OK or another, its tokens, and what the status says."""
    try:
        async with asyncio.timeout(TIMEOUT_S + 1), _connected(connect, lasting) as door:
            return "OK", await door.tokens(*CASES[case]), ""
    except RefusedError as error:
        return error.status, [], error.detail
    except TimeoutError:
        return LOST, [], ""
    except asyncio.CancelledError:
        # We are told to end by a signal alone, so that this is the server's doing.
        return CANCELLED, [], ""


@contextlib.asynccontextmanager
async def _connected(connect: Callable[[], Door], lasting: Door | None) -> AsyncIterator[Door]:
    if lasting is not None:
        yield lasting
        return
    async with connect() as door:
        yield door


def _tell(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
