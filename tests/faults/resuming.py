"""A client that goes on where it was interrupted: what it has is what one undisturbed call would have brought."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from coppice.client import Client, RequestFailedError
from tests.faults.workload import EXCUSES, Case

PAUSE_S = 0.05


@dataclass
class Resumed:
    """What a request has brought over all its calls; `interruptions` are calls that failed as a retry may help."""

    tokens: list[int] = field(default_factory=list)
    interruptions: int = 0
    is_whole: bool = False


async def complete(client: Client, case: Case, into: Resumed, deadline_s: float) -> None:
    """Send a request again and again, each time behind the tokens that it has, until it is whole.

    Raises:
        TimeoutError: it was not, within the deadline.
        RequestFailedError: a call failed as no retry helps.
    """
    async with asyncio.timeout(deadline_s):
        while not into.is_whole:
            try:
                await _call(client, case, into, deadline_s)
            except RequestFailedError as error:
                if error.code.name not in EXCUSES:
                    raise
                into.interruptions += 1
                await asyncio.sleep(PAUSE_S)


async def _call(client: Client, case: Case, into: Resumed, deadline_s: float) -> None:
    options = replace(case.options, resume_token_ids=tuple(into.tokens))
    stream = client.stream(case.prompt, options, deadline_s)
    async for chunk in stream:
        into.tokens += chunk.token_ids
    # Raises unless the stream brought exactly one end.
    stream.result()
    into.is_whole = True
