"""Comparisons that most cases are made of."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.completion import Completion
from coppice.core.log_probs import TokenLogProbs
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import DifferenceError, FailureError, RoundingError, SkippedError
from coppice.lab.conformance.requests import FORCED, varied
from coppice.v1.inference_pb2 import GenerateRequest

# A round never waits for long: on a busy machine drafts may all be late, and another attempt may fare better.
ATTEMPTS = 3


def require(holds: bool, reason: str, request: GenerateRequest | None = None) -> None:
    """Fail with a reason unless something holds."""
    if not holds:
        raise FailureError(reason, request)


def require_drafter(deployment: Deployment) -> None:
    """Skip where speculation on is the same as off."""
    if not deployment.facts.sources:
        raise SkippedError("no drafter is connected")


def require_context(deployment: Deployment, tokens: int) -> None:
    """Skip where the context is too short."""
    if deployment.facts.max_context_tokens < tokens:
        raise SkippedError(f"needs a context of {tokens} tokens, the model has {deployment.facts.max_context_tokens}")


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
        answer = await deployment.ask(request)
        same_answer(await deployment.plain(request), answer, request)
        drafted += answer.speculation.draft_tokens
    return drafted > 0
