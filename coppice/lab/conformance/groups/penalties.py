"""Penalties, measured: by how much they lower a logit, and for which tokens."""

from __future__ import annotations

from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import require, same_tokens
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.measure import PRECISION, gap, stranger
from coppice.lab.conformance.requests import FORCED, build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("penalties")

TOKENS = 32
TOLERANCE = 4 * PRECISION


def seen_and_not(deployment: Deployment) -> tuple[tuple[int, ...], int, int]:
    """A prompt, a token that is not in it but likely, and another one."""
    prompt = deployment.prompts[0]
    seen = stranger(deployment, prompt)
    return prompt, seen, stranger(deployment, (*prompt, seen))


async def lowered(deployment: Deployment, request: GenerateRequest, token: int, rival: int, **penalty: Any) -> float:
    """By how much a penalty lowers a token's logit against that of a rival it does not concern."""
    before = await gap(deployment, request, token, rival)
    return before - await gap(deployment, varied(request, **penalty), token, rival)


@GROUP.case("presence-is-subtracted-once")
async def presence(deployment: Deployment) -> None:
    prompt, seen, rival = seen_and_not(deployment)
    for times in (1, 3):
        request = build(prompt, resume_token_ids=[seen] * times)
        by = await lowered(deployment, request, seen, rival, presence_penalty=1.5)
        require(abs(by - 1.5) < TOLERANCE, f"1.5 lowers the logit of a token seen {times} times by {by:.2f}", request)


@GROUP.case("frequency-is-subtracted-each-time")
async def frequency(deployment: Deployment) -> None:
    prompt, seen, rival = seen_and_not(deployment)
    for times in (1, 3):
        request = build(prompt, resume_token_ids=[seen] * times)
        by = await lowered(deployment, request, seen, rival, frequency_penalty=0.75)
        wanted = 0.75 * times
        reason = f"0.75 lowers the logit of a token seen {times} times by {by:.2f}"
        require(abs(by - wanted) < TOLERANCE, reason, request)


@GROUP.case("presence-and-frequency-leave-the-prompt-alone")
async def prompt_is_free(deployment: Deployment) -> None:
    prompt, seen, rival = seen_and_not(deployment)
    request = build((*prompt, seen))
    by = await lowered(deployment, request, seen, rival, presence_penalty=2.0, frequency_penalty=2.0)
    require(abs(by) < TOLERANCE, f"the logit of a token of the prompt is lowered by {by:.2f}", request)


@GROUP.case("repetition-counts-prompt-and-output-alike")
async def repetition(deployment: Deployment) -> None:
    prompt, seen, rival = seen_and_not(deployment)
    by_prompt = await lowered(deployment, build((*prompt, seen)), seen, rival, repetition_penalty=2.0)
    request = build(prompt, resume_token_ids=[seen])
    by_output = await lowered(deployment, request, seen, rival, repetition_penalty=2.0)
    require(by_output > TOLERANCE, f"2 lowers the logit of a token of the output by {by_output:.2f}", request)
    reason = f"2 lowers a logit by {by_prompt:.2f} in the prompt and {by_output:.2f} in the output"
    require(abs(by_prompt - by_output) < TOLERANCE, reason, request)


@GROUP.case("repetition-divides-or-multiplies")
async def repetition_scales(deployment: Deployment) -> None:
    """A logit l falls by l - l/p where it is positive, by p|l| - |l| where it is negative: 2 and 4 are 2/3 or 1/3."""
    prompt, seen, rival = seen_and_not(deployment)
    request = build((*prompt, seen))
    by_2 = await lowered(deployment, request, seen, rival, repetition_penalty=2.0)
    by_4 = await lowered(deployment, request, seen, rival, repetition_penalty=4.0)
    scaled = (abs(3 * by_2 - 2 * by_4), abs(3 * by_2 - by_4))
    require(min(scaled) < 5 * TOLERANCE, f"2 lowers a logit by {by_2:.2f}, 4 by {by_4:.2f}", request)


@GROUP.case("nothing-changes-before-the-first-repeat")
async def first_repeat(deployment: Deployment) -> None:
    for request in deployment.requests(max_tokens=TOKENS):
        usual = (await deployment.plain(request)).token_ids
        repeat = next((index for index, token in enumerate(usual) if token in usual[:index]), len(usual))
        request = varied(request, mode=FORCED, presence_penalty=2.0, frequency_penalty=2.0)
        answer = await deployment.ask(request)
        same_tokens(usual[:repeat], answer.token_ids[:repeat], request, answer.speculation.near_ties)
