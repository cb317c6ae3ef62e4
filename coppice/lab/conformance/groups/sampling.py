"""The meaning of temperature and truncation: values that must be equivalent, and draws whose odds are known."""

from __future__ import annotations

import math
from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, require
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.measure import gap, next_token, stranger
from coppice.lab.conformance.requests import FORCED, build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("sampling")

TOKENS = 24
# Chance that the rarer of two tokens, of 0.35 or more, is drawn by none of these seeds: below one in a million.
SEEDS = range(36)

NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}


async def as_greedy(deployment: Deployment, **knobs: Any) -> None:
    for request in deployment.requests(max_tokens=TOKENS):
        expected = await deployment.plain(request)
        await ask_same(deployment, varied(request, seed=5, mode=FORCED, **knobs), expected)


GROUP.add("top-k-1-is-greedy", as_greedy, temperature=1.0, top_k=1)
GROUP.add("tiny-top-p-is-greedy", as_greedy, temperature=1.0, top_p=1e-6)
GROUP.add("min-p-1-is-greedy", as_greedy, temperature=1.0, min_p=1.0)
GROUP.add("tiny-temperature-is-greedy", as_greedy, temperature=1e-6)


@GROUP.case("neutral-values-change-nothing")
async def neutral(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=6)
    expected = await deployment.plain(request)
    for name, value in NEUTRAL.items():
        await ask_same(deployment, varied(request, **{name: value}), expected)


@GROUP.case("top-k-of-the-whole-vocabulary-changes-nothing")
async def whole_vocabulary(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=6)
    wide = varied(request, top_k=deployment.info.vocab_size)
    await ask_same(deployment, wide, await deployment.plain(request))


@GROUP.case("top-k-keeps-the-k-likeliest")
async def likeliest(deployment: Deployment) -> None:
    """They are found by banning the likelier ones; draws so hot that they hardly prefer any stay among them."""
    request = build(deployment.prompts[0])
    kept: list[int] = []
    for _ in range(3):
        kept.append(await next_token(deployment, varied(request, bad_token_ids=kept)))
    hot = varied(request, temperature=100.0, top_k=3)
    drawn = {await next_token(deployment, varied(hot, seed=seed)) for seed in SEEDS}
    require(drawn <= set(kept), f"drew {sorted(drawn - set(kept))}, the likeliest are {kept}", hot)
    require(len(drawn) > 1, f"{len(SEEDS)} seeds drew token {drawn} alone", hot)


async def pair(deployment: Deployment, ratio: float) -> tuple[GenerateRequest, int]:
    """A request that draws one of two tokens at temperature 1, the second `ratio` times as likely as the first."""
    request = build(deployment.prompts[0])
    token = await next_token(deployment, request)
    rival = stranger(deployment, [token])
    bias = await gap(deployment, request, token, rival) + math.log(ratio)
    return varied(request, temperature=1.0, allowed_token_ids=[token, rival], logit_bias={rival: bias}), token


async def draws(deployment: Deployment, request: GenerateRequest) -> set[int]:
    """The tokens that some seeds draw next."""
    return {await next_token(deployment, varied(request, seed=seed)) for seed in SEEDS}


async def keeps_one_then_both(deployment: Deployment, one: GenerateRequest, both: GenerateRequest, token: int) -> None:
    drawn = await draws(deployment, one)
    require(drawn == {token}, f"drew {sorted(drawn)}, though {token} alone is likely enough", one)
    drawn = await draws(deployment, both)
    require(len(drawn) == 2, f"{len(SEEDS)} seeds drew {sorted(drawn)} alone, though both are likely enough", both)


@GROUP.case("top-p-keeps-what-reaches-the-sum")
async def nucleus(deployment: Deployment) -> None:
    request, token = await pair(deployment, 2 / 3)  # 0.6 and 0.4
    await keeps_one_then_both(deployment, varied(request, top_p=0.55), varied(request, top_p=0.65), token)


@GROUP.case("min-p-keeps-what-is-near-the-likeliest")
async def near_the_likeliest(deployment: Deployment) -> None:
    request, token = await pair(deployment, 2 / 3)
    await keeps_one_then_both(deployment, varied(request, min_p=0.75), varied(request, min_p=0.6), token)


@GROUP.case("temperature-comes-before-truncation")
async def order(deployment: Deployment) -> None:
    """A ratio of 1/9 is one of 1/3 at temperature 2 and of 0.58 at temperature 4."""
    request, token = await pair(deployment, 1 / 9)
    one = varied(request, temperature=2.0, min_p=0.5)
    await keeps_one_then_both(deployment, one, varied(one, temperature=4.0), token)
