"""Continuous load with known answers: requests whose tokens were computed undisturbed, and how each of them ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coppice.client import Client, Options, RequestFailedError
from tests.http_client import chunk_of, head_of, opened, request_bytes

# Most clients would wait longer; one that waits this long must be answered.
DEADLINE_S = 30.0
# Beyond its deadline a call may take this much longer to say so; then it hangs.
SLACK_S = 10.0
# How many chunks a slow reader takes slowly, and how slowly.
SLOW_CHUNKS, SLOW_S = 12, 0.05
# Statuses by which a deployment may fail a request that a fault has met. All else is wrong: no client made a mistake.
EXCUSES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED"})
# Plain decoding of one request of an undisturbed deployment, real models included.
DRAW_S = 120.0
_PAUSE_S = 0.02
# Of the clients, every second one speaks HTTP where there is a gateway.
HTTP_SHARE = 2
HTTP_RETRY_S = 0.2
# The statuses and codes of HTTP that mean these of gRPC; a broken connection is the first.
_HTTP_STATUSES = {503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED", 429: "RESOURCE_EXHAUSTED"}
_HTTP_CODES = {"unavailable": 503, "timeout": 504, "rate_limit_exceeded": 429}


class HttpFailedError(Exception):
    """A request over HTTP failed; `end` is the gRPC status that it means."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.end = _HTTP_STATUSES.get(status, f"HTTP_{status}")


@dataclass(frozen=True)
class Case:
    """One request and what plain decoding, undisturbed, answers it with."""

    prompt: tuple[int, ...]
    options: Options
    tokens: tuple[int, ...]


