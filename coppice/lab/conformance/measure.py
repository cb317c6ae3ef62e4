"""Measuring a distribution from outside: which of two tokens is drawn, by how much the other one is favoured."""

from __future__ import annotations

from collections.abc import Iterable

from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest

MAX_BIAS = 100.0
# Halving [-100, 100] this often leaves less than 0.01.
HALVINGS = 15
PRECISION = 0.01


async def next_token(deployment: Deployment, request: GenerateRequest) -> int:
    """The one token that follows the prompt and the tokens that are resumed."""
    room = len(request.resume_token_ids) + 1
    answer = await deployment.ask(varied(request, mode=OFF, max_tokens=room, ignore_eos=True))
    return answer.token_ids[0]


async def gap(deployment: Deployment, request: GenerateRequest, token: int, rival: int) -> float:
    """How far the processed logit of `token` is above that of `rival`: the bias on the rival that turns the choice."""
    low, high = -MAX_BIAS, MAX_BIAS
    request = varied(request, temperature=0.0, allowed_token_ids=[token, rival])
    for bias, wanted in ((low, token), (high, rival)):
        if await next_token(deployment, varied(request, logit_bias={rival: bias})) != wanted:
            raise SkippedError(f"the logits of tokens {token} and {rival} are more than {MAX_BIAS:g} apart")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if await next_token(deployment, varied(request, logit_bias={rival: middle})) == token:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def stranger(deployment: Deployment, known: Iterable[int]) -> int:
    """A token that is none of these, nor an end of the sequence; one of the prompts' own where there is one."""
    taken = {*known, *deployment.info.eos_token_ids}
    likely = [token for prompt in deployment.prompts for token in prompt if token not in taken]
    if likely:
        return likely[0]
    return next(token for token in range(deployment.info.vocab_size) if token not in taken)
