"""Grammars: outputs that match, read by Python's own parsers; the same tokens with and without speculation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import grpc

from coppice.client import RequestFailedError
from coppice.lab.conformance.catalogue import Group
from coppice.lab.conformance.checks import (
    ask_same,
    ask_tokens,
    each_as_alone,
    end_tokens,
    refusal,
    refused_naming,
    require,
    same,
    same_with_and_without_speculation,
)
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import SkippedError
from coppice.lab.conformance.requests import FORCED, OFF, build, varied
from coppice.v1.inference_pb2 import GenerateRequest
from coppice.v1.sampling_pb2 import Grammar

MODES = (FORCED, OFF)
TEMPERATURES = (0.0, 1.2)
# Longer than any match of the expression; a schema's may be longer by its white space.
TOKENS = 64
CALL = r"[a-z]{1,8}\([0-9]{1,3}(, [0-9]{1,3}){0,2}\)"
SCHEMA = {
    "type": "object",
    "properties": {
        "key": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["x", "y"]},
    },
    "required": ["key", "size", "kind"],
    "additionalProperties": False,
}
# What the schema's values begin with, white space aside.
OPENING = '{"key":"'
REGEX = Grammar(regex=CALL)
JSON_SCHEMA = Grammar(json_schema=json.dumps(SCHEMA))


async def require_grammars(deployment: Deployment) -> None:
    """Skip where requests that have a grammar are not served."""
    request = build(deployment.prompts[0], max_tokens=TOKENS, seed=111, grammar=Grammar(regex="yes"))
    try:
        await deployment.client.send(request, deployment.timeout_s)
    except RequestFailedError as error:
        if error.code == grpc.StatusCode.UNIMPLEMENTED:
            raise SkippedError(f"the deployment has no grammars: {error.details}") from error
        raise


GROUP = Group("grammars", require_grammars)


def is_call(text: str, is_whole: bool) -> bool:
    """Whether a text matches CALL; TOKENS are enough for the longest match, so that none is cut off."""
    return is_whole and re.fullmatch(CALL, text) is not None


def keeps_schema(text: str, is_whole: bool) -> bool:
    """Whether a text is one JSON value that keeps SCHEMA, its properties in their order; or begins like one."""
    if not is_whole:
        compact = "".join(text.split())
        return compact.startswith(OPENING) or OPENING.startswith(compact)
    try:
        pairs = json.loads(text, object_pairs_hook=list)
        (_, key), (_, size), (_, kind) = pairs
    except (ValueError, TypeError):
        return False
    return (
        [name for name, _ in pairs] == ["key", "size", "kind"]
        and isinstance(key, str)
        and re.fullmatch("[a-z]{1,8}", key) is not None
        and type(size) is int
        and 0 <= size <= 99
        and kind in ("x", "y")
    )


def request_of(deployment: Deployment, grammar: Grammar, **knobs: Any) -> GenerateRequest:
    request = build(deployment.prompts[0], max_tokens=TOKENS, seed=111, grammar=grammar)
    return varied(request, **knobs)


async def on_and_off(deployment: Deployment, grammar: Grammar, **knobs: Any) -> None:
    requests = [
        build(prompt, max_tokens=TOKENS, temperature=temperature, seed=112, grammar=grammar, **knobs)
        for prompt in deployment.prompts
        for temperature in TEMPERATURES
    ]
    await same_with_and_without_speculation(deployment, requests)


PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 40, "top_p": 0.95}
GROUP.add("a-regex-with-and-without-speculation", on_and_off, REGEX)
GROUP.add("a-json-schema-with-and-without-speculation", on_and_off, JSON_SCHEMA)
GROUP.add("penalties-and-truncations-with-and-without-speculation", on_and_off, REGEX, **PENALTIES)


async def matches(deployment: Deployment, grammar: Grammar, fits: Callable[[str, bool], bool]) -> None:
    for temperature in TEMPERATURES:
        for seed in range(2):
            for mode in MODES:
                request = request_of(deployment, grammar, temperature=temperature, seed=seed, mode=mode)
                answer = await deployment.ask(request)
                is_whole = answer.finish_reason in ("stop", "eos")
                reason = f"{answer.text!r}, ended by {answer.finish_reason}, does not match"
                require(fits(answer.text, is_whole), reason, request)
                require(answer.stop_match is None, f"stop_match is {answer.stop_match!r}", request)


GROUP.add("outputs-match-a-regex", matches, REGEX, is_call)
GROUP.add("outputs-keep-a-json-schema", matches, JSON_SCHEMA, keeps_schema)


@GROUP.case("the-output-ends-where-nothing-may-follow")
async def complete(deployment: Deployment) -> None:
    """Even before min_tokens; the model's own end token is not needed for it."""
    for mode in MODES:
        for knobs in ({}, {"min_tokens": 50}, {"ignore_eos": True}):
            request = request_of(deployment, Grammar(regex="yes"), temperature=1.0, mode=mode, **knobs)
            answer = await deployment.ask(request)
            got = (answer.text, answer.finish_reason, answer.stop_match)
            require(got == ("yes", "stop", None), f"text and end are {got}", request)


