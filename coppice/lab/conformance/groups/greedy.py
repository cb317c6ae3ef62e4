"""Greedy decoding: one answer, whatever is guessed beside it."""

from __future__ import annotations

from coppice.lab.conformance.case import Group
from coppice.lab.conformance.checks import same_answer, same_with_and_without_speculation
from coppice.lab.conformance.deployment import OPENINGS, Deployment
from coppice.lab.conformance.requests import build, varied

GROUP = Group("greedy")

TOKENS = 32
LONG = 128


@GROUP.case("same-request-same-answer")
async def same_request(deployment: Deployment) -> None:
    for prompt in deployment.facts.prompts:
        request = build(prompt, max_tokens=TOKENS, ignore_eos=True)
        same_answer(await deployment.ask(request), await deployment.ask(request), request)


@GROUP.case("with-and-without-speculation")
async def speculation(deployment: Deployment) -> None:
    requests = [build(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in deployment.facts.prompts]
    await same_with_and_without_speculation(deployment, requests)


@GROUP.case("long-output-with-and-without-speculation")
async def long_output(deployment: Deployment) -> None:
    prompt = deployment.facts.prompts[0]
    room = deployment.facts.max_context_tokens - len(prompt)
    await same_with_and_without_speculation(deployment, [build(prompt, max_tokens=min(LONG, room), ignore_eos=True)])


@GROUP.case("text-prompts-with-and-without-speculation")
async def text_prompts(deployment: Deployment) -> None:
    requests = [build(opening, max_tokens=TOKENS, ignore_eos=True) for opening in OPENINGS]
    await same_with_and_without_speculation(deployment, requests)


@GROUP.case("until-the-model-ends-with-and-without-speculation")
async def own_end(deployment: Deployment) -> None:
    requests = [build(prompt, max_tokens=TOKENS) for prompt in deployment.facts.prompts]
    await same_with_and_without_speculation(deployment, requests)


@GROUP.case("is-the-default")
async def default(deployment: Deployment) -> None:
    request = build(deployment.facts.prompts[0], max_tokens=TOKENS, ignore_eos=True)
    explicit = varied(request, temperature=0.0)
    same_answer(await deployment.plain(request), await deployment.ask(explicit), explicit)


@GROUP.case("does-not-depend-on-the-seed")
async def any_seed(deployment: Deployment) -> None:
    request = build(deployment.facts.prompts[0], max_tokens=TOKENS, ignore_eos=True)
    expected = await deployment.plain(request)
    for seed in (0, 1, 2**64 - 1):
        seeded = varied(request, seed=seed)
        same_answer(expected, await deployment.ask(seeded), seeded)
