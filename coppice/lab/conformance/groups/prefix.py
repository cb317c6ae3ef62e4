"""Prompts that begin alike: what is computed once serves again, and changes no token."""

from __future__ import annotations

import uuid
from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, require, require_context, require_outputs, same_answer
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, build, varied
from coppice.v1.inference_pb2 import GenerateRequest, TokenIds

GROUP = Group("prefix")

# Some blocks of any cache.
PROMPT_TOKENS = 200
TOKENS = 16
OUTPUTS = 3


def new_salt() -> str:
    """A salt that was not used before."""
    return uuid.uuid4().hex


def require_reuse(cached: int) -> None:
    """Skip where no token of a prompt was cached that could have been."""
    if not cached:
        raise SkippedError("the deployment reports no prefix reuse")


def long_request(deployment: Deployment, **knobs: Any) -> GenerateRequest:
    """A long prompt under a new salt."""
    require_context(deployment, PROMPT_TOKENS + 2 * TOKENS)
    tokens = [token for prompt in deployment.prompts for token in prompt]
    prompt = (tokens * PROMPT_TOKENS)[:PROMPT_TOKENS]
    return build(prompt, max_tokens=TOKENS, ignore_eos=True, top_log_probs=2, cache_salt=new_salt(), **knobs)


@GROUP.case("a-prompt-that-was-read-before-gives-the-same-answer")
async def again(deployment: Deployment) -> None:
    for temperature in (0.0, 1.0):
        request = long_request(deployment, temperature=temperature, seed=51, mode=OFF)
        first = await deployment.ask(request)
        for mode in (FORCED, OFF):
            await ask_same(deployment, varied(request, mode=mode), first)


@GROUP.case("cached-tokens-are-counted")
async def counted(deployment: Deployment) -> None:
    request = long_request(deployment)
    first, second = await deployment.ask(request), await deployment.ask(request)
    cached = (first.usage.cached_prompt_tokens, second.usage.cached_prompt_tokens)
    require(cached[0] == 0, f"{cached[0]} tokens of a new prompt are said to be cached", request)
    require_reuse(cached[1])
    require(cached[1] < PROMPT_TOKENS, f"{cached[1]} of {PROMPT_TOKENS} tokens are said to be cached", request)
    same_answer(first, second, request)


@GROUP.case("a-conversation-that-goes-on-is-not-read-again")
async def conversation(deployment: Deployment) -> None:
    """An answer and the next question after a prompt: what was said is cached, and changes nothing."""
    request = long_request(deployment, temperature=1.0, seed=53, mode=FORCED)
    first = await deployment.ask(request)
    said = (*request.token_ids.ids, *first.token_ids, *deployment.prompts[0])
    longer = varied(request, token_ids=TokenIds(ids=said[: PROMPT_TOKENS + TOKENS]))
    expected = await deployment.ask(varied(longer, cache_salt=new_salt()))
    answer = await ask_same(deployment, longer, expected)
    cached = (expected.usage.cached_prompt_tokens, answer.usage.cached_prompt_tokens)
    require_reuse(cached[1])
    require(cached[0] == 0 < cached[1] < len(longer.token_ids.ids), f"{cached} tokens were cached", longer)


@GROUP.case("outputs-of-one-request-share-its-prompt")
async def several(deployment: Deployment) -> None:
    require_outputs(deployment, OUTPUTS)
    request = long_request(deployment, num_outputs=OUTPUTS, temperature=1.0, seed=54, mode=FORCED)
    outputs = await deployment.outputs(request)
    for output in outputs:
        alone = varied(request, num_outputs=1, seed=output.seed, cache_salt=new_salt())
        same_answer(await deployment.ask(alone), output, alone)
    cached = [output.usage.cached_prompt_tokens for output in outputs]
    require(cached[0] == 0, f"{cached[0]} tokens of a new prompt are said to be cached", request)
    require_reuse(sum(cached))
    require(min(cached[1:]) > 0, f"the outputs' cached tokens are {cached}", request)


@GROUP.case("another-salt-shares-nothing")
async def salts(deployment: Deployment) -> None:
    request = long_request(deployment)
    expected = await deployment.ask(request)
    apart = varied(request, cache_salt=new_salt())
    cached = (await ask_same(deployment, apart, expected)).usage.cached_prompt_tokens
    require(cached == 0, f"{cached} tokens were shared with another salt", apart)


@GROUP.case("prompts-that-part-late-have-their-own-answers")
async def parting(deployment: Deployment) -> None:
    """Each continuation of a shared beginning is what it is under a salt of its own, where nothing is shared."""
    request = long_request(deployment, temperature=1.0, seed=52, mode=FORCED)
    await deployment.ask(request)
    shared = tuple(request.token_ids.ids)[: PROMPT_TOKENS - 20]
    for prompt in deployment.prompts:
        together = varied(request, token_ids=TokenIds(ids=(*shared, *prompt)))
        alone = varied(together, cache_salt=new_salt())
        await ask_same(deployment, together, await deployment.ask(alone))
