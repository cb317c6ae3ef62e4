"""Stop strings and stop tokens at every place of a known output, against a slow scan of that output."""

from __future__ import annotations

from coppice.lab.conformance.case import Group
from coppice.lab.conformance.checks import require, same_answer, same_tokens
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, build, varied
from coppice.lab.conformance.slow_scan import Known, cut_at_strings, cut_at_token, known

GROUP = Group("stops")

LENGTH = 16
MODES = (FORCED, OFF)
# Of all the pieces of the text, as many are tried, evenly spread.
MAX_PIECES = 16


async def greedy(deployment: Deployment) -> Known:
    return await known(deployment, build(deployment.facts.prompts[0], ignore_eos=True), LENGTH)


async def sampled(deployment: Deployment) -> Known:
    request = build(deployment.facts.prompts[1], ignore_eos=True, temperature=1.0, seed=21)
    return await known(deployment, request, LENGTH)


async def stops_at_tokens(deployment: Deployment, output: Known) -> None:
    for token in dict.fromkeys(output.token_ids):
        cut = cut_at_token(output, token)
        for mode in MODES:
            request = varied(output.request, max_tokens=LENGTH, mode=mode, stop_token_ids=[token])
            answer = await deployment.ask(request)
            same_tokens(output.token_ids[: cut.num_tokens], answer.token_ids, request, answer.speculation.near_ties)
            require(answer.finish_reason == "stop", f"the output ended with {answer.finish_reason}", request)
            require(answer.text == cut.text, f"the text is {answer.text!r}, not {cut.text!r}", request)
            require(answer.stop_match is not None, "stop_match is not set", request)


async def stops_at_strings(deployment: Deployment, output: Known, stops: tuple[str, ...]) -> None:
    cut = cut_at_strings(output, stops)
    for mode in MODES:
        request = varied(output.request, max_tokens=LENGTH, mode=mode, stop_strings=stops)
        answer = await deployment.ask(request)
        if cut is None:
            same_answer(await deployment.plain(varied(output.request, max_tokens=LENGTH)), answer, request)
            continue
        same_tokens(output.token_ids[: cut.num_tokens], answer.token_ids, request, answer.speculation.near_ties)
        require(answer.text == cut.text, f"the text is {answer.text!r}, not {cut.text!r}", request)
        got = (answer.finish_reason, answer.stop_match)
        require(got == ("stop", cut.match), f"the output ended with {got}, not with {cut.match!r}", request)


def spread(pieces: list[str]) -> list[str]:
    """Some of the pieces from beginning to end.

    Raises:
        SkippedError: there are none.
    """
    if not pieces:
        raise SkippedError("the known output has too little text that is complete")
    return pieces[:: -(-len(pieces) // MAX_PIECES)]


@GROUP.case("a-stop-token-at-every-place-at-temperature-0")
async def greedy_tokens(deployment: Deployment) -> None:
    await stops_at_tokens(deployment, await greedy(deployment))


@GROUP.case("a-stop-token-at-every-place-at-temperature-1")
async def sampled_tokens(deployment: Deployment) -> None:
    await stops_at_tokens(deployment, await sampled(deployment))


@GROUP.case("one-character-wherever-it-is")
async def characters(deployment: Deployment) -> None:
    output = await sampled(deployment)
    for piece in spread(output.windows(1)):
        await stops_at_strings(deployment, output, (piece,))


@GROUP.case("three-characters-at-every-place-at-temperature-0")
async def greedy_strings(deployment: Deployment) -> None:
    output = await greedy(deployment)
    for piece in spread(output.windows(3)):
        await stops_at_strings(deployment, output, (piece,))


@GROUP.case("three-characters-at-every-place-at-temperature-1")
async def sampled_strings(deployment: Deployment) -> None:
    output = await sampled(deployment)
    for piece in spread(output.windows(3)):
        await stops_at_strings(deployment, output, (piece,))


@GROUP.case("a-string-across-many-tokens")
async def long_strings(deployment: Deployment) -> None:
    output = await sampled(deployment)
    for piece in spread(output.windows(max(4, len(output.text) // 2)))[:6]:
        await stops_at_strings(deployment, output, (piece,))


@GROUP.case("of-several-strings-the-first-that-is-complete")
async def several(deployment: Deployment) -> None:
    output = await sampled(deployment)
    long, short = spread(output.windows(6)), spread(output.windows(2))
    for index, piece in enumerate(long[:8]):
        await stops_at_strings(deployment, output, (piece, piece[2:], short[-1 - index % len(short)], short[0]))
        await stops_at_strings(deployment, output, (long[-1], piece[1:4] + INNER, piece))


@GROUP.case("a-string-that-does-not-occur-changes-nothing")
async def absent(deployment: Deployment) -> None:
    output = await sampled(deployment)
    # Each begins like the text and goes on otherwise, so that much has to be held back for it.
    pieces = [piece + INNER for piece in spread(output.windows(2))]
    await stops_at_strings(deployment, output, tuple(pieces))


# No text that a model is likely to say.
INNER = "\u2603\u2603\u2603"
