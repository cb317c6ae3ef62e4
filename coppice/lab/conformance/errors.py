"""The ways in which a case ends other than well."""

from __future__ import annotations

from coppice.core.errors import CoppiceError
from coppice.v1.inference_pb2 import GenerateRequest


class FailureError(Exception):
    """The deployment breaks a promise; `request` shows it."""

    def __init__(self, reason: str, request: GenerateRequest | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.request = request


class DifferenceError(FailureError):
    """Two answers that must be equal are not. In fast mode, near-ties that the answer counts explain it."""

    def __init__(self, reason: str, request: GenerateRequest, near_ties: int) -> None:
        super().__init__(reason, request)
        self.near_ties = near_ties


class NearTieError(FailureError):
    """Another token than the reference's, where the reference itself has both so near that rounding decides."""


class RoundingError(FailureError):
    """Numbers that must be the same bits are not. Fast mode does not promise it, so that there it proves nothing."""


class SkippedError(Exception):
    """This deployment cannot run the case; the message says why."""


class UnsuitableError(CoppiceError):
    """The suite can say nothing about this deployment."""
