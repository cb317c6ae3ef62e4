"""The errors of Coppice. Each knows its gRPC status; `coppice.net.rpc` is the one place that translates.

CoppiceError
├── InvalidRequestError      the caller's mistake, names the field
│   └── InvalidTreeError     a malformed token tree
├── IncompatibleError        two parts that cannot work together (tokenizers differ, model not supported)
├── UnsupportedError         a valid request for what this version does not offer
├── OverloadedError          no room now; retry after a pause
├── UnavailableError         a peer is gone; a retry may help
└── DeadlineError            the time for the work is over
"""

from __future__ import annotations

import grpc


class CoppiceError(Exception):
    """Root of all errors that a caller may see."""

    status = grpc.StatusCode.INTERNAL


class InvalidRequestError(CoppiceError):
    """The request is wrong; `field` names what is wrong with it, as a path such as `sampling.top_p`."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class InvalidTreeError(InvalidRequestError):
    """A token tree that breaks its own rules."""

    def __init__(self, message: str) -> None:
        super().__init__("tree", message)


class IncompatibleError(CoppiceError):
    """Two parts that cannot work together."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class UnsupportedError(CoppiceError):
    """A valid request for something that this version does not offer."""

    status = grpc.StatusCode.UNIMPLEMENTED


class OverloadedError(CoppiceError):
    """No room for this work now; retry after `retry_after_s`."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(CoppiceError):
    """A peer is gone; a retry may help."""

    status = grpc.StatusCode.UNAVAILABLE


class UnreadError(CoppiceError):
    """A client does not take what waits for it."""

    status = grpc.StatusCode.ABORTED


class DeadlineError(CoppiceError):
    """The time for the work is over."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
