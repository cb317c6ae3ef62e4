"""Greedy outputs against plain transformers, where the checkpoint is at hand (`--reference`)."""

from __future__ import annotations

import asyncio

from conformance.case import Group
from conformance.checks import require, same_answer, same_tokens
from conformance.deployment import OPENINGS, Deployment
from conformance.errors import SkippedError
from conformance.reference import ReferenceModel
from conformance.requests import FORCED, build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("reference")

TOKENS = 48


def model_of(deployment: Deployment) -> ReferenceModel:
    if deployment.reference is None:
        raise SkippedError("no --reference is given")
    model = deployment.reference
    reason = "--reference has another tokenizer than the deployment"
    require(model.tokenizer_fingerprint == deployment.facts.tokenizer_fingerprint, reason)
    return model


def longest(deployment: Deployment) -> int:
    return min(TOKENS, deployment.facts.max_context_tokens // 2)


async def compare(deployment: Deployment, request: GenerateRequest, expected: list[int]) -> None:
    plain = await deployment.plain(request)
    same_tokens(expected, plain.token_ids, request)
    request = varied(request, mode=FORCED)
    same_answer(plain, await deployment.ask(request), request)


@GROUP.case("token-ids-at-temperature-0")
async def token_ids(deployment: Deployment) -> None:
    model = model_of(deployment)
    for prompt in deployment.facts.prompts:
        request = build(prompt, max_tokens=longest(deployment), ignore_eos=True)
        await compare(deployment, request, await asyncio.to_thread(model.greedy, prompt, longest(deployment)))


@GROUP.case("text-at-temperature-0")
async def text(deployment: Deployment) -> None:
    """The text's own tokens, with those that the tokenizer adds."""
    model = model_of(deployment)
    for opening in OPENINGS:
        prompt = model.encode(opening)
        request = build(opening, max_tokens=longest(deployment), ignore_eos=True)
        await compare(deployment, request, await asyncio.to_thread(model.greedy, prompt, longest(deployment)))


@GROUP.case("repetition-penalty-at-temperature-0")
async def repetition(deployment: Deployment) -> None:
    model = model_of(deployment)
    for prompt in deployment.facts.prompts:
        request = build(prompt, max_tokens=longest(deployment), ignore_eos=True, repetition_penalty=1.3)
        expected = await asyncio.to_thread(model.greedy, prompt, longest(deployment), 1.3)
        await compare(deployment, request, expected)
