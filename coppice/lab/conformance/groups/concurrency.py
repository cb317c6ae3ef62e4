"""Many requests at once: each gets the answer that it gets alone."""

from __future__ import annotations

from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import each_as_alone, require_context
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import FORCED, OFF, build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("concurrency")

TOKENS = 24
MANY = 16
MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 10, "min_p": 0.02},
    {"temperature": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.2, "max_tokens": 7},
    {"temperature": 1.0, "max_tokens": 31},
    {"temperature": 0.5, "max_nodes": 3},
)


def mixed(deployment: Deployment, count: int) -> list[GenerateRequest]:
    requests = deployment.requests(max_tokens=TOKENS)
    return [
        varied(
            requests[number % len(requests)],
            **{"seed": number, "mode": OFF if number % 3 == 2 else FORCED, **MIXED[number % len(MIXED)]},
        )
        for number in range(count)
    ]


@GROUP.case("16-mixed-requests-are-each-as-alone")
async def mixed_requests(deployment: Deployment) -> None:
    await each_as_alone(deployment, mixed(deployment, MANY))


@GROUP.case("16-equal-requests-have-one-answer")
async def equal_requests(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=71, mode=FORCED)
    await each_as_alone(deployment, [request] * MANY)


@GROUP.case("16-seeds-of-one-prompt-are-each-as-alone")
async def many_seeds(deployment: Deployment) -> None:
    request = deployment.requests(max_tokens=TOKENS, temperature=1.0, mode=FORCED)[1]
    await each_as_alone(deployment, [varied(request, seed=seed) for seed in range(MANY)])


@GROUP.case("long-prompts-leave-short-ones-undisturbed")
async def long_and_short(deployment: Deployment) -> None:
    """Prompts that are read while others decode share their passes."""
    length = min(512, deployment.info.max_context_tokens - 2 * TOKENS)
    require_context(deployment, 4 * TOKENS)
    tokens = [token for prompt in deployment.prompts for token in prompt]
    long_prompts = [(tokens[start:] * length)[:length] for start in (0, 1)]
    requests = [build(prompt, max_tokens=8, ignore_eos=True, mode=FORCED) for prompt in long_prompts]
    await each_as_alone(deployment, [*mixed(deployment, 6), *requests])


@GROUP.case("stops-and-limits-in-company")
async def ends(deployment: Deployment) -> None:
    """Requests that end at different places leave the passes one by one."""
    request = deployment.requests(temperature=1.0, seed=72, mode=FORCED)[2]
    whole = await deployment.plain(varied(request, max_tokens=TOKENS))
    by_length = [varied(request, max_tokens=length) for length in range(1, 9)]
    by_token = [varied(request, max_tokens=TOKENS, stop_token_ids=[token]) for token in whole.token_ids[8:14]]
    await each_as_alone(deployment, [*by_length, *by_token])
