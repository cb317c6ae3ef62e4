"""Services whose peers are of the version before, or of a later one: the same tokens, and drafts that count."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator

import pytest

from coppice.client import Client, Options
from coppice.completion import Completion
from coppice.v1 import inference_pb2, sampling_pb2
from orchestrator.app import running
from orchestrator.config import Config
from tests.contract_relay import PREVIOUS, UNKNOWN, Change, newer, older, relayed
from tests.http_client import gateway_to, post
from tests.tiny_services import tiny_drafter, tiny_verifier

PROMPT, TOKENS = (5, 6, 7), 24
# Every way from one service to another, by the one that is called.
LINKS = ("verifier", "drafter", "client", "gateway")


def unchanged(kind: str, data: bytes) -> bytes:
    return data


def change_of(version: str) -> Change:
    if version == "later":
        return newer
    try:
        return older()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {PREVIOUS} cannot be had: no git, or a shallow clone")


class Deployment:
    """Where clients call."""

    def __init__(self, client: Client, http_address: str, changed: dict[str, int]) -> None:
        self.client = client
        self.http_address = http_address
        self.changed = changed

    async def answers(self) -> list[Completion]:
        """Greedy and sampled outputs, with every kind of option that the version before has."""
        options = [
            Options(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
            Options(max_tokens=TOKENS, temperature=1.0, seed=3, top_k=40, top_p=0.9, ignore_eos=True, top_log_probs=2),
            Options(max_tokens=TOKENS, temperature=0.7, seed=4, ignore_eos=True, resume_token_ids=(8, 9)),
        ]
        return [await self.client.generate(PROMPT, one, timeout_s=30) for one in options]


@contextlib.asynccontextmanager
async def deployed(change: Change, *links: str) -> AsyncIterator[Deployment]:
    """Real services; messages on some links are changed both ways."""
    changed: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def through(link: str, address: str) -> str:
            called, relay = await stack.enter_async_context(relayed(address, change if link in links else unchanged))
            if link in links:
                relay.changed = changed
            return called

        verifier = await through("verifier", await stack.enter_async_context(tiny_verifier([])))
        drafter = await through("drafter", await stack.enter_async_context(tiny_drafter([])))
        config = Config(
            verifier_address=verifier,
            drafter_addresses=(drafter,),
            require_drafters=True,
            connect_timeout_s=15.0,
            grace_s=0.0,
            planner="fixed",
            cache_drafter=False,
        )
        orchestrator = await stack.enter_async_context(running(config))
        client = Client(await through("client", orchestrator.address))
        stack.push_async_callback(client.close)
        http_address = await stack.enter_async_context(gateway_to(await through("gateway", orchestrator.address)))
        yield Deployment(client, http_address, changed)


async def http_tokens(deployment: Deployment) -> list[int]:
    """Greedy tokens over HTTP."""
    info = await deployment.client.model_info()
    fields = {"model": info.model, "prompt": list(PROMPT), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await post(deployment.http_address, "/v1/completions", {**fields, "return_token_ids": True})
    assert answer.status == 200, answer.body
    tokens: list[int] = answer.content["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("version", ["before", "later"])
@pytest.mark.parametrize("link", [*LINKS, "all"])
async def test_services_of_neighbouring_versions_give_the_same_tokens_with_drafts(version: str, link: str) -> None:
    change = change_of(version)
    async with deployed(unchanged) as deployment:
        expected, over_http = await deployment.answers(), await http_tokens(deployment)
    async with deployed(change, *(LINKS if link == "all" else (link,))) as deployment:
        found = await deployment.answers()
        assert await http_tokens(deployment) == over_http
        changed = deployment.changed
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.log_probs for one in found] == [one.log_probs for one in expected]
    assert all(one.speculation.draft_tokens > 0 for one in found)
    assert {"verifier": "VerifyResponse", "drafter": "DraftResponse"}.get(link, "GenerateResponse") in {
        kind.rpartition(".")[2] for kind in changed
    }


def test_a_later_message_has_unknown_fields_everywhere_and_an_earlier_one_none_of_ours() -> None:
    request = inference_pb2.GenerateRequest(prompt="a", sampling=sampling_pb2.SamplingParams(temperature=1.0))
    data = newer("coppice.v1.GenerateRequest", request.SerializeToString())
    assert data.count(UNKNOWN) == 2
    assert inference_pb2.GenerateRequest.FromString(data).sampling.temperature == 1.0
    change = change_of("before")
    chat = inference_pb2.GenerateRequest(cache_salt="salt")
    chat.messages.messages.add(role="user", content="hello")
    assert (
        change("coppice.v1.GenerateRequest", chat.SerializeToString())
        == inference_pb2.GenerateRequest(cache_salt="salt").SerializeToString()
    )
