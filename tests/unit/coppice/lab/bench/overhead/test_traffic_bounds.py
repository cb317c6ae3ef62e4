"""What a round of 64 nodes costs on the wire: counted by scripted peers of the real orchestrator, in this process."""

from __future__ import annotations

import pytest

from coppice.client import Client
from coppice.lab.bench.overhead.peers import (
    DRAFT_IN,
    DRAFT_ON,
    OUTCOME_IN,
    OUTCOME_ON,
    RunSettings,
    Traffic,
    load,
    make_script,
    serve,
)
from orchestrator.app import running
from orchestrator.config import Config

NODES, ROUNDS = 64, 60
MOST_BYTES, MOST_MESSAGES = 2048, 2
WAYS = (OUTCOME_IN, OUTCOME_ON, DRAFT_IN, DRAFT_ON)


async def traffic_of(*, repeats: bool, drafts_ahead: bool = False) -> Traffic:
    """One request's rounds; where the text repeats, the prefix cache adds a tree of its own to every draft."""
    script = make_script()
    script.num_nodes, script.repeats = NODES, repeats
    servers, addresses = await serve(script, drafts_ahead=drafts_ahead)
    config = Config(
        verifier_address=addresses["verifier"],
        drafter_addresses=(addresses["drafter"],),
        require_drafters=True,
        max_nodes=NODES,
        cache_drafter=repeats,
        connect_timeout_s=20.0,
        grace_s=0.0,
    )
    try:
        async with running(config) as orchestrator, Client(orchestrator.address) as client:
            settings = RunSettings(orchestrator.address, 1, ROUNDS, 0, NODES, repeats)
            await load(client, settings, ROUNDS, first_seed=1)
    finally:
        for server in servers:
            await server.stop(0.0)
    return script.traffic


@pytest.mark.parametrize(("repeats", "drafts_ahead"), [(False, False), (True, False), (False, True)])
async def test_a_round_of_64_nodes_is_at_most_2_messages_and_2_kilobytes_each_way_per_peer(
    *, repeats: bool, drafts_ahead: bool
) -> None:
    traffic = await traffic_of(repeats=repeats, drafts_ahead=drafts_ahead)
    assert traffic.num_rounds > ROUNDS / 2
    # A draft that is smaller than 64 nodes would prove nothing.
    assert traffic.largest[DRAFT_IN] > NODES * 6
    for way in WAYS:
        assert traffic.messages[way] <= MOST_MESSAGES * traffic.num_rounds, way
        assert traffic.largest[way] <= MOST_BYTES, way
        assert traffic.bytes[way] <= MOST_BYTES * traffic.num_rounds, way
    # What to expect, and what was drafted ahead.
    if drafts_ahead:
        assert all(traffic.messages[way] > 1.5 * traffic.num_rounds for way in (OUTCOME_ON, DRAFT_IN))
