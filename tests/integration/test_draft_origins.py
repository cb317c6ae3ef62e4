"""Who had drafted before the outcome was known, and what lay between passes: counted by a real verifier."""

from __future__ import annotations

from coppice.client import Client, Options
from orchestrator.app import running
from orchestrator.config import Config
from tests.tiny_services import tiny_drafter, tiny_verifier

TOKENS = 40


async def test_every_round_with_a_draft_says_when_that_was_made() -> None:
    async with tiny_verifier([]) as verifier, tiny_drafter([]) as drafter:
        config = Config(
            verifier_address=verifier,
            drafter_addresses=(drafter,),
            connect_timeout_s=10.0,
            grace_s=0.0,
            planner="fixed",
            linger_ms=2000,
            cache_drafter=False,
        )
        async with running(config) as orchestrator, Client(orchestrator.address) as client:
            drafted = await client.generate([5, 6, 7], Options(max_tokens=TOKENS, ignore_eos=True))
            plain = await client.generate([5, 6, 7], Options(max_tokens=TOKENS, ignore_eos=True, speculation="off"))
    assert drafted.token_ids == plain.token_ids
    counts, origins = drafted.speculation, drafted.speculation.origins
    assert origins["fresh"].rounds > 0
    assert origins.keys() <= {"fresh", "left_over", "rerooted", "ahead"}
    assert sum(one.rounds for one in origins.values()) == counts.rounds_drafted_by_depth[0]
    assert sum(one.draft_tokens for one in origins.values()) == counts.draft_tokens
    assert sum(one.accepted_tokens for one in origins.values()) == counts.accepted_tokens
    assert plain.speculation.origins == {}
    # Passes lie apart, and waiting for drafts is a part of that.
    assert plain.timing.bubble_ms > 0
    assert drafted.timing.linger_ms <= drafted.timing.bubble_ms < drafted.timing.total_ms
