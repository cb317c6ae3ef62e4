"""The law of an output's first tokens, from the target's own log-probabilities, and whether draws are from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import varied
from coppice.v1.inference_pb2 import GenerateRequest

# The likeliest tokens that a deployment tells; of a cut and penalised law, some of them are all there is.
LIKELIEST = 20
# Cells that expect fewer draws than this count as one.
LEAST_EXPECTED = 5.0
# The quantile of the normal distribution that one draw in a million is beyond.
BEYOND = 4.75

Law: TypeAlias = dict[tuple[int, ...], float]


async def first_tokens(deployment: Deployment, request: GenerateRequest, length: int) -> Law:
    """The law of the first `length` tokens of a request that ends later, by one plain request for each beginning.

    Of the sampling parameters it knows temperature (above 0), top_k (at least 1) and presence_penalty, these two so
    small that no token beyond the LIKELIEST matters. Log-probabilities are logits up to a constant.
    """
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*output, token): probability * share
            for output, probability in law.items()
            for token, share in (await _next_token(deployment, request, output)).items()
        }
    return law


async def _next_token(deployment: Deployment, request: GenerateRequest, output: tuple[int, ...]) -> dict[int, float]:
    asked = varied(request, resume_token_ids=output, max_tokens=len(output) + 1, top_log_probs=LIKELIEST)
    [told] = (await deployment.plain(asked)).log_probs
    sampling = request.sampling
    scores = {
        token: (log_prob - sampling.presence_penalty * (token in output)) / sampling.temperature
        for token, log_prob in zip(told.top_token_ids, told.top_log_probs, strict=True)
    }
    kept = sorted(scores, key=lambda token: -scores[token])[: sampling.top_k]
    weights = {token: math.exp(scores[token] - scores[kept[0]]) for token in kept}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def contradiction(found: Counter[tuple[int, ...]], law: Mapping[tuple[int, ...], float]) -> str:
    """Why independent draws are not from a law; empty where they may be.

    Pearson's chi-square. Draws from the law contradict it about once in a million times.
    """
    for output in found:
        if output not in law:
            return f"{found[output]} outputs begin with {output}, which the law does not give"
    number = found.total()
    cells = _cells([(number * probability, found[output]) for output, probability in law.items()])
    if len(cells) < 2:
        return ""
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    limit = _bound(len(cells) - 1)
    if statistic <= limit:
        return ""
    return f"chi-square of {number} outputs is {statistic:.1f} over {len(cells)} cells, more than {limit:.1f}"


def _cells(counts: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Expected and seen; what is expected too rarely is put together, with the rarest of the others if need be."""
    ranked = sorted(counts, reverse=True)
    cells = [cell for cell in ranked if cell[0] >= LEAST_EXPECTED]
    rest = ranked[len(cells) :]
    while cells and rest and sum(expected for expected, _ in rest) < LEAST_EXPECTED:
        rest.append(cells.pop())
    return [*cells, (sum(expected for expected, _ in rest), sum(seen for _, seen in rest))] if rest else cells


def _bound(degrees: int) -> float:
    """The quantile of chi-square that belongs to BEYOND (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + BEYOND * math.sqrt(part)) ** 3