@GROUP.case("the-model-s-end-token-comes-where-the-text-matches-alone")
async def end_token(deployment: Deployment) -> None:
    bias = dict.fromkeys(end_tokens(deployment), 100.0)
    for mode in MODES:
        for prompt in deployment.prompts:
            request = build(prompt, max_tokens=TOKENS, grammar=Grammar(regex="[a-z]{3,40}"), logit_bias=bias, mode=mode)
            answer = await deployment.ask(request)
            got = (answer.text, answer.finish_reason)
            holds = re.fullmatch("[a-z]{3,}", answer.text) is not None and answer.finish_reason == "eos"
            require(holds, f"text and end are {got}", request)


@GROUP.case("max-tokens-cuts-off-a-beginning")
async def cut(deployment: Deployment) -> None:
    for grammar in (REGEX, JSON_SCHEMA):
        request = request_of(deployment, grammar, temperature=0.8)
        whole = await deployment.plain(request)
        for length in range(1, min(len(whole.token_ids), 12)):
            shorter = varied(request, max_tokens=length, mode=FORCED)
            answer = await ask_tokens(deployment, shorter, whole.token_ids[:length])
            require(answer.finish_reason == "length", f"it ended with {answer.finish_reason}", shorter)


@GROUP.case("resumed-from-every-split")
async def resumed(deployment: Deployment) -> None:
    """The grammar goes on after the tokens that were delivered; one that is complete only ends."""
    request = request_of(deployment, REGEX, temperature=0.8)
    whole = await deployment.plain(request)
    for split in range(1, len(whole.token_ids) + 1):
        rest = varied(request, resume_token_ids=whole.token_ids[:split], mode=FORCED)
        answer = await ask_tokens(deployment, rest, whole.token_ids[split:])
        require(answer.finish_reason == whole.finish_reason, f"it ended with {answer.finish_reason}", rest)


@GROUP.case("a-stop-string-inside-a-match")
async def stop_string(deployment: Deployment) -> None:
    for mode in MODES:
        request = request_of(deployment, REGEX, temperature=0.8, stop_strings=["("], mode=mode)
        whole = await deployment.plain(request_of(deployment, REGEX, temperature=0.8))
        answer = await deployment.ask(request)
        got = (answer.text, answer.finish_reason, answer.stop_match)
        wanted = (whole.text.partition("(")[0], "stop", "(")
        same("text and end", wanted, got, request, answer.speculation.near_ties)


@GROUP.case("different-grammars-at-once")
async def in_company(deployment: Deployment) -> None:
    grammars = (REGEX, JSON_SCHEMA, Grammar(regex="[0-9]{1,12}"), Grammar(json_schema='{"type": "boolean"}'))
    constrained = [
        build(prompt, max_tokens=32, temperature=1.0, seed=seed, grammar=grammar, mode=FORCED)
        for seed, grammar in enumerate(grammars)
        for prompt in deployment.prompts
    ]
    free = deployment.requests(max_tokens=24, temperature=1.0, seed=113, mode=FORCED)
    await each_as_alone(deployment, [*constrained, *free])


BAD: dict[str, tuple[str, Grammar]] = {
    "a-regex-that-is-none": ("sampling.grammar.regex", Grammar(regex="(")),
    "an-empty-regex": ("sampling.grammar.regex", Grammar(regex="")),
    "a-regex-with-look-ahead": ("sampling.grammar.regex", Grammar(regex="(?=a)b")),
    "a-regex-that-is-too-long": ("sampling.grammar.regex", Grammar(regex="x" * 65537)),
    "a-schema-that-is-no-json": ("sampling.grammar.json_schema", Grammar(json_schema="{")),
    "a-schema-that-is-no-object": ("sampling.grammar.json_schema", Grammar(json_schema="[1]")),
    "a-schema-with-a-keyword-that-cannot-be-kept": ("sampling.grammar.json_schema", Grammar(json_schema='{"not": {}}')),
    "an-empty-schema-text": ("sampling.grammar.json_schema", Grammar(json_schema="")),
    "neither-schema-nor-regex": ("sampling.grammar", Grammar()),
}


async def refused(deployment: Deployment, field: str, grammar: Grammar) -> None:
    await refused_naming(deployment, request_of(deployment, grammar), field)


for name, (field, grammar) in BAD.items():
    GROUP.add(f"{name}-is-refused", refused, field, grammar)


async def other_tokens(deployment: Deployment, parameter: str, field: str) -> None:
    """Digits are wanted, and one of the parameters has tokens of letters."""
    request = request_of(deployment, Grammar(regex="[0-9]{4}"))
    drawn = (await deployment.plain(varied(request, grammar=Grammar(regex="[a-z]{4}")))).token_ids
    await refused_naming(deployment, varied(request, **{parameter: drawn[:1]}), field)


GROUP.add("parameters-that-leave-nothing-are-refused", other_tokens, "allowed_token_ids", "sampling.grammar")
GROUP.add("resumed-tokens-that-it-does-not-allow-are-refused", other_tokens, "resume_token_ids", "resume_token_ids")


@GROUP.case("a-refused-grammar-disturbs-nobody")
async def next_request(deployment: Deployment) -> None:
    request = request_of(deployment, REGEX, temperature=1.0)
    expected = await deployment.plain(request)
    for _ in range(4):
        await refusal(deployment, request_of(deployment, Grammar(regex="(")))
    await ask_same(deployment, varied(request, mode=FORCED), expected)
