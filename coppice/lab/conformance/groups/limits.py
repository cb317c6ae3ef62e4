"""Ends of outputs by length or by the model's own end token, also in the middle of an accepted block."""

from __future__ import annotations

from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_tokens, end_tokens, require, same_answer
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, build, varied
from coppice.lab.conformance.slow_scan import cut_at_strings, known_sampled, spread
from coppice.v1.inference_pb2 import GenerateRequest

GROUP = Group("limits")

LENGTHS = range(1, 17)
LONGER = 24
# Tokens of the output that stop strings are looked for in.
STRINGS_LENGTH = 10
# A prompt that fills a longer context would take too long to read.
MAX_FILLED_TOKENS = 8192


async def every_length(deployment: Deployment, prompt: int, **knobs: Any) -> None:
    request = deployment.requests(**knobs)[prompt]
    whole = (await deployment.plain(varied(request, max_tokens=LONGER))).token_ids
    for length in LENGTHS:
        shorter = varied(request, max_tokens=length, mode=FORCED)
        answer = await ask_tokens(deployment, shorter, whole[:length])
        require(answer.finish_reason == "length", f"the output ended with {answer.finish_reason}", shorter)
        same_answer(await deployment.plain(shorter), answer, shorter)


GROUP.add("max-tokens-1-to-16-at-temperature-0", every_length, 0)
GROUP.add("max-tokens-1-to-16-at-temperature-1", every_length, 1, temperature=1.0, seed=21)


@GROUP.case("the-context-is-filled-exactly")
async def context(deployment: Deployment) -> None:
    size = deployment.info.max_context_tokens
    if size > MAX_FILLED_TOKENS:
        raise SkippedError(f"a context of {size} tokens takes too long to fill")
    tokens = [token for prompt in deployment.prompts for token in prompt]
    for room in (1, 5):
        prompt = (tokens * (size // len(tokens) + 1))[: size - room]
        request = build(prompt, max_tokens=room + 20, ignore_eos=True, mode=FORCED)
        answer = await deployment.ask(request)
        got = (len(answer.token_ids), answer.finish_reason)
        require(got == (room, "context_length"), f"room for {room} tokens ended with {got}", request)
        same_answer(await deployment.plain(request), answer, request)


def forced_eos(deployment: Deployment, **knobs: Any) -> tuple[GenerateRequest, int]:
    """A request whose every token is the model's end token, where it may be drawn."""
    eos = end_tokens(deployment)[0]
    return build(deployment.prompts[0], logit_bias={eos: 100.0}, max_tokens=8, **knobs), eos


@GROUP.case("the-model-s-end-token-ends-the-output")
async def eos_ends(deployment: Deployment) -> None:
    for mode in (FORCED, OFF):
        request, eos = forced_eos(deployment, mode=mode)
        answer = await deployment.ask(request)
        got = (answer.token_ids, answer.text, answer.finish_reason)
        require(got == ((eos,), "", "eos"), f"the output is {got}", request)


@GROUP.case("ignore-eos-goes-on")
async def eos_ignored(deployment: Deployment) -> None:
    request, eos = forced_eos(deployment, ignore_eos=True, mode=FORCED)
    answer = await deployment.ask(request)
    got = (answer.token_ids, answer.finish_reason)
    require(got == ((eos,) * 8, "length"), f"the output is {got}", request)


@GROUP.case("min-tokens-holds-off-the-model-s-end-token")
async def eos_held_off(deployment: Deployment) -> None:
    for min_tokens in range(1, 8):
        request, eos = forced_eos(deployment, min_tokens=min_tokens, mode=FORCED)
        answer = await deployment.ask(request)
        before, last = answer.token_ids[:-1], answer.token_ids[-1]
        held_off = len(before) == min_tokens and not {*before} & {*deployment.info.eos_token_ids}
        require(held_off and last == eos, f"min_tokens {min_tokens} gave {answer.token_ids}", request)
        same_answer(await deployment.plain(request), answer, request)


@GROUP.case("min-tokens-holds-off-stop-tokens")
async def stop_held_off(deployment: Deployment) -> None:
    token = deployment.prompts[1][0]
    request = deployment.request(max_tokens=8, logit_bias={token: 100.0}, stop_token_ids=[token])
    for min_tokens in range(8):
        request = varied(request, min_tokens=min_tokens, mode=FORCED)
        answer = await deployment.ask(request)
        got = (answer.token_ids.index(token), len(answer.token_ids), answer.finish_reason)
        wanted = (min_tokens, min_tokens + 1, "stop")
        require(got == wanted, f"the stop token's place, the length and the end are {got}, not {wanted}", request)


@GROUP.case("min-tokens-holds-off-stop-strings")
async def strings_held_off(deployment: Deployment) -> None:
    """Pieces that are complete within the first tokens, that begin there and end later, and that come later."""
    output = await known_sampled(deployment, STRINGS_LENGTH)
    pieces = [*output.windows(1)[:4], *output.windows(3)[::2]]
    for number, piece in enumerate(spread(pieces, len(pieces))):
        min_tokens = 1 + number % (STRINGS_LENGTH - 1)
        cut = cut_at_strings(output, (piece,), min_tokens)
        wanted = (output.texts[-1], "length") if cut is None else (cut.text, "stop")
        tokens = output.token_ids[: STRINGS_LENGTH if cut is None else cut.num_tokens]
        for mode in (FORCED, OFF):
            limits = {"max_tokens": STRINGS_LENGTH, "min_tokens": min_tokens}
            request = varied(output.request, mode=mode, stop_strings=[piece], **limits)
            answer = await ask_tokens(deployment, request, tokens)
            got = (answer.text, answer.finish_reason)
            require(got == wanted, f"the text and the end are {got}, not {wanted}", request)
