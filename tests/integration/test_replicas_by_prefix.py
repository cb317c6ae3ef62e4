"""Several orchestrators of the same verifiers: a prompt goes where another one sent its beginning."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from coppice.client import Client, Options
from coppice.v1 import verifier_pb2
from orchestrator.app import running
from orchestrator.config import Config
from tests.fakes import FakeVerifier, eventually, serving
from tests.toy_target import babble, plain

FAMILIES = [[family] * 80 for family in range(32)]


def homes(openings: Sequence[Sequence[verifier_pb2.OpenSequence]]) -> dict[int, set[int]]:
    """By family, the verifiers that it went to."""
    found: dict[int, set[int]] = {}
    for number, opened in enumerate(openings):
        for opening in opened:
            found.setdefault(opening.prompt_token_ids[0], set()).add(number)
    return found


async def say(client: Client, prompt: list[int]) -> None:
    completion = await client.generate(prompt, Options(max_tokens=2, seed=0, ignore_eos=True))
    assert list(completion.token_ids) == plain(babble, prompt, 2, 0)


async def test_a_second_orchestrator_sends_prompts_where_the_first_has_sent_their_beginnings() -> None:
    verifiers = [FakeVerifier(shared_block_tokens=8, instance_id=name) for name in ("one", "two")]
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(one)) for one in verifiers]
        clients = []
        for _ in range(2):
            config = Config(
                verifier_address=",".join(addresses), connect_timeout_s=10.0, grace_s=0.0, cache_drafter=False
            )
            orchestrator = await stack.enter_async_context(running(config))
            clients.append(await stack.enter_async_context(Client(orchestrator.address)))
        await eventually(lambda: all(len(one.streams) == 2 for one in verifiers))
        for family in FAMILIES:
            await say(clients[0], [*family, 1])
        of_first = homes([one.opened for one in verifiers])
        # By chance 6 of 32 or fewer go to one of two once in 4,000 times; these ids are always the same.
        assert min(len(one.opened) for one in verifiers) > 6
        before = [len(one.opened) for one in verifiers]
        for family in random.Random(1).sample(FAMILIES, len(FAMILIES)):
            await say(clients[1], [*family, 2, 3])
        of_second = homes([one.opened[count:] for one, count in zip(verifiers, before, strict=True)])
        assert of_second == of_first
