"""Interrupted outputs: what follows is what would have followed, without a lost or a repeated token."""

from __future__ import annotations

from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, ask_tokens, require, same_tokens
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.lab.conformance.slow_scan import INCOMPLETE, cut_at_strings, known_sampled

GROUP = Group("resume")

TOKENS = 16


async def from_every_split(deployment: Deployment, **knobs: Any) -> None:
    request = deployment.request(**{"max_tokens": TOKENS, "seed": 41, **knobs})
    whole = await deployment.plain(request)
    # The last time nothing follows but the end.
    for split in range(1, len(whole.token_ids) + 1):
        request = varied(request, resume_token_ids=whole.token_ids[:split], mode=(OFF, FORCED)[split % 2])
        rest = await ask_tokens(deployment, request, whole.token_ids[split:])
        require(whole.text.endswith(rest.text), f"{rest.text!r} is no end of {whole.text!r}", request)
        reason = f"the output ended with {rest.finish_reason}, not {whole.finish_reason}"
        require(rest.finish_reason == whole.finish_reason, reason, request)


GROUP.add("from-every-split-at-temperature-0", from_every_split, temperature=0.0)
GROUP.add("from-every-split-at-temperature-1", from_every_split, temperature=1.0)


@GROUP.case("from-every-split-with-penalties")
async def penalised(deployment: Deployment) -> None:
    """Penalties look at the resumed tokens as at any output, which has to repeat some of so few tokens."""
    few = sorted(set(deployment.prompts[0]))[:6]
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    await from_every_split(deployment, temperature=1.0, allowed_token_ids=few, **penalties)


@GROUP.case("from-every-split-before-min-tokens")
async def held_off(deployment: Deployment) -> None:
    """Resumed tokens count towards min_tokens: the stop token, which nothing else holds off, comes right after them."""
    (token, *_) = deployment.prompts[1]
    await from_every_split(deployment, min_tokens=8, stop_token_ids=[token], logit_bias={token: 100.0})


@GROUP.case("text-is-neither-lost-nor-repeated")
async def text(deployment: Deployment) -> None:
    output = await known_sampled(deployment, TOKENS)
    for split in range(1, TOKENS):
        request = varied(output.request, max_tokens=TOKENS, resume_token_ids=output.token_ids[:split], mode=FORCED)
        rest = await ask_tokens(deployment, request, output.token_ids[split:])
        # What was held back of a character is the rest's to show.
        before = output.texts[split].rstrip(INCOMPLETE)
        reason = f"{before!r} and {rest.text!r} are not {output.text!r}"
        require(before + rest.text == output.text or INCOMPLETE in output.text, reason, request)


@GROUP.case("a-stop-string-that-began-before-the-split")
async def stop_string(deployment: Deployment) -> None:
    output = await known_sampled(deployment, TOKENS)
    pieces = output.windows(6)[len(output.text) // 3 :]
    cut = cut_at_strings(output, pieces[:1]) if pieces else None
    if cut is None or cut.num_tokens < 2:
        raise SkippedError("the known output has too little text that is complete")
    for split in range(1, cut.num_tokens):
        request = varied(output.request, max_tokens=TOKENS, stop_strings=[cut.match], mode=FORCED)
        request = varied(request, resume_token_ids=output.token_ids[:split])
        rest = await ask_tokens(deployment, request, output.token_ids[split : cut.num_tokens])
        got = (rest.finish_reason, rest.stop_match)
        require(got == ("stop", cut.match), f"the output ended with {got}", request)
        require(cut.text.endswith(rest.text), f"{rest.text!r} is no end of {cut.text!r}", request)


@GROUP.case("what-had-ended-only-ends")
async def ended(deployment: Deployment) -> None:
    """Resumed after its stop token, an output has nothing to add."""
    request = deployment.request(max_tokens=TOKENS)
    whole = await deployment.plain(request)
    token = whole.token_ids[-1]
    stopped = whole.token_ids[: whole.token_ids.index(token) + 1]
    request = varied(request, max_tokens=TOKENS + 1, stop_token_ids=[token], resume_token_ids=stopped)
    rest = await deployment.ask(request)
    got = (rest.token_ids, rest.text, rest.finish_reason)
    require(got == ((), "", "stop"), f"the rest is {got}", request)


@GROUP.case("a-cancelled-stream-goes-on-where-it-was")
async def cancelled(deployment: Deployment) -> None:
    request = deployment.requests(max_tokens=32, temperature=1.0, seed=42, mode=FORCED)[2]
    whole = await deployment.plain(request)
    for cut in (1, 9, 20):
        tokens, text = await deployment.leave(request, cut)
        resumed = varied(request, resume_token_ids=tokens)
        if len(tokens) == len(whole.token_ids):
            continue
        rest = await deployment.ask(resumed)
        # The call that was left counts nothing; the whole has drawn the same tokens.
        near_ties = whole.speculation.near_ties
        same_tokens(whole.token_ids, (*tokens, *rest.token_ids), resumed, near_ties)
        require(text + rest.text == whole.text, f"{text!r} and {rest.text!r} are not {whole.text!r}", resumed)


@GROUP.case("resumed-twice")
async def twice(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=24, temperature=1.0, seed=43)
    whole = await deployment.plain(request)
    tokens: tuple[int, ...] = ()
    near_ties = 0
    for length in (8, 16, 24):
        request = varied(request, max_tokens=length, resume_token_ids=tokens, mode=FORCED)
        answer = await deployment.ask(request)
        tokens += answer.token_ids
        near_ties += answer.speculation.near_ties
    same_tokens(whole.token_ids, tokens, request, near_ties)


@GROUP.case("resuming-nothing-changes-nothing")
async def nothing(deployment: Deployment) -> None:
    request = deployment.request(max_tokens=TOKENS, temperature=1.0, seed=44)
    await ask_same(deployment, varied(request, resume_token_ids=[]), await deployment.plain(request))
