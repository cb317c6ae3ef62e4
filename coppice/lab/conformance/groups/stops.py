"""Stop strings and stop tokens at every place of a known output, against a slow scan of that output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import ask_same, ask_tokens, require
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.lab.conformance.slow_scan import Known, cut_at_strings, cut_at_token, known, known_sampled, spread

GROUP = Group("stops")

LENGTH = 16
MODES = (FORCED, OFF)
# Of all the pieces of the text, as many are tried, evenly spread.
MAX_PIECES = 16
# No text that a model is likely to say.
INNER = "\u2603\u2603\u2603"

Outputs = Callable[[Deployment], Awaitable[Known]]


async def greedy(deployment: Deployment) -> Known:
    return await known(deployment, deployment.request(), LENGTH)


async def sampled(deployment: Deployment) -> Known:
    return await known_sampled(deployment, LENGTH)


async def stops_at_tokens(deployment: Deployment, outputs: Outputs) -> None:
    output = await outputs(deployment)
    for token in dict.fromkeys(output.token_ids):
        cut = cut_at_token(output, token)
        for mode in MODES:
            request = varied(output.request, max_tokens=LENGTH, mode=mode, stop_token_ids=[token])
            answer = await ask_tokens(deployment, request, output.token_ids[: cut.num_tokens])
            require(answer.finish_reason == "stop", f"the output ended with {answer.finish_reason}", request)
            require(answer.text == cut.text, f"the text is {answer.text!r}, not {cut.text!r}", request)
            require(answer.stop_match is not None, "stop_match is not set", request)


async def stops_at_strings(deployment: Deployment, output: Known, stops: tuple[str, ...]) -> None:
    cut = cut_at_strings(output, stops)
    for mode in MODES:
        request = varied(output.request, max_tokens=LENGTH, mode=mode, stop_strings=stops)
        if cut is None:
            await ask_same(deployment, request, await deployment.plain(varied(output.request, max_tokens=LENGTH)))
            continue
        answer = await ask_tokens(deployment, request, output.token_ids[: cut.num_tokens])
        require(answer.text == cut.text, f"the text is {answer.text!r}, not {cut.text!r}", request)
        got = (answer.finish_reason, answer.stop_match)
        require(got == ("stop", cut.match), f"the output ended with {got}, not with {cut.match!r}", request)


def pieces(output: Known, size: int) -> list[str]:
    """Pieces of so many characters from beginning to end."""
    return spread(output.windows(size), MAX_PIECES)


async def stops_at_pieces(deployment: Deployment, outputs: Outputs, size: int) -> None:
    output = await outputs(deployment)
    for piece in pieces(output, size):
        await stops_at_strings(deployment, output, (piece,))


GROUP.add("a-stop-token-at-every-place-at-temperature-0", stops_at_tokens, greedy)
GROUP.add("a-stop-token-at-every-place-at-temperature-1", stops_at_tokens, sampled)
GROUP.add("one-character-wherever-it-is", stops_at_pieces, sampled, 1)
GROUP.add("three-characters-at-every-place-at-temperature-0", stops_at_pieces, greedy, 3)
GROUP.add("three-characters-at-every-place-at-temperature-1", stops_at_pieces, sampled, 3)


@GROUP.case("a-string-across-many-tokens")
async def long_strings(deployment: Deployment) -> None:
    output = await sampled(deployment)
    for piece in pieces(output, max(4, len(output.text) // 2))[:6]:
        await stops_at_strings(deployment, output, (piece,))


@GROUP.case("of-several-strings-the-first-that-is-complete")
async def several(deployment: Deployment) -> None:
    output = await sampled(deployment)
    long, short = pieces(output, 6), pieces(output, 2)
    for index, piece in enumerate(long[:8]):
        await stops_at_strings(deployment, output, (piece, piece[2:], short[-1 - index % len(short)], short[0]))
        await stops_at_strings(deployment, output, (long[-1], piece[1:4] + INNER, piece))


@GROUP.case("a-string-that-does-not-occur-changes-nothing")
async def absent(deployment: Deployment) -> None:
    output = await sampled(deployment)
    # Each begins like the text and goes on otherwise, so that much has to be held back for it.
    await stops_at_strings(deployment, output, tuple(piece + INNER for piece in pieces(output, 2)))
