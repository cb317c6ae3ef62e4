"""Requests that must be refused."""

from __future__ import annotations

import grpc

from coppice.client import RequestFailedError
from coppice.lab.conformance.checks import require
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import FailureError
from coppice.v1.inference_pb2 import GenerateRequest

MAX_SHOWN_BYTES = 4096


async def refusal(deployment: Deployment, request: GenerateRequest) -> RequestFailedError:
    """The error that a request gets.

    Raises:
        FailureError: it gets an answer.
    """
    stream = deployment.start(request)
    try:
        async for _ in stream:
            pass
    except RequestFailedError as error:
        return error
    raise FailureError("it was answered", _shown(request))


async def refused_naming(deployment: Deployment, request: GenerateRequest, field: str) -> None:
    """Fail unless a request is refused as the client's mistake in one field."""
    error = await refusal(deployment, request)
    require(error.code == grpc.StatusCode.INVALID_ARGUMENT, f"the status is {error}", _shown(request))
    require(error.fields == (field,), f"the fields are {error.fields}, not {field}: {error.details}", _shown(request))


def _shown(request: GenerateRequest) -> GenerateRequest | None:
    """The request, where it is short enough to be shown."""
    return request if request.ByteSize() < MAX_SHOWN_BYTES else None
