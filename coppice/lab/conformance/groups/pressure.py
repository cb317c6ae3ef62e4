"""More long outputs at once than a small KV cache holds: one that has to make room goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import require_context, same_answer, together
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("pressure")

COPIES = 4
# Beyond what a scheduler sets aside for an output that begins.
MAX_TOKENS = 256
PRIORITIES = (0, 3, -2, 1)
# A count may come a little later than the answers.
COUNTED_WITHIN_S = 2.0
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 121, "top_log_probs": 2},
    {"temperature": 0.8, "seed": 122, "top_p": 0.95, "presence_penalty": 0.5},
    {"temperature": 1.2, "seed": 123, "repetition_penalty": 1.1},
)


def kinds(deployment: Deployment) -> list[GenerateRequest]:
    """Long requests, each of them different."""
    length = min(MAX_TOKENS, deployment.info.max_context_tokens - len(deployment.prompts[0]))
    requests = deployment.requests(max_tokens=length)
    return [varied(requests[index % len(requests)], **knobs) for index, knobs in enumerate(KINDS)]


async def press(deployment: Deployment) -> None:
    """Fail unless copies of a few long requests, all at once and of several priorities, are each as one alone.

    Each has a salt of its own, so that none lives on what another has computed.
    """
    distinct = kinds(deployment)
    expected = [await deployment.plain(request) for request in distinct]
    crowd = [
        varied(
            request,
            mode=OFF if copy == COPIES - 1 else FORCED,
            priority=PRIORITIES[(copy + index) % len(PRIORITIES)],
            cache_salt=uuid.uuid4().hex,
        )
        for copy in range(COPIES)
        for index, request in enumerate(distinct)
    ]
    for number, (request, answer) in enumerate(zip(crowd, await together(deployment, crowd), strict=True)):
        same_answer(expected[number % len(distinct)], answer, request)


@GROUP.case("16-long-requests-of-several-priorities-are-each-as-alone")
async def crowd(deployment: Deployment) -> None:
    require_context(deployment, MAX_TOKENS)
    await press(deployment)


@GROUP.case("sequences-that-made-room-go-on-unchanged")
async def made_room(deployment: Deployment) -> None:
    """The same, where the deployment counts that sequences were preempted by it."""
    if deployment.num_preemptions is None:
        raise SkippedError("the deployment does not tell how often a sequence had to make room")
    require_context(deployment, MAX_TOKENS)
    if not deployment.num_preemptions():
        await press(deployment)
    deadline_s = time.monotonic() + COUNTED_WITHIN_S
    while not deployment.num_preemptions():
        if time.monotonic() > deadline_s:
            raise SkippedError("the KV cache had room for all; a smaller one would show more")
        await asyncio.sleep(0.1)
