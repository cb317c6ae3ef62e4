"""The ways in which a case ends other than well."""

from __future__ import annotations

from coppice.v1.inference_pb2 import GenerateRequest


class FailureError(Exception):
    """The deployment breaks a promise; `request` shows it."""

    def __init__(self, reason: str, request: GenerateRequest | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.request = request


class DifferenceError(FailureError):
    """Two answers that must be equal are not. Fast mode allows it at near-ties, so that there it proves nothing."""


class SkippedError(Exception):
    """This deployment cannot run the case; the message says why."""


class UnsuitableError(Exception):
    """The suite can say nothing about this deployment."""
