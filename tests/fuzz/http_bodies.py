"""`python -m tests.fuzz.http_bodies`: random bodies at the gateway, which gives answers or refusals and nothing else.

`make fuzz` runs 10,000 of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from typing import Annotated, Any

import typer

from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeVerifier
from tests.http_client import Answered, exchanged, gateway_to, get, post, request_bytes

TEMPLATE = "{{ tools }}{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "toy", "prompt": "def ", "max_tokens": 3},
    CHAT: {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "def "},
    "/detokenize": {"tokens": [97, 98]},
}
NAMES = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "n",
    "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "stream", "stream_options",
    "response_format", "user", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "allowed_token_ids", "guided_json", "guided_regex", "guided_choice", "structured_outputs", "cache_salt", "priority",
    "return_token_ids", "parallel_tool_calls", "tokens", "add_special_tokens", "return_token_strs",
    "speculation", "echo", "best_of", "suffix", "tools", "tool_choice", "functions",
    "no_such_field",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 21, 400, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30,
    0.0, 0.5, -0.5, 1.5, 1e-300, 1e300,
    "", "x", "a" * 600, "\u00e9\U0001f333", "\x00", "auto", "off", "toy",
    [], {}, [[]], [1, 2], [300], ["a", "b"], [None], [["a"]], [[1], [2]],
    {"a": 1}, {"97": 1}, {"97": 1e300}, {"-1": 1}, {"4294967296": 1},
    {"type": "json_object"}, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    {"mode": "off"}, {"mode": "auto", "sources": ["x"]}, {"include_usage": True},
    {"json": {}}, {"regex": "("}, {"choice": ["a"]},
    [{"role": "user", "content": "x"}], [{"role": "", "content": "x"}], [{"role": "user"}], [{"content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": ""}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 1}}}], "required", "none",
    {"type": "function", "function": {"name": "f"}},
    [{"role": "x" * 100, "content": None}], [{"role": "user", "content": "x", "extra": 1}],
)  # fmt: skip


def random_request(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body: a valid one with random fields, or with random bytes."""
    path = rng.choice((*VALID, COMPLETIONS, CHAT, CHAT))
    fields = dict(VALID[path])
    for name in rng.choices(NAMES, k=rng.randint(0, 3)):
        fields[name] = rng.choice(VALUES)
    for name in list(fields):
        if rng.random() < 0.05:
            del fields[name]
    body = bytearray(json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(body) + 1)
            body[place : place + rng.randint(0, 3)] = rng.choices(b'{}[]",:\\0123456789.eE+-ntf\x00\xff\xc3u ', k=2)
    return path, bytes(body)


def complaint(answer: Answered) -> str:
    """Why an answer is neither valid nor a refusal of the client's; empty if it is one of them."""
    if answer.status == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            return "" if not any("error" in event for event in answer.events) else "an error in a stream"
        return "" if answer.content.keys() & {"choices", "tokens", "prompt"} else "no answer"
    if not 400 <= answer.status < 500:
        return f"status {answer.status}"
    return "" if answer.error.keys() == {"message", "type", "param", "code"} else "another shape"


async def fuzz(num_bodies: int, seed: int) -> Counter[int]:
    """Counts of answers by status.

    Raises:
        AssertionError: an answer is neither valid nor a refusal, or something is left of a request.
    """
    rng, statuses = random.Random(seed), Counter[int]()
    verifier = FakeVerifier(chat_template=TEMPLATE, pass_s=0)
    async with orchestrator_on_fakes(verifier) as (_, one), gateway_to(one.address) as address:

        async def some(number: int) -> None:
            for _ in range(number):
                path, body = random_request(rng)
                answer = await exchanged(address, request_bytes("POST", path, body))
                assert not complaint(answer), (complaint(answer), path, body, answer.body[:500])
                statuses[answer.status] += 1

        async with asyncio.TaskGroup() as tasks:
            for share in range(4):
                tasks.create_task(some(num_bodies // 4 + (share < num_bodies % 4)))
        assert (await post(address, COMPLETIONS, VALID[COMPLETIONS])).status == 200
        assert (await get(address, "/ready")).status == 200
        async with asyncio.timeout(10):
            while one.service.num_requests or verifier.active:  # noqa: ASYNC110  nothing to wait on
                await asyncio.sleep(0.01)
    return statuses


def main(
    bodies: Annotated[int, typer.Option(help="Random bodies to send.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the bodies.")] = 0,
) -> None:
    """Send random bodies to a gateway."""
    logging.basicConfig(level=logging.ERROR)
    statuses = asyncio.run(fuzz(bodies, seed))
    typer.echo(f"{bodies} bodies: " + ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())))


if __name__ == "__main__":
    typer.run(main)
