"""Tokens that are forced, banned or allowed."""

from __future__ import annotations

import random

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, require
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import FORCED, OFF, varied

GROUP = Group("tokens")

TOKENS = 16
TEMPERATURES = (0.0, 1.0)
MODES = (FORCED, OFF)
MAX_LISTED = 64


def strangers(deployment: Deployment, count: int) -> list[int]:
    """Some ids from all over the vocabulary, the same each time."""
    ids = [token for token in range(deployment.info.vocab_size) if token not in deployment.info.eos_token_ids]
    return sorted(random.Random(0).sample(ids, min(count, len(ids))))


@GROUP.case("a-bias-of-100-forces-a-token")
async def forced(deployment: Deployment) -> None:
    for token in strangers(deployment, 3):
        for temperature in TEMPERATURES:
            knobs = {"seed": 1, "mode": FORCED, "temperature": temperature, "logit_bias": {token: 100.0}}
            request = deployment.request(max_tokens=6, **knobs)
            answer = await deployment.ask(request)
            require(answer.token_ids == (token,) * 6, f"the output is {answer.token_ids}", request)


@GROUP.case("a-bias-of-minus-100-bans-tokens")
async def biased_away(deployment: Deployment) -> None:
    for mode in MODES:
        request = deployment.request(max_tokens=TOKENS)
        usual = (await deployment.plain(request)).token_ids
        request = varied(request, mode=mode, logit_bias=dict.fromkeys(usual, -100.0))
        drawn = set(usual) & set((await deployment.ask(request)).token_ids)
        require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("a-bias-of-0-changes-nothing")
async def unbiased(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=2)
    expected = await deployment.plain(request)
    bias = dict.fromkeys(expected.token_ids, 0.0)
    await ask_same(deployment, varied(request, mode=FORCED, logit_bias=bias), expected)


@GROUP.case("bad-token-ids-never-appear")
async def banned(deployment: Deployment) -> None:
    for temperature in TEMPERATURES:
        for mode in MODES:
            request = deployment.request(max_tokens=TOKENS, temperature=temperature, seed=3)
            usual = set((await deployment.plain(request)).token_ids)
            request = varied(request, mode=mode, bad_token_ids=sorted(usual))
            drawn = usual & set((await deployment.ask(request)).token_ids)
            require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("banning-what-is-absent-changes-nothing")
async def banned_absent(deployment: Deployment) -> None:
    for temperature in TEMPERATURES:
        request = deployment.requests(max_tokens=TOKENS, temperature=temperature, seed=4)[1]
        expected = await deployment.plain(request)
        absent = [token for token in strangers(deployment, MAX_LISTED) if token not in expected.token_ids]
        await ask_same(deployment, varied(request, mode=FORCED, bad_token_ids=absent), expected)


@GROUP.case("allowed-token-ids-alone-appear")
async def allowed(deployment: Deployment) -> None:
    ids = strangers(deployment, 5)
    for temperature in TEMPERATURES:
        for mode in MODES:
            request = deployment.request(max_tokens=TOKENS, temperature=temperature, seed=5, mode=mode)
            request = varied(request, allowed_token_ids=ids)
            drawn = set((await deployment.ask(request)).token_ids) - set(ids)
            require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("one-allowed-token-is-drawn-always")
async def allowed_alone(deployment: Deployment) -> None:
    for token in strangers(deployment, 3):
        knobs = {"temperature": 1.0, "seed": 6, "mode": FORCED, "allowed_token_ids": [token]}
        request = deployment.request(max_tokens=6, **knobs)
        answer = await deployment.ask(request)
        require(answer.token_ids == (token,) * 6, f"the output is {answer.token_ids}", request)


@GROUP.case("allowing-what-appears-changes-nothing")
async def allowed_present(deployment: Deployment) -> None:
    for temperature in TEMPERATURES:
        request = deployment.requests(max_tokens=TOKENS, temperature=temperature, seed=7)[1]
        expected = await deployment.plain(request)
        drawn = sorted(set(expected.token_ids))
        await ask_same(deployment, varied(request, mode=FORCED, allowed_token_ids=drawn), expected)


@GROUP.case("a-bad-token-is-banned-though-it-is-allowed")
async def banned_and_allowed(deployment: Deployment) -> None:
    kept, banned_token = strangers(deployment, 2)
    request = deployment.request(max_tokens=6, logit_bias={banned_token: 100.0})
    request = varied(request, allowed_token_ids=[kept, banned_token], bad_token_ids=[banned_token])
    answer = await deployment.ask(request)
    require(answer.token_ids == (kept,) * 6, f"the output is {answer.token_ids}", request)
