"""Comparisons that most cases are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from coppice.client import RequestFailedError
from coppice.completion import Completion
from coppice.core.log_probs import TokenLogProbs
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import DifferenceError, FailureError, RoundingError, SkippedError
from coppice.lab.conformance.requests import FORCED, varied
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse

# A round never waits for long: on a busy machine drafts may all be late, and another attempt may fare better.
ATTEMPTS = 3
# A longer request that should have been refused is not shown.
MAX_SHOWN_BYTES = 4096
# Parts of the message that ends an output.
LAST_ONLY = ("finished", "usage", "speculation", "timing")


def require(holds: bool, reason: str, request: GenerateRequest | None = None) -> None:
    """Fail with a reason unless something holds."""
    if not holds:
        raise FailureError(reason, request)


def require_drafter(deployment: Deployment) -> None:
    """Skip where speculation on is the same as off."""
    if not deployment.info.sources:
        raise SkippedError("no drafter is connected")


def require_outputs(deployment: Deployment, number: int) -> None:
    """Skip where a request may have fewer outputs."""
    most = deployment.info.max_outputs
    if most < number:
        raise SkippedError(f"a request may have {most} outputs, fewer than {number}")


def end_tokens(deployment: Deployment) -> tuple[int, ...]:
    """The model's own end tokens; skip where there is none."""
    if not deployment.info.eos_token_ids:
        raise SkippedError("the model has no end token")
    return tuple(deployment.info.eos_token_ids)


def require_context(deployment: Deployment, tokens: int) -> None:
    """Skip where the context is too short."""
    if deployment.info.max_context_tokens < tokens:
        raise SkippedError(f"needs a context of {tokens} tokens, the model has {deployment.info.max_context_tokens}")


def same_tokens(expected: Sequence[int], actual: Sequence[int], request: GenerateRequest, near_ties: int) -> None:
    """Fail at the first token that differs; the answer counts so many near-ties."""
    for index, (wanted, got) in enumerate(zip(expected, actual, strict=False)):
        if wanted != got:
            raise DifferenceError(f"token {index} is {got}, not {wanted}", request, near_ties)
    if len(expected) != len(actual):
        raise DifferenceError(f"{len(actual)} tokens, not {len(expected)}", request, near_ties)


def same(name: str, expected: object, actual: object, request: GenerateRequest, near_ties: int) -> None:
    """Fail unless a part of an answer is that of another one."""
    if expected != actual:
        raise DifferenceError(f"{name} is {actual!r}, not {expected!r}", request, near_ties)


def same_log_probs(
    expected: Sequence[TokenLogProbs], actual: Sequence[TokenLogProbs], request: GenerateRequest
) -> None:
    """Fail at the first token whose log-probabilities are not the same bits."""
    require(len(expected) == len(actual), f"{len(actual)} tokens have log-probabilities, not {len(expected)}", request)
    for index, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        if wanted != got:
            raise RoundingError(f"the log-probabilities of token {index} are {got}, not {wanted}", request)


def same_answer(expected: Completion, actual: Completion, request: GenerateRequest) -> None:
    """Fail unless tokens, log-probabilities, text and the reason of the end are the same."""
    near_ties = actual.speculation.near_ties
    same_tokens(expected.token_ids, actual.token_ids, request, near_ties)
    for name in ("text", "finish_reason", "stop_match"):
        same(name, getattr(expected, name), getattr(actual, name), request, near_ties)
    same_log_probs(expected.log_probs, actual.log_probs, request)


def counts_make_output(answer: Completion, request: GenerateRequest, name: str = "") -> None:
    """Fail unless each round commits what it accepts and one token more; the last may end before that one."""
    counts, wanted = answer.speculation, len(answer.token_ids)
    committed = counts.rounds + counts.accepted_tokens
    reason = f"{name}{counts.rounds} rounds and {counts.accepted_tokens} accepted tokens for {wanted} tokens"
    require(committed - 1 <= wanted <= committed, reason, request)


def begins_wrongly(messages: Sequence[GenerateResponse]) -> list[str]:
    """What is wrong with the messages of one output, of which the first alone has id and seed."""
    first = messages[0]
    missing = [] if first.request_id and first.HasField("seed") else ["the first message has no id or no seed"]
    later = any(message.request_id or message.HasField("seed") for message in messages[1:])
    return [*missing, *(["a later message has an id or a seed"] if later else [])]


def ends_wrongly(messages: Sequence[GenerateResponse]) -> list[str]:
    """What is wrong with the messages of one output, of which the last alone has the end and the counts."""
    missing = [f"the last message lacks {name}" for name in LAST_ONLY if not messages[-1].HasField(name)]
    early = [name for message in messages[:-1] for name in LAST_ONLY if message.HasField(name)]
    return [*missing, *(f"an earlier message has {name}" for name in early)]


async def ask_tokens(deployment: Deployment, request: GenerateRequest, expected: Sequence[int]) -> Completion:
    """The answer to a request; fail unless it has the expected tokens."""
    answer = await deployment.ask(request)
    same_tokens(expected, answer.token_ids, request, answer.speculation.near_ties)
    return answer


async def ask_same(deployment: Deployment, request: GenerateRequest, expected: Completion) -> Completion:
    """The answer to a request; fail unless it is the expected one."""
    answer = await deployment.ask(request)
    same_answer(expected, answer, request)
    return answer


async def same_with_and_without_speculation(deployment: Deployment, requests: Sequence[GenerateRequest]) -> None:
    """Fail unless each answer is that of plain decoding; skip where no draft was verified that could have spoilt it."""
    require_drafter(deployment)
    for _ in range(ATTEMPTS):
        if await _drafted_and_same(deployment, requests):
            return
    raise SkippedError("no draft came in time, so that nothing was compared")


async def _drafted_and_same(deployment: Deployment, requests: Sequence[GenerateRequest]) -> bool:
    drafted = 0
    for request in requests:
        request = varied(request, mode=FORCED)
        answer = await ask_same(deployment, request, await deployment.plain(request))
        drafted += answer.speculation.draft_tokens
    return drafted > 0


async def together(deployment: Deployment, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """The answers to requests that are sent at once.

    Raises SkippedError if the deployment has no place for so many. Raises FailureError if one of them failed.
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


async def refusal(deployment: Deployment, request: GenerateRequest) -> RequestFailedError:
    """The error that a request gets. Raises FailureError if it gets an answer."""
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
