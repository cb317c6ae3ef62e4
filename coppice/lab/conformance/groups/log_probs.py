"""Log-probabilities: of the target's raw logits, one for every token, the same bits whichever drafter is used."""

from __future__ import annotations

import math
from typing import Any

from coppice.completion import Completion
from coppice.core.log_probs import TokenLogProbs
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import (
    ask_tokens,
    each_as_alone,
    require,
    same_log_probs,
    same_tokens,
    same_with_and_without_speculation,
)
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import RoundingError
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest, ResponseOptions

GROUP = Group("log-probs")

TOKENS = 24
MODES = (FORCED, OFF)
# The most that may be asked for.
MOST = 20
NUMBERS = (0, 1, 5, MOST)
# Each of the likeliest is rounded to single precision.
SUM_TOLERANCE = 1e-5


def requests(deployment: Deployment, number: int) -> list[GenerateRequest]:
    return [
        varied(request, temperature=temperature)
        for request in deployment.requests(max_tokens=TOKENS, seed=101, top_log_probs=number)
        for temperature in (0.0, 1.0)
    ]


def width(deployment: Deployment, number: int) -> int:
    """Likeliest tokens that there are, of so many that are asked for."""
    return min(number, deployment.info.vocab_size)


@GROUP.case("with-and-without-speculation")
async def on_and_off(deployment: Deployment) -> None:
    await same_with_and_without_speculation(deployment, requests(deployment, 5))


@GROUP.case("asking-for-them-changes-no-token")
async def asking(deployment: Deployment) -> None:
    for request in requests(deployment, 3):
        silent = varied(request)
        silent.response.ClearField("top_log_probs")
        expected = await deployment.plain(silent)
        require(not expected.log_probs, "log-probabilities came that were not wanted", silent)
        for mode in MODES:
            await ask_tokens(deployment, varied(request, mode=mode), expected.token_ids)


@GROUP.case("every-token-has-its-own-in-its-message")
async def one_each(deployment: Deployment) -> None:
    for number in NUMBERS:
        for request in requests(deployment, number)[:2]:
            request = varied(request, mode=FORCED)
            for message in await deployment.messages(request):
                got = (len(message.log_probs), len(message.token_ids))
                require(got[0] == got[1], f"a message has {got[0]} of them for {got[1]} tokens", request)
                for one in message.log_probs:
                    sizes = (len(one.top_token_ids), len(one.top_log_probs))
                    wanted = width(deployment, number)
                    require(sizes == (wanted, wanted), f"{sizes} likeliest tokens, not {wanted}", request)


@GROUP.case("fewer-are-the-first-of-more")
async def fewer(deployment: Deployment) -> None:
    for most in requests(deployment, MOST)[:2]:
        whole = (await deployment.plain(most)).log_probs
        for number in NUMBERS:
            request = varied(most, top_log_probs=number, mode=FORCED)
            first = [
                TokenLogProbs(one.log_prob, one.top_token_ids[:number], one.top_log_probs[:number]) for one in whole
            ]
            same_log_probs(first, (await deployment.ask(request)).log_probs, request)


@GROUP.case("the-likeliest-is-drawn-at-temperature-0")
async def greedy(deployment: Deployment) -> None:
    for request in deployment.requests(max_tokens=TOKENS, top_log_probs=1, mode=FORCED):
        answer = await deployment.ask(request)
        for token, one in zip(answer.token_ids, answer.log_probs, strict=True):
            got = (*one.top_token_ids, *one.top_log_probs)
            require(got == (token, one.log_prob), f"drew {token} at {one.log_prob}, the likeliest is {got}", request)


def inconsistency(token: int, one: TokenLogProbs) -> str:
    """What is wrong with the log-probabilities of a token; empty where nothing is."""
    top = dict(zip(one.top_token_ids, one.top_log_probs, strict=True))
    ranked = sorted(top.items(), key=lambda item: (-item[1], item[0]))
    if len(top) != len(one.top_token_ids) or ranked != list(top.items()):
        return "they are not in order, likeliest first and of equal ones the lower id"
    if max(top.values()) > 0 or math.fsum(map(math.exp, top.values())) > 1 + SUM_TOLERANCE:
        return "their probabilities are more than 1 together"
    if token in top and top[token] != one.log_prob:
        return f"token {token} has {one.log_prob} and {top[token]}"
    if token not in top and one.log_prob > min(top.values()):
        return f"token {token} at {one.log_prob} is likelier than the last of them"
    return ""


