"""Requests that are sent at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from coppice.client import RequestFailedError
from coppice.completion import Completion
from coppice.lab.conformance.checks import same_answer
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import FailureError, SkippedError
from coppice.v1.inference_pb2 import GenerateRequest


async def together(deployment: Deployment, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """The answers to requests that are sent at once.

    Raises:
        SkippedError: the deployment has no place for so many.
        FailureError: one of them failed.
    """
    calls = [deployment.client.send(request, deployment.timeout_s) for request in requests]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, RequestFailedError):
            if answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise SkippedError(f"no place for {len(requests)} requests: {answer.details}")
            raise FailureError(str(answer), request)
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Completion)]


async def each_as_alone(deployment: Deployment, requests: Sequence[GenerateRequest]) -> None:
    """Fail unless each request that is sent with the others gets the answer of plain decoding alone."""
    alone = [await deployment.plain(request) for request in requests]
    for request, expected, answer in zip(requests, alone, await together(deployment, requests), strict=True):
        same_answer(expected, answer, request)
