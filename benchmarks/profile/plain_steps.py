"""Plain decoding through the public API: what a step takes from end to end, whatever lies between passes."""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks.profile.verifier_peer import Known
from coppice.client import Client, Options

NUM_TOKENS = 40
# Until then prompts are computed, and requests begin.
SKIPPED = 8


async def plain_step_s(client: Client, known: Known, batch: int) -> float:
    """Seconds from one pass to the next while so many requests decode the same prompt's output.

    Raises:
        RequestFailedError: a request failed.
    """
    options = Options(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, speculation="off", cache_salt="profile")
    return statistics.median(await asyncio.gather(*(_step_s(client, known, options) for _ in range(batch))))


async def _step_s(client: Client, known: Known, options: Options) -> float:
    came_s = []
    async for chunk in client.stream(known.prompt, options):
        came_s += [time.perf_counter()] * len(chunk.token_ids)
    return (came_s[-1] - came_s[SKIPPED]) / (len(came_s) - 1 - SKIPPED)
