"""Greedy decoding: one answer, whatever is guessed."""

from __future__ import annotations

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, same_with_and_without_speculation
from coppice.lab.conformance.deployment import OPENINGS, Deployment
from coppice.lab.conformance.requests import build, varied

GROUP = Group("greedy")

TOKENS = 32
LONG = 128


@GROUP.case("same-request-same-answer")
async def same_request(deployment: Deployment) -> None:
    for request in deployment.requests(max_tokens=TOKENS):
        await ask_same(deployment, request, await deployment.ask(request))


@GROUP.case("with-and-without-speculation")
async def speculation(deployment: Deployment) -> None:
    await same_with_and_without_speculation(deployment, deployment.requests(max_tokens=TOKENS))


@GROUP.case("long-output-with-and-without-speculation")
async def long_output(deployment: Deployment) -> None:
    room = deployment.info.max_context_tokens - len(deployment.prompts[0])
    await same_with_and_without_speculation(deployment, [deployment.request(max_tokens=min(LONG, room))])


@GROUP.case("text-prompts-with-and-without-speculation")
async def text_prompts(deployment: Deployment) -> None:
    requests = [build(opening, max_tokens=TOKENS, ignore_eos=True) for opening in OPENINGS]
    await same_with_and_without_speculation(deployment, requests)


@GROUP.case("until-the-model-ends-with-and-without-speculation")
async def own_end(deployment: Deployment) -> None:
    requests = [build(prompt, max_tokens=TOKENS) for prompt in deployment.prompts]
    await same_with_and_without_speculation(deployment, requests)


@GROUP.case("is-the-default")
async def default(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS)
    await ask_same(deployment, varied(request, temperature=0.0), await deployment.plain(request))


@GROUP.case("does-not-depend-on-the-seed")
async def any_seed(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS)
    expected = await deployment.plain(request)
    for seed in (0, 1, 2**64 - 1):
        await ask_same(deployment, varied(request, seed=seed), expected)
