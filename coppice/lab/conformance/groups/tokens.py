"""Tokens that are forced, banned or allowed."""

from __future__ import annotations

import random

from coppice.lab.conformance.case import Group
from coppice.lab.conformance.checks import require, same_answer
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import FORCED, OFF, build, varied

GROUP = Group("tokens")

TOKENS = 16
TEMPERATURES = (0.0, 1.0)
MODES = (FORCED, OFF)
MAX_LISTED = 64


def strangers(deployment: Deployment, count: int) -> list[int]:
    """Some ids from all over the vocabulary, the same each time."""
    ids = [token for token in range(deployment.facts.vocab_size) if token not in deployment.facts.eos_token_ids]
    return sorted(random.Random(0).sample(ids, min(count, len(ids))))


@GROUP.case("a-bias-of-100-forces-a-token")
async def forced(deployment: Deployment) -> None:
    for token in strangers(deployment, 3):
        for temperature in TEMPERATURES:
            request = build(deployment.facts.prompts[0], max_tokens=6, ignore_eos=True, seed=1, mode=FORCED)
            request = varied(request, temperature=temperature, logit_bias={token: 100.0})
            answer = await deployment.ask(request)
            require(answer.token_ids == (token,) * 6, f"the output is {answer.token_ids}", request)


@GROUP.case("a-bias-of-minus-100-bans-tokens")
async def biased_away(deployment: Deployment) -> None:
    for mode in MODES:
        request = build(deployment.facts.prompts[0], max_tokens=TOKENS, ignore_eos=True)
        usual = (await deployment.plain(request)).token_ids
        request = varied(request, mode=mode, logit_bias=dict.fromkeys(usual, -100.0))
        drawn = set(usual) & set((await deployment.ask(request)).token_ids)
        require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("a-bias-of-0-changes-nothing")
async def unbiased(deployment: Deployment) -> None:
    request = build(deployment.facts.prompts[0], max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=2)
    expected = await deployment.plain(request)
    request = varied(request, mode=FORCED, logit_bias=dict.fromkeys(expected.token_ids, 0.0))
    same_answer(expected, await deployment.ask(request), request)


@GROUP.case("bad-token-ids-never-appear")
async def banned(deployment: Deployment) -> None:
    for temperature in TEMPERATURES:
        for mode in MODES:
            request = build(deployment.facts.prompts[0], max_tokens=TOKENS, ignore_eos=True, seed=3)
            request = varied(request, temperature=temperature)
            usual = set((await deployment.plain(request)).token_ids)
            request = varied(request, mode=mode, bad_token_ids=sorted(usual))
            drawn = usual & set((await deployment.ask(request)).token_ids)
            require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("banning-what-is-absent-changes-nothing")
async def banned_absent(deployment: Deployment) -> None:
    for temperature in TEMPERATURES:
        request = build(deployment.facts.prompts[1], max_tokens=TOKENS, ignore_eos=True, seed=4)
        request = varied(request, temperature=temperature)
        expected = await deployment.plain(request)
        absent = [token for token in strangers(deployment, MAX_LISTED) if token not in expected.token_ids]
        request = varied(request, mode=FORCED, bad_token_ids=absent)
        same_answer(expected, await deployment.ask(request), request)


@GROUP.case("allowed-token-ids-alone-appear")
async def allowed(deployment: Deployment) -> None:
    ids = strangers(deployment, 5)
    for temperature in TEMPERATURES:
        for mode in MODES:
            request = build(deployment.facts.prompts[0], max_tokens=TOKENS, ignore_eos=True, seed=5, mode=mode)
            request = varied(request, temperature=temperature, allowed_token_ids=ids)
            drawn = set((await deployment.ask(request)).token_ids) - set(ids)
            require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("one-allowed-token-is-drawn-always")
async def allowed_alone(deployment: Deployment) -> None:
    for token in strangers(deployment, 3):
        request = build(deployment.facts.prompts[0], max_tokens=6, ignore_eos=True, temperature=1.0, seed=6)
        request = varied(request, mode=FORCED, allowed_token_ids=[token])
        answer = await deployment.ask(request)
        require(answer.token_ids == (token,) * 6, f"the output is {answer.token_ids}", request)


@GROUP.case("allowing-what-appears-changes-nothing")
async def allowed_present(deployment: Deployment) -> None:
    for temperature in TEMPERATURES:
        request = build(deployment.facts.prompts[1], max_tokens=TOKENS, ignore_eos=True, seed=7)
        request = varied(request, temperature=temperature)
        expected = await deployment.plain(request)
        request = varied(request, mode=FORCED, allowed_token_ids=sorted(set(expected.token_ids)))
        same_answer(expected, await deployment.ask(request), request)


@GROUP.case("a-bad-token-is-banned-though-it-is-allowed")
async def banned_and_allowed(deployment: Deployment) -> None:
    kept, banned_token = strangers(deployment, 2)
    request = build(deployment.facts.prompts[0], max_tokens=6, ignore_eos=True, logit_bias={banned_token: 100.0})
    request = varied(request, allowed_token_ids=[kept, banned_token], bad_token_ids=[banned_token])
    answer = await deployment.ask(request)
    require(answer.token_ids == (kept,) * 6, f"the output is {answer.token_ids}", request)
