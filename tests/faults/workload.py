"""Continuous load with known answers: requests whose tokens were computed undisturbed, and how each of them ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coppice.client import Client, Options, RequestFailedError

# Most clients would wait longer; one that waits this long must be answered.
DEADLINE_S = 30.0
# Beyond its deadline a call may take this much longer to say so; then it hangs.
SLACK_S = 10.0
# How many chunks a slow reader takes slowly, and how slowly.
SLOW_CHUNKS, SLOW_S = 12, 0.05
# Statuses by which a deployment may fail a request that a fault has met. All else is wrong: no client made a mistake.
EXCUSES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED"})
_PAUSE_S = 0.02


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
            answer = await client.generate(prompt, replace(options, speculation="off"), DEADLINE_S)
            cases.append(Case(prompt, options, answer.token_ids))
    return cases


class Load:
    """Clients that send one request after the other until told to stop."""

    def __init__(self, address: str, cases: Sequence[Case], num_clients: int, seed: int) -> None:
        self._address = address
        self.cases = cases
        self._num_clients = num_clients
        self._seed = seed
        self._stopping = False
        self.ends = Ends()

    async def run(self) -> None:
        """Return when every client has had the end of its last request."""
        async with asyncio.TaskGroup() as clients:
            for number in range(self._num_clients):
                clients.create_task(self._client(random.Random(f"{self._seed}/client {number}")))

    def stop(self) -> None:
        """Send nothing new."""
        self._stopping = True

    async def _client(self, chance: random.Random) -> None:
        async with Client(self._address, tenant=f"tenant {chance.randrange(3)}") as client:
            while not self._stopping:
                await self.request(client, chance.choice(self.cases), chance)
                await asyncio.sleep(_PAUSE_S * chance.random())

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
