"""What the services of a request keep fits together to rounds: those of its answer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from coppice.client import Client, Options
from coppice.lab.bench.timeline import HOPS, Watched, hop_rows, ratios, rounds_of
from coppice.obs.timeline import StreamTimeline, Timeline
from orchestrator.app import running
from orchestrator.config import Config
from tests.tiny_services import tiny_drafter, tiny_verifier


async def test_the_events_of_three_services_are_the_rounds_of_their_requests() -> None:
    client, own, drafting, verifying = (Timeline(Path("unused")) for _ in range(4))
    async with (
        tiny_verifier([partial(StreamTimeline, verifying, "orchestrator")], verifying) as verifier,
        tiny_drafter([partial(StreamTimeline, drafting, "orchestrator")], drafting) as drafter,
    ):
        # Nobody is meant to come late here.
        settings = {"linger_ms": 5000.0, "grace_s": 0.0, "cache_drafter": False, "planner": "fixed"}
        config = Config(verifier_address=verifier, drafter_addresses=(drafter,), **settings)
        async with running(config, timeline=own) as orchestrator, Client(orchestrator.address) as caller:
            answers = []
            for seed in (1, 2):
                options = Options(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)
                async for chunk in (stream := caller.stream("ab", options)):
                    client.mark("delta", size=len(chunk.token_ids))
                answers.append(stream.result())
    watched = Watched(client.events(), own.events(), drafting.events(), verifying.events())
    requests = rounds_of(watched)
    # The outcome that ends the prompt is no round here.
    assert [len(rounds) for rounds in requests] == [answer.speculation.rounds - 1 for answer in answers]
    assert [sum(one.num_tokens for one in rounds) for rounds in requests] == [15, 15]
    rows = {row["name"]: row["rounds"] for row in hop_rows([one for rounds in requests for one in rounds])}
    drafted = sum(one.has_draft for rounds in requests for one in rounds)
    # The last place is filled without a draft, and the first draft may have come before the prompt was over.
    assert drafted >= sum(rows.values()) / len(HOPS) / 2
    assert rows["pass"] == rows["outcome to the orchestrator"] == sum(map(len, requests))
    assert min(rows["draft"], rows["tree to the orchestrator"], rows["draft to the verifier"]) >= drafted - 2
    found = ratios(requests)
    assert 0 < found["forward-share"] < 1
    assert found["forward-share"] + found["waiting-share"] < 1
