"""Deployments whose log-probabilities are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from coppice.core.log_probs import TokenLogProbs
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse
from orchestrator.api.validation import GenerationRequest
from tests.toy_deployment import ToyDeployment, toy_logits
from verifier_svc.verify.log_probs import token_log_probs
from verifier_svc.verify.token_choice import TokenChooser


class OtherLogProbs(ToyDeployment):
    """Alters what it says of a token's place, as `edit` has it."""

    def __init__(self, edit: Callable[[TokenLogProbs, int], TokenLogProbs], *, speculating: bool = False) -> None:
        super().__init__()
        self._edit, self._only_speculating = edit, speculating

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        one = super().log_probs(context, token, request)
        return one if self._only_speculating and not request.speculates else self._edit(one, token)


def rounded(one: TokenLogProbs, token: int) -> TokenLogProbs:
    """Another last bit, here and there."""
    return replace(one, log_prob=one.log_prob * (1 + 2**-22)) if token % 7 == 0 else one


def backwards(one: TokenLogProbs, token: int) -> TokenLogProbs:
    return replace(one, top_token_ids=one.top_token_ids[::-1], top_log_probs=one.top_log_probs[::-1])


def too_likely(one: TokenLogProbs, token: int) -> TokenLogProbs:
    higher = tuple(min(value + 1.5, 0.0) for value in one.top_log_probs)
    return replace(one, log_prob=min(one.log_prob + 1.5, 0.0), top_log_probs=higher)


def one_fewer(one: TokenLogProbs, token: int) -> TokenLogProbs:
    return replace(one, top_token_ids=one.top_token_ids[:-1], top_log_probs=one.top_log_probs[:-1])


def of_the_rest(one: TokenLogProbs, token: int) -> TokenLogProbs:
    """Leaves the drawn token out of the likeliest."""
    kept = [index for index, other in enumerate(one.top_token_ids) if other != token]
    ids, values = (tuple(part[index] for index in kept) for part in (one.top_token_ids, one.top_log_probs))
    return replace(one, top_token_ids=ids, top_log_probs=values)


class ProcessedLogProbs(ToyDeployment):
    """Divides the logits by the temperature first."""

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        logits = toy_logits(tuple(context[-3:])) / max(request.sampling.temperature, 0.5)
        return token_log_probs(logits, token, request.top_log_probs or 0)


class LogProbsByOutputLength(ToyDeployment):
    """Counts the context's tokens wrongly when a call goes on after another."""

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        return super().log_probs(context[:-1] if request.resume_ids else context, token, request)


class LosesTheLast(ToyDeployment):
    """Forgets the log-probabilities of a message's last token."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        del message.log_probs[-1:]


class SilentWithoutIds(ToyDeployment):
    """Sends log-probabilities with token ids alone."""

    def say(self, message: GenerateResponse, request: GenerateRequest) -> None:
        if request.response.HasField("token_ids"):
            del message.log_probs[:]


class DrawsOtherwiseWhenAsked(ToyDeployment):
    """Draws other tokens for those that want log-probabilities."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        token = super().draw(chooser, tokens, request, depth)
        return ord("z") if request.top_log_probs is not None and len(tokens) % 5 == 0 else token