@GROUP.case("they-fit-together")
async def consistent(deployment: Deployment) -> None:
    for request in requests(deployment, MOST):
        request = varied(request, mode=FORCED)
        answer = await deployment.ask(request)
        for index, (token, one) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
            reason = inconsistency(token, one)
            require(not reason, f"at token {index}, {reason}: {one}", request)


def processed(likeliest: int) -> tuple[dict[str, Any], ...]:
    """What changes the draw of a token, and not what the target thought of it."""
    return (
        {"temperature": 1.7, "seed": 102},
        {"temperature": 1.0, "seed": 103, "top_k": 1},
        {"logit_bias": {likeliest: -100.0}},
        {"bad_token_ids": [likeliest]},
        {"repetition_penalty": 1.9},
        {"allowed_token_ids": [likeliest]},
    )


@GROUP.case("they-are-those-of-raw-logits")
async def raw(deployment: Deployment) -> None:
    for request in deployment.requests(max_tokens=1, top_log_probs=MOST, mode=OFF):
        [expected] = (await deployment.plain(request)).log_probs
        for knobs in processed(expected.top_token_ids[0]):
            asked = varied(request, **knobs)
            [one] = (await deployment.ask(asked)).log_probs
            if (one.top_token_ids, one.top_log_probs) != (expected.top_token_ids, expected.top_log_probs):
                raise RoundingError(f"the likeliest are {one}, not {expected}", asked)


async def beginning(deployment: Deployment, whole: Completion, request: GenerateRequest) -> None:
    """Fail unless an output that ends early has the log-probabilities of the whole one up to there."""
    answer = await deployment.ask(request)
    require(0 < len(answer.token_ids) < TOKENS, f"the output has {len(answer.token_ids)} tokens", request)
    same_tokens(whole.token_ids[: len(answer.token_ids)], answer.token_ids, request, answer.speculation.near_ties)
    same_log_probs(whole.log_probs[: len(answer.token_ids)], answer.log_probs, request)


@GROUP.case("up-to-a-limit-and-a-stop-token-they-are-those-of-the-whole")
async def stopped(deployment: Deployment) -> None:
    for request in requests(deployment, 2):
        whole = await deployment.plain(request)
        for end in ({"max_tokens": 7}, {"stop_token_ids": whole.token_ids[TOKENS // 2 : TOKENS // 2 + 1]}):
            await beginning(deployment, whole, varied(request, mode=FORCED, **end))


@GROUP.case("a-resumed-output-has-those-of-its-own-tokens")
async def resumed(deployment: Deployment) -> None:
    """What was decoded token by token is a part of the prompt then."""
    for request in requests(deployment, 2)[:2]:
        whole = await deployment.plain(request)
        for split in (1, TOKENS // 2, TOKENS - 1):
            rest = varied(request, resume_token_ids=whole.token_ids[:split], mode=FORCED)
            same_log_probs(whole.log_probs[split:], (await deployment.ask(rest)).log_probs, rest)


@GROUP.case("they-come-without-token-ids-and-text")
async def bare(deployment: Deployment) -> None:
    for request in requests(deployment, 2)[:2]:
        whole = await deployment.plain(request)
        request = varied(request, response=ResponseOptions(text=False, token_ids=False, top_log_probs=2))
        answer = await deployment.ask(request)
        require((answer.token_ids, answer.text) == ((), ""), "tokens or text came that were not wanted", request)
        same_log_probs(whole.log_probs, answer.log_probs, request)


@GROUP.case("in-company-they-are-as-alone")
async def in_company(deployment: Deployment) -> None:
    """Together with requests that ask for none, or for another number."""
    asking = [varied(request, mode=FORCED) for number in (0, 3) for request in requests(deployment, number)]
    silent = [varied(request) for request in asking[:4]]
    for request in silent:
        request.response.ClearField("top_log_probs")
    await each_as_alone(deployment, [*asking, *silent])
