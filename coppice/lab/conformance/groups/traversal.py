"""Traversal verification: the law of the output instead of the tokens of its seed, and everything else as ever.

Where the parameters leave one token at each place, the law has one output, and it is compared token by token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc

from coppice.completion import Completion
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import (
    ATTEMPTS,
    ask_same,
    counts_make_output,
    end_tokens,
    refusal,
    require,
    together,
)
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.law import contradiction, first_tokens
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.lab.conformance.slow_scan import known, spread
from coppice.v1.inference_pb2 import GenerateRequest
from coppice.v1.sampling_pb2 import ACCEPTANCE_RULE_TRAVERSAL, Grammar

TOKENS = 24
# Of a known output, which stops and splits are tried at.
LENGTH = 16
MAX_PIECES = 8
# Tokens whose law is compared. A prompt's round waits for no draft, and the last place needs none: so a draft of two
# tokens may be verified in between.
FIRST = 3
BATCH = 16
BATCHES = 24
TOO_SURE = 0.95


async def require_rule(deployment: Deployment) -> None:
    """Skip where the rule is not offered."""
    if ACCEPTANCE_RULE_TRAVERSAL not in deployment.info.acceptance_rules:
        raise SkippedError("GetModelInfo does not offer the acceptance rule TRAVERSAL")


GROUP = Group("traversal", require_rule)


def traversed(request: GenerateRequest, **knobs: Any) -> GenerateRequest:
    """The request under the rule, with drafts if there can be any."""
    return varied(request, acceptance=ACCEPTANCE_RULE_TRAVERSAL, **{"mode": FORCED, **knobs})


def require_drafts(answers: Sequence[Completion]) -> None:
    """Skip where no draft was verified that could have spoilt an answer."""
    if not sum(answer.speculation.draft_tokens for answer in answers):
        raise SkippedError("no sampled draft came in time, or no drafter samples them")


async def as_plain(deployment: Deployment, requests: Sequence[GenerateRequest], **sure: Any) -> None:
    """Fail unless greedy requests have the same answers under the rule, where `sure` leaves the likeliest token."""
    for _ in range(ATTEMPTS):
        answers = []
        for request in requests:
            expected = await deployment.plain(request)
            # Rounds of the rule count no near-ties, which alone could explain a difference.
            if not expected.speculation.near_ties:
                request = traversed(request, **(sure or {"temperature": 1.0, "top_k": 1, "seed": 141}))
                answers.append(await ask_same(deployment, request, expected))
        if any(answer.speculation.draft_tokens for answer in answers):
            return
    require_drafts(answers)


def greedy(deployment: Deployment, **knobs: Any) -> list[GenerateRequest]:
    return deployment.requests(**{"max_tokens": TOKENS, **knobs})


async def one_token_left(deployment: Deployment, **sure: Any) -> None:
    await as_plain(deployment, greedy(deployment), **sure)


async def greedy_with(deployment: Deployment, **knobs: Any) -> None:
    await as_plain(deployment, greedy(deployment, **knobs))


GROUP.add("temperature-0-is-plain-decoding", one_token_left, temperature=0.0)
GROUP.add("top-k-1-is-greedy", one_token_left, temperature=1.0, top_k=1, seed=142)
GROUP.add("tiny-top-p-is-greedy", one_token_left, temperature=1.0, top_p=1e-6, seed=143)
GROUP.add("min-p-1-is-greedy", one_token_left, temperature=1.0, min_p=1.0, seed=144)
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
GROUP.add("penalties-follow-each-path", greedy_with, **PENALTIES)


@GROUP.case("max-tokens-1-to-16")
async def lengths(deployment: Deployment) -> None:
    await as_plain(deployment, [greedy(deployment, max_tokens=length)[0] for length in range(1, LENGTH + 1)])


@GROUP.case("a-stop-token-at-every-place")
async def stop_tokens(deployment: Deployment) -> None:
    [request, *_] = greedy(deployment, max_tokens=LENGTH)
    output = (await deployment.plain(request)).token_ids
    await as_plain(deployment, [varied(request, stop_token_ids=[token]) for token in dict.fromkeys(output)])


@GROUP.case("stop-strings-from-beginning-to-end")
async def stop_strings(deployment: Deployment) -> None:
    [request, *_] = greedy(deployment, max_tokens=LENGTH)
    pieces = spread((await known(deployment, request, LENGTH)).windows(3), MAX_PIECES)
    await as_plain(deployment, [varied(request, stop_strings=[piece]) for piece in pieces])


@GROUP.case("the-model-s-end-token-not-before-min-tokens")
async def end_token(deployment: Deployment) -> None:
    bias = dict.fromkeys(end_tokens(deployment), 100.0)
    held_off = [greedy(deployment, ignore_eos=False, logit_bias=bias, min_tokens=least)[0] for least in range(8)]
    await as_plain(deployment, [*held_off, greedy(deployment, logit_bias=bias)[0]])


@GROUP.case("resumed-from-every-split")
async def resumed(deployment: Deployment) -> None:
    [request, *_] = greedy(deployment, presence_penalty=0.5)
    output = (await deployment.plain(request)).token_ids
    await as_plain(deployment, [varied(request, resume_token_ids=output[:split]) for split in range(1, LENGTH)])


GROUP.add("log-probs-are-those-of-plain-decoding", greedy_with, top_log_probs=3)


async def sampled(deployment: Deployment, **knobs: Any) -> list[tuple[GenerateRequest, Completion]]:
    """Answers at temperature 1, each with its request. Raises SkippedError if none of them was drafted for."""
    requests = [
        traversed(request, temperature=1.0, seed=seed) for seed in (145, 146) for request in greedy(deployment, **knobs)
    ]
    answers = [await deployment.ask(request) for request in requests]
    require_drafts(answers)
    return list(zip(requests, answers, strict=True))


@GROUP.case("outputs-are-complete")
async def complete(deployment: Deployment) -> None:
    for request, answer in await sampled(deployment):
        got = (len(answer.token_ids), answer.usage.completion_tokens, answer.finish_reason, answer.seed)
        wanted = (TOKENS, TOKENS, "length", request.sampling.seed)
        require(got == wanted, f"delivered and counted tokens, end and seed are {got}, not {wanted}", request)
        outside = [token for token in answer.token_ids if token >= deployment.info.vocab_size]
        require(not outside, f"the vocabulary does not have {outside}", request)


@GROUP.case("bad-token-ids-never-appear")
async def banned(deployment: Deployment) -> None:
    usual = [answer.token_ids for _, answer in await sampled(deployment)]
    bad = sorted({token for tokens in usual for token in tokens[::2]})
    for request, answer in await sampled(deployment, bad_token_ids=bad):
        drawn = {*bad} & {*answer.token_ids}
        require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("allowed-token-ids-alone-appear")
async def allowed(deployment: Deployment) -> None:
    few = sorted({*deployment.prompts[0]})
    for request, answer in await sampled(deployment, allowed_token_ids=few):
        drawn = {*answer.token_ids} - {*few}
        require(not drawn, f"drew {sorted(drawn)}", request)


@GROUP.case("counts-make-the-output")
async def counts(deployment: Deployment) -> None:
    for request, answer in await sampled(deployment):
        counts_make_output(answer, request)
        told = answer.speculation
        # A sampled tree has one source.
        by_source = [(source.proposed, source.accepted) for source in told.sources.values()]
        wanted = [(told.draft_tokens, told.accepted_tokens)] if told.draft_tokens else []
        require(by_source == wanted, f"proposed and accepted by source are {by_source}, not {wanted}", request)
        accepted, reached = told.rounds_accepted_by_depth, told.rounds_drafted_by_depth
        holds = sum(accepted) == told.accepted_tokens and all(map(int.__le__, accepted, reached))
        require(holds, f"accepted by depth {accepted}, drafted {reached}: {told.accepted_tokens} tokens", request)


@GROUP.case("log-probs-are-those-of-the-drawn-tokens")
async def own_log_probs(deployment: Deployment) -> None:
    """Against plain decoding that is made to say the same token after the same tokens."""
    for request, answer in (await sampled(deployment, top_log_probs=0, max_tokens=LENGTH))[:2]:
        require(len(answer.log_probs) == len(answer.token_ids), f"{len(answer.log_probs)} for {LENGTH} tokens", request)
        for place, (token, found) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
            before = varied(request, resume_token_ids=answer.token_ids[:place], max_tokens=place + 1)
            [told] = (await deployment.plain(varied(before, allowed_token_ids=[token]))).log_probs
            require(math.isfinite(found.log_prob), f"the log-probability of token {place} is {found}", request)
            if deployment.is_strict:
                require(found == told, f"the log-probability of token {place} is {found}, not {told}", request)


@GROUP.case("without-drafts-tokens-are-those-of-the-seed")
async def undrafted(deployment: Deployment) -> None:
    for request in greedy(deployment, temperature=1.0, seed=147):
        expected = await deployment.plain(request)
        for knobs in ({"mode": OFF}, {"max_nodes": 0}):
            await ask_same(deployment, traversed(request, **knobs), expected)


@GROUP.case("a-grammar-is-refused-above-temperature-0")
async def grammar(deployment: Deployment) -> None:
    [request, *_] = greedy(deployment, temperature=1.0, grammar=Grammar(regex="[a-z]+"))
    error = await refusal(deployment, traversed(request))
    require(error.code == grpc.StatusCode.UNIMPLEMENTED, f"the status is {error}", request)
    require("sampling.grammar" in error.details, f"no field is named: {error.details}", request)


async def keeps_law(deployment: Deployment, **knobs: Any) -> None:
    request = deployment.request(max_tokens=FIRST + 1, temperature=1.5, top_k=3, seed=0, **knobs)
    law = await first_tokens(deployment, request, FIRST)
    if max(law.values()) > TOO_SURE:
        raise SkippedError("the target is so sure of its first tokens that draws tell nothing of their law")
    answers: list[Completion] = []
    for batch in range(BATCHES):
        seeds = range(batch * BATCH, (batch + 1) * BATCH)
        answers += await together(deployment, [traversed(request, seed=seed) for seed in seeds])
    if not sum(answer.speculation.accepted_tokens for answer in answers):
        raise SkippedError("no sampled draft was accepted, so that no rule was tested")
    reason = contradiction(Counter(answer.token_ids[:FIRST] for answer in answers), law)
    require(not reason, reason, traversed(request))


GROUP.add("the-first-tokens-have-the-target-s-law", keeps_law)
GROUP.add("the-law-has-the-penalties-of-each-path", keeps_law, presence_penalty=1.5)
