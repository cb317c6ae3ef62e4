"""Streams that are left, and deadlines that pass: what they held is free again, and no other request notices."""

from __future__ import annotations

import asyncio
import time

import grpc

from coppice.client import RequestFailedError
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, require, require_outputs, same_answer, same_tokens, together
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("cancellation")

TOKENS = 24
LEFT = 8
OUTPUTS = 4
# What cancelled requests held must be free again by then.
FREE_WITHIN_S = 10.0
# Tried in turn, until one is too short for the whole output.
DEADLINES_S = (0.3, 0.1, 0.03, 0.01)


def endless(deployment: Deployment, seed: int) -> GenerateRequest:
    return deployment.requests(temperature=1.0, seed=seed, mode=FORCED)[seed % 3]


async def leave_some(deployment: Deployment) -> None:
    leaving = (deployment.leave(endless(deployment, seed)) for seed in range(LEFT))
    # All have ended before the first error is told: none is left to disturb the next case.
    for ended in await asyncio.gather(*leaving, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


async def company(deployment: Deployment) -> int:
    """Rows of the smallest pass that a plain request takes part in: more than 1 means that it was never alone.

    Raises SkippedError if the deployment does not say.
    """
    passes = (await deployment.ask(deployment.request(max_tokens=TOKENS, mode=OFF))).timing.passes
    if not passes:
        raise SkippedError("the deployment does not report its passes")
    return min(one.rows for one in passes)


async def alone_again(deployment: Deployment, usual: int) -> None:
    """Fail unless a request is soon as alone as it used to be."""
    deadline_s = time.monotonic() + FREE_WITHIN_S
    while (rows := await company(deployment)) > usual:
        reason = f"{FREE_WITHIN_S:g} s later passes still have {rows} rows, {usual} before"
        require(time.monotonic() < deadline_s, reason)


@GROUP.case("cancelled-streams-free-their-place")
async def freed(deployment: Deployment) -> None:
    usual = await company(deployment)
    await leave_some(deployment)
    await alone_again(deployment, usual)


@GROUP.case("several-outputs-free-their-places")
async def outputs_freed(deployment: Deployment) -> None:
    require_outputs(deployment, OUTPUTS)
    usual = await company(deployment)
    await deployment.leave(varied(endless(deployment, 0), num_outputs=OUTPUTS))
    await alone_again(deployment, usual)


@GROUP.case("a-hundred-cancelled-streams-leave-room")
async def room(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, mode=FORCED)
    expected = await deployment.plain(request)
    for seed in range(100):
        await deployment.leave(endless(deployment, seed))
    await ask_same(deployment, request, expected)


@GROUP.case("others-are-left-undisturbed")
async def undisturbed(deployment: Deployment) -> None:
    requests = [
        request
        for mode in (FORCED, OFF)
        for request in deployment.requests(max_tokens=2 * TOKENS, temperature=1.0, seed=81, mode=mode)
    ]
    alone = [await deployment.plain(request) for request in requests]
    leaving = asyncio.create_task(leave_some(deployment))
    try:
        answers = await together(deployment, requests)
    finally:
        await asyncio.wait({leaving})
    leaving.result()
    for request, expected, answer in zip(requests, alone, answers, strict=True):
        same_answer(expected, answer, request)


@GROUP.case("cancelled-before-the-first-token")
async def at_once(deployment: Deployment) -> None:
    usual = await company(deployment)
    for seed in range(LEFT):
        deployment.start(endless(deployment, seed)).cancel()
    await alone_again(deployment, usual)


async def cut_short(deployment: Deployment, request: GenerateRequest) -> tuple[list[int], grpc.StatusCode]:
    """What comes of a request whose deadline is too short, and its status.

    Raises SkippedError if the whole output comes within any deadline.
    """
    for deadline_s in DEADLINES_S:
        tokens: list[int] = []
        try:
            async for chunk in deployment.start(request, deadline_s):
                tokens.extend(chunk.token_ids)
        except RequestFailedError as error:
            return tokens, error.code
    raise SkippedError(f"the context is full within {DEADLINES_S[-1]:g} s")


@GROUP.case("a-deadline-ends-with-deadline-exceeded")
async def exceeded(deployment: Deployment) -> None:
    request = endless(deployment, 82)
    _, code = await cut_short(deployment, request)
    require(code == grpc.StatusCode.DEADLINE_EXCEEDED, f"the status is {code.name}", request)


@GROUP.case("what-came-before-a-deadline-is-right")
async def before(deployment: Deployment) -> None:
    request = endless(deployment, 83)
    tokens, _ = await cut_short(deployment, request)
    if not tokens:
        raise SkippedError("no token came before the deadline")
    whole = await deployment.plain(varied(request, max_tokens=len(tokens)))
    # The answer that was cut short counts nothing; this one has drawn the same tokens.
    same_tokens(whole.token_ids, tokens, request, whole.speculation.near_ties)


@GROUP.case("deadlines-free-their-place")
async def deadline_freed(deployment: Deployment) -> None:
    usual = await company(deployment)
    await asyncio.gather(*(cut_short(deployment, endless(deployment, seed)) for seed in range(LEFT)))
    await alone_again(deployment, usual)
