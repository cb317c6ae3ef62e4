"""Errors in OpenAI's shape, and the HTTP statuses of gRPC's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import grpc

from coppice.client import RequestFailedError

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER = "server_error"
UNSUPPORTED = "unsupported_parameter"

_CODE = grpc.StatusCode
# HTTP status, `type` and `code` by gRPC status. UNIMPLEMENTED: the request asks for a feature that is not offered.
_STATUSES = {
    _CODE.INVALID_ARGUMENT: (400, INVALID, None),
    _CODE.OUT_OF_RANGE: (400, INVALID, None),
    _CODE.UNIMPLEMENTED: (400, INVALID, UNSUPPORTED),
    _CODE.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    _CODE.PERMISSION_DENIED: (403, "permission_error", None),
    _CODE.NOT_FOUND: (404, INVALID, None),
    _CODE.ABORTED: (408, INVALID, "unread"),
    _CODE.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    _CODE.UNAVAILABLE: (503, SERVER, "unavailable"),
    _CODE.FAILED_PRECONDITION: (503, SERVER, "unavailable"),
    _CODE.DEADLINE_EXCEEDED: (504, SERVER, "timeout"),
}


class ApiError(Exception):
    """An error that the client is told: HTTP status, and OpenAI's `message`, `type`, `param` and `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers beyond those of every answer; `Retry-After` is in whole seconds, as HTTP has it."""
        if self.status == 401:
            # RFC 9110, section 15.5.2.
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(math.ceil(1000 * self.retry_after_s)),
        }


def unsupported(param: str, text: str = "is not supported") -> ApiError:
    """Refusal of a field that exists elsewhere."""
    return ApiError(400, f"{param}: {text}", param=param, code=UNSUPPORTED)


def invalid(param: str, text: str) -> ApiError:
    """Refusal of a field's value."""
    return ApiError(400, f"{param}: {text}", param=param)


def broken_answer(what: str) -> ApiError:
    """Error of an answer that no orchestrator may give; the log has it, too."""
    logger.error("the orchestrator's answer is broken: %s", what)
    return ApiError(502, f"the answer of the model's server is broken: {what}", SERVER, code="broken_answer")


def from_rpc(error: grpc.aio.AioRpcError, rename: Callable[[str], str | None]) -> ApiError:
    """Error of a failed call; `rename` gives the HTTP name of a field of the gRPC request, None for the same."""
    failed = RequestFailedError(error)
    status, kind, code = _STATUSES.get(failed.code, (500, SERVER, None))
    message, param = failed.details, None
    field, colon, text = failed.details.partition(": ")
    if status == 400 and colon and (failed.fields == (field,) or (code == UNSUPPORTED and " " not in field)):
        param = rename(field) or field
        message = f"{param}: {text}"
    if failed.code == _CODE.RESOURCE_EXHAUSTED and failed.retry_after_s is None:
        # No matter of load: the message is larger than what the orchestrator reads.
        return ApiError(413, f"the request is too large: {failed.details}", code="request_too_large")
    if failed.code == _CODE.UNAVAILABLE:
        # gRPC's own words name addresses.
        message = "the model is not available now"
    return ApiError(status, message, kind, param, code, failed.retry_after_s)
