"""Errors of Coppice with their gRPC statuses; only `coppice.net.rpc` translates them.

CoppiceError
├── InvalidRequestError      the caller's mistake; names the field
│   └── InvalidTreeError     a malformed token tree
├── IncompatibleError        two parts that cannot work together (tokenizers differ, model not supported)
├── UnsupportedError         a valid request for a feature that this version does not offer
├── OverloadedError          no room now; retry after a pause
├── UnavailableError         a peer is unreachable; a retry may help
└── DeadlineError            the deadline has passed
"""

from __future__ import annotations

import grpc


class CoppiceError(Exception):
    """Base of all errors that callers may see."""

    status = grpc.StatusCode.INTERNAL


class InvalidRequestError(CoppiceError):
    """Invalid request; `field` is the path of the wrong field, such as `sampling.top_p`."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class InvalidTreeError(InvalidRequestError):
    """Invalid token tree."""

    def __init__(self, message: str) -> None:
        super().__init__("tree", message)


class IncompatibleError(CoppiceError):
    """Two parts that cannot work together."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class UnsupportedError(CoppiceError):
    """A valid request for a feature that this version does not offer."""

    status = grpc.StatusCode.UNIMPLEMENTED


class OverloadedError(CoppiceError):
    """No room for this work now; retry after `retry_after_s`."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(CoppiceError):
    """A peer is unreachable; a retry may help."""

    status = grpc.StatusCode.UNAVAILABLE


class UnreadError(CoppiceError):
    """The client does not read its messages."""

    status = grpc.StatusCode.ABORTED


class DeadlineError(CoppiceError):
    """The deadline has passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
