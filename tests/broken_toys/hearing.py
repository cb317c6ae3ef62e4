"""Deployments that do not take a request for what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice.core.errors import CoppiceError, InvalidRequestError
from coppice.v1.inference_pb2 import GenerateRequest, SpeculationPolicy
from orchestrator.api.validation import GenerationRequest
from tests.toy_deployment import ToyDeployment


def parts(request: GenerateRequest) -> Sequence[Any]:
    return (request, request.sampling, request.stopping, request.speculation)


class Deaf(ToyDeployment):
    """Does not hear one field, always or when it speculates."""

    def __init__(self, field: str, *, only_speculating: bool = False) -> None:
        super().__init__()
        self._field, self._only_speculating = field, only_speculating

    def hear(self, request: GenerateRequest) -> None:
        if self._only_speculating and request.speculation.mode == SpeculationPolicy.MODE_OFF:
            return
        [part] = [part for part in parts(request) if self._field in part.DESCRIPTOR.fields_by_name]
        part.ClearField(self._field)


class OneTokenTooMany(ToyDeployment):
    """Ends an accepted block one token behind the limit."""

    def hear(self, request: GenerateRequest) -> None:
        if request.speculation.mode != SpeculationPolicy.MODE_OFF and request.stopping.max_tokens % 4 == 3:
            request.stopping.max_tokens += 1


class RepeatsATokenAtResume(ToyDeployment):
    """Delivers the last resumed token again."""

    def hear(self, request: GenerateRequest) -> None:
        del request.resume_token_ids[-1:]


class ForgetsPenaltiesAtResume(ToyDeployment):
    """Does not see resumed tokens as output."""

    def hear(self, request: GenerateRequest) -> None:
        if request.resume_token_ids:
            request.sampling.ClearField("presence_penalty")


class BlamesTheRequest(ToyDeployment):
    """Knows that a request is wrong, and not where."""

    async def check(self, request: GenerateRequest) -> GenerationRequest:
        try:
            return await super().check(request)
        except InvalidRequestError as error:
            raise InvalidRequestError("request", str(error)) from error


class BlamesItself(ToyDeployment):
    """Answers a client's mistake with INTERNAL."""

    async def check(self, request: GenerateRequest) -> GenerationRequest:
        try:
            return await super().check(request)
        except InvalidRequestError as error:
            raise CoppiceError(str(error)) from error


class Lenient(ToyDeployment):
    """Puts wrong values right."""

    def hear(self, request: GenerateRequest) -> None:
        request.sampling.top_p = min(request.sampling.top_p or 1.0, 1.0)