@dataclass
class Ends:
    """How requests ended; what is in `violations` must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    # Of these, over HTTP.
    num_http: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def num_wrong(self) -> int:
        return self.counts["wrong"]

    @property
    def num_hung(self) -> int:
        return self.counts["hung"]


async def draw_cases(address: str, number: int, chance: random.Random) -> list[Case]:
    """So many requests, half of them greedy, with their tokens as plain decoding gives them."""
    cases = []
    shared = tuple(chance.randrange(97, 123) for _ in range(40))
    async with Client(address) as client:
        for index in range(number):
            own = tuple(chance.randrange(97, 123) for _ in range(chance.choice((1, 5, 60))))
            options = Options(
                temperature=float(index % 2),
                seed=chance.randrange(2**32),
                max_tokens=chance.choice((5, 20, 60, 120)),
                ignore_eos=True,
            )
            prompt = shared + own if chance.random() < 0.4 else own
            answer = await client.generate(prompt, replace(options, speculation="off"), DRAW_S)
            cases.append(Case(prompt, options, answer.token_ids))
    return cases


class Load:
    """Clients that send one request after the other until told to stop."""

    def __init__(
        self, address: str, cases: Sequence[Case], num_clients: int, seed: int, http_address: str = ""
    ) -> None:
        """Every `HTTP_SHARE`th client calls the gateway at `http_address`, if there is one."""
        self._address = address
        self._http_address = http_address
        self.cases = cases
        self._num_clients = num_clients
        self._seed = seed
        self._stopping = False
        self.ends = Ends()

    async def run(self) -> None:
        """Return when every client has had the end of its last request."""
        async with asyncio.TaskGroup() as clients:
            for number in range(self._num_clients):
                chance = random.Random(f"{self._seed}/client {number}")
                speaks_http = self._http_address and number % HTTP_SHARE == HTTP_SHARE - 1
                clients.create_task(self._http_client(chance) if speaks_http else self._client(chance))

    def stop(self) -> None:
        """Send nothing new."""
        self._stopping = True

    async def run_for(self, seconds: float) -> None:
        """Run undisturbed for so long, and to the end of every request."""
        running = asyncio.create_task(self.run())
        await asyncio.wait({running}, timeout=seconds)
        self.stop()
        await running
        self._stopping = False

    async def _client(self, chance: random.Random) -> None:
        async with Client(self._address, tenant=f"tenant {chance.randrange(3)}") as client:
            while not self._stopping:
                await self.request(client, chance.choice(self.cases), chance)
                await asyncio.sleep(_PAUSE_S * chance.random())

    async def _http_client(self, chance: random.Random) -> None:
        while not self._stopping:
            end = await self.http_request(chance.choice(self.cases), chance)
            # A connection to a process that is gone is refused at once.
            await asyncio.sleep(HTTP_RETRY_S if end == _HTTP_STATUSES[503] else _PAUSE_S * chance.random())

    async def http_request(self, case: Case, chance: random.Random) -> str:
        """One request to the gateway; how it ended."""
        leaves_after = chance.randrange(1, 40) if chance.random() < 0.1 else None
        got: list[int] = []
        try:
            async with asyncio.timeout(DEADLINE_S + SLACK_S):
                end = await _read_http(self._http_address, case, got, leaves_after)
        except TimeoutError:
            end = "hung"
        except HttpFailedError as error:
            end = error.end
        except (OSError, EOFError):
            end = _HTTP_STATUSES[503]
        self._count(case, end, got)
        self.ends.num_http += 1
        return end

    async def request(self, client: Client, case: Case, chance: random.Random) -> None:
        """One request as one of several kinds of clients sends it, to its end."""
        leaves_after = chance.randrange(1, 40) if chance.random() < 0.1 else None
        is_slow = chance.random() < 0.05
        got: list[int] = []
        try:
            async with asyncio.timeout(DEADLINE_S + SLACK_S):
                end = await self._read(client, case, got, leaves_after, is_slow)
        except TimeoutError:
            end = "hung"
        except RequestFailedError as error:
            end = error.code.name
        self._count(case, end, got)

    async def _read(self, client: Client, case: Case, got: list[int], leaves_after: int | None, is_slow: bool) -> str:
        """How it ended; tokens are put into `got` as they come."""
        stream = client.stream(case.prompt, case.options, DEADLINE_S)
        num_chunks = 0
        async for chunk in stream:
            got += chunk.token_ids
            num_chunks += 1
            if leaves_after is not None and len(got) >= leaves_after:
                stream.cancel()
                return "left by its client"
            if is_slow and num_chunks <= SLOW_CHUNKS:
                await asyncio.sleep(SLOW_S)
        # Raises unless the stream brought exactly one end.
        stream.result()
        return "completed"

    def _count(self, case: Case, end: str, got: Sequence[int]) -> None:
        expected = list(case.tokens)
        is_right = got == expected if end == "completed" else got == expected[: len(got)]
        if not is_right:
            self.ends.violations.append(f"{end}: {list(got)} is not (a beginning of) {expected}, prompt {case.prompt}")
            end = "wrong"
        elif end == "hung" or (end.isupper() and end not in EXCUSES):
            self.ends.violations.append(f"{end} after {len(got)} tokens of {len(expected)}, prompt {case.prompt}")
        self.ends.counts[end] += 1
        self.ends.num_tokens += len(got)


async def _read_http(address: str, case: Case, got: list[int], leaves_after: int | None) -> str:
    """How a stream of the gateway ended; tokens are put into `got` as they come."""
    options = case.options
    fields = {"model": "", "prompt": list(case.prompt), "stream": True, "return_token_ids": True, "ignore_eos": True}
    fields |= {"temperature": options.temperature, "seed": options.seed, "max_tokens": options.max_tokens}
    reader, writer = await opened(address)
    try:
        fields["model"] = await _model(reader, writer)
        headers = {"x-request-timeout": f"{DEADLINE_S:g}"}
        writer.write(request_bytes("POST", "/v1/completions", json.dumps(fields).encode(), headers))
        status, _ = await head_of(reader)
        if status != 200:
            raise HttpFailedError(status)
        while part := await chunk_of(reader):
            for event in part.decode().split("\n\n"):
                if not event.startswith("data: {"):
                    continue
                told = json.loads(event.removeprefix("data: "))
                if "error" in told:
                    raise HttpFailedError(_HTTP_CODES.get(told["error"]["code"], 500))
                got += [token for choice in told["choices"] for token in choice["token_ids"]]
            if leaves_after is not None and len(got) >= leaves_after:
                return "left by its client"
        return "completed"
    finally:
        writer.close()


async def _model(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    writer.write(request_bytes("GET", "/v1/models", headers={"connection": "keep-alive"}))
    status, headers = await head_of(reader)
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    if status != 200:
        raise HttpFailedError(status)
    name: str = body["data"][0]["id"]
    return name
