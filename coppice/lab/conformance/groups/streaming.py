"""The stream: deltas that make the whole, a first message and a last."""

from __future__ import annotations

from typing import Any

from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import begins_wrongly, ends_wrongly, require, same, same_tokens
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.requests import FORCED, OFF, varied
from coppice.v1.inference_pb2 import GenerateRequest, GenerateResponse, ResponseOptions

GROUP = Group("streaming")

TOKENS = 32


def request_of(deployment: Deployment, **knobs: Any) -> GenerateRequest:
    return deployment.request(**{"max_tokens": TOKENS, "temperature": 1.0, "seed": 61, "mode": FORCED, **knobs})


def tokens_of(messages: list[GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def text_of(messages: list[GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def near_ties_of(messages: list[GenerateResponse]) -> int:
    return messages[-1].speculation.near_ties


@GROUP.case("deltas-make-the-whole")
async def deltas(deployment: Deployment) -> None:
    """The whole is known from a call that ends at each length: its text, unlike a delta, is held back by nothing."""
    request = request_of(deployment)
    whole = await deployment.plain(request)
    messages = await deployment.messages(request)
    same_tokens(whole.token_ids, tokens_of(messages), request, near_ties_of(messages))
    same("the deltas' text", whole.text, text_of(messages), request, near_ties_of(messages))


@GROUP.case("tokens-come-as-they-are-made")
async def gradual(deployment: Deployment) -> None:
    request = request_of(deployment, mode=OFF)
    parts = sum(bool(message.token_ids) for message in await deployment.messages(request))
    require(parts > 1, f"{TOKENS} tokens came in one message", request)


@GROUP.case("the-first-message-alone-has-id-and-seed")
async def first(deployment: Deployment) -> None:
    request = request_of(deployment, request_id="conformance")
    messages = await deployment.messages(request)
    got = (messages[0].request_id, messages[0].seed)
    require(got == ("conformance", 61), f"the first message has id and seed {got}", request)
    wrong = begins_wrongly(messages)
    require(not wrong, ", ".join(wrong), request)


@GROUP.case("the-last-message-alone-has-the-end-and-the-counts")
async def last(deployment: Deployment) -> None:
    request = request_of(deployment)
    wrong = ends_wrongly(await deployment.messages(request))
    require(not wrong, ", ".join(wrong), request)


@GROUP.case("an-id-is-made-up-where-none-is-given")
async def made_up(deployment: Deployment) -> None:
    request = request_of(deployment)
    ids = {(await deployment.messages(request))[0].request_id for _ in range(3)}
    require(len(ids) == 3 and all(ids), f"3 requests got the ids {sorted(ids)}", request)


@GROUP.case("tokens-without-text")
async def no_text(deployment: Deployment) -> None:
    request = request_of(deployment)
    whole = await deployment.plain(request)
    request = varied(request, response=ResponseOptions(text=False))
    messages = await deployment.messages(request)
    same_tokens(whole.token_ids, tokens_of(messages), request, near_ties_of(messages))
    require(not text_of(messages), "text came that was not wanted", request)


@GROUP.case("text-without-tokens")
async def no_tokens(deployment: Deployment) -> None:
    request = request_of(deployment)
    whole = await deployment.plain(request)
    request = varied(request, response=ResponseOptions(token_ids=False))
    messages = await deployment.messages(request)
    require(not tokens_of(messages), "token ids came that were not wanted", request)
    same("the deltas' text", whole.text, text_of(messages), request, near_ties_of(messages))
    counted = messages[-1].usage.completion_tokens
    require(counted == TOKENS, f"{counted} tokens are counted, not {TOKENS}", request)


@GROUP.case("stop-strings-without-text")
async def stop_without_text(deployment: Deployment) -> None:
    """Text that is not delivered still decides where the output ends."""
    request = request_of(deployment)
    text = (await deployment.plain(request)).text
    request = varied(request, stop_strings=[text[len(text) // 2 :][:3] or text])
    with_text = await deployment.messages(request)
    request = varied(request, response=ResponseOptions(text=False))
    without = await deployment.messages(request)
    same_tokens(tokens_of(with_text), tokens_of(without), request, near_ties_of(without))
    require(with_text[-1].finished == without[-1].finished, "the output ends for another reason", request)
