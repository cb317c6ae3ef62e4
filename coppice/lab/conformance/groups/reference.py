"""Greedy outputs and log-probabilities against plain transformers, where the checkpoint is at hand (`--reference`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from coppice.core.log_probs import TokenLogProbs
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, require, same_tokens
from coppice.lab.conformance.deployment import OPENINGS, Deployment
from coppice.lab.conformance.errors import NearTieError, RoundingError, SkippedError
from coppice.lab.conformance.reference import LogProbs, ReferenceModel
from coppice.lab.conformance.requests import FORCED, build, varied
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("reference")

TOKENS = 48
LIKELIEST = 20
# Natural logarithms. Sums in single precision, added in another order, differ by some 1e-5 on models of a few layers;
# in bfloat16 the reference rounds what is here kept in single precision. Near-ties are of two likely tokens; of the 20
# likeliest of every row some are off by more (0.35 on SmolLM2-135M), and a wrong row is off by nats.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
LOG_PROB_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}


def model_of(deployment: Deployment) -> ReferenceModel:
    if deployment.reference is None:
        raise SkippedError("no --reference is given")
    model = deployment.reference
    reason = "--reference has another tokenizer than the deployment"
    require(model.tokenizer_fingerprint == deployment.info.tokenizer_fingerprint, reason)
    return model


def longest(deployment: Deployment) -> int:
    return min(TOKENS, deployment.info.max_context_tokens // 2)


async def compare(deployment: Deployment, request: GenerateRequest, expected: list[int]) -> None:
    plain = await deployment.plain(request)
    await _explain(model_of(deployment), request, expected, plain.token_ids)
    same_tokens(expected, plain.token_ids, request, plain.speculation.near_ties)
    await ask_same(deployment, varied(request, mode=FORCED), plain)


async def _explain(
    model: ReferenceModel, request: GenerateRequest, expected: Sequence[int], actual: Sequence[int]
) -> None:
    """Raise NearTieError where the first token that differs is nearly as likely as the reference's own.

    In single precision nothing is explained.
    """
    pairs = enumerate(zip(expected, actual, strict=False))
    index = next((index for index, (wanted, got) in pairs if wanted != got), None)
    if index is None or model.dtype == "float32":
        return
    prompt = request.token_ids.ids if request.HasField("token_ids") else model.encode(request.prompt)
    row = (await asyncio.to_thread(model.log_probs, prompt, actual[: index + 1]))[index]
    gap = row[expected[index]] - row[actual[index]]
    if gap <= TOLERANCES[model.dtype]:
        raise NearTieError(f"token {index} is another one, which the reference has {gap:.2g} below its own", request)


@GROUP.case("token-ids-at-temperature-0")
async def token_ids(deployment: Deployment) -> None:
    model = model_of(deployment)
    for request in deployment.requests(max_tokens=longest(deployment)):
        prompt = request.token_ids.ids
        await compare(deployment, request, await asyncio.to_thread(model.greedy, prompt, longest(deployment)))


@GROUP.case("text-at-temperature-0")
async def text(deployment: Deployment) -> None:
    """The text's own tokens, with those that the tokenizer adds."""
    model = model_of(deployment)
    for opening in OPENINGS:
        prompt = model.encode(opening)
        request = build(opening, max_tokens=longest(deployment), ignore_eos=True)
        await compare(deployment, request, await asyncio.to_thread(model.greedy, prompt, longest(deployment)))


@GROUP.case("repetition-penalty-at-temperature-0")
async def repetition(deployment: Deployment) -> None:
    model = model_of(deployment)
    if model.dtype != "float32":
        raise SkippedError("the reference rounds penalised logits")
    for request in deployment.requests(max_tokens=longest(deployment), repetition_penalty=1.3):
        expected = await asyncio.to_thread(model.greedy, request.token_ids.ids, longest(deployment), 1.3)
        await compare(deployment, request, expected)


def farthest(token: int, one: TokenLogProbs, row: LogProbs) -> float:
    """The largest difference of a token's log-probabilities from the reference's [vocab].

    The likeliest are compared by id, and by rank: where two are nearly equal, either may come first.
    """
    top = np.array(one.top_log_probs)
    by_id = np.abs(top - row[list(one.top_token_ids)])
    by_rank = np.abs(top - np.sort(row)[::-1][: top.size])
    return float(max(abs(one.log_prob - row[token]), by_id.max(), by_rank.max()))


async def compare_log_probs(deployment: Deployment, **knobs: Any) -> None:
    model = model_of(deployment)
    requests = deployment.requests(max_tokens=longest(deployment), top_log_probs=LIKELIEST, mode=FORCED, **knobs)
    for request in requests:
        answer = await deployment.ask(request)
        rows = await asyncio.to_thread(model.log_probs, request.token_ids.ids, answer.token_ids)
        for index, (token, one) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
            difference = farthest(token, one, rows[index])
            if not difference <= LOG_PROB_TOLERANCES[model.dtype]:
                raise RoundingError(f"log-probabilities of token {index} differ by {difference:.2g}", request)


GROUP.add("log-probs-at-temperature-0", compare_log_probs)
GROUP.add("log-probs-at-temperature-1", compare_log_probs, temperature=1.0, seed=131)
