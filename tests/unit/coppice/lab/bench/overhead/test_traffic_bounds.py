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
    ScriptedDrafter,
    Traffic,
    load,
    make_script,
    serve,
)
from coppice.v1 import drafter_pb2
from coppice.wire.convert import tree_from_proto, tree_to_proto
from orchestrator.app import running
from orchestrator.config import Config

NODES, ROUNDS = 64, 60
MOST_BYTES, MOST_MESSAGES = 2048, 2
AHEAD_TREES = 16
WAYS = (OUTCOME_IN, OUTCOME_ON, DRAFT_IN, DRAFT_ON)


class AheadDrafter(ScriptedDrafter):
    """Drafts for the outcomes of the expected tree's longest paths, `num_nodes` nodes in all."""

    drafts_ahead = True

    def ahead(self, request: drafter_pb2.DraftRequest, seed: int, length: int) -> drafter_pb2.DraftResponse:
        expected = tree_from_proto(request.expect.tree)
        response = drafter_pb2.DraftResponse(sequence_id=request.sequence_id)
        following = self.script.text(seed).draft(length).first(self.script.num_nodes // AHEAD_TREES)
        for path in sorted(expected.paths(), key=len)[-AHEAD_TREES:]:
            assumed = (*path, (path[-1] + 1) % self.script.tokenizer.vocab_size)
            response.ahead.trees.add(
                base_length=length, tree=tree_to_proto(following), assumed_token_ids=assumed, outcome_log_prob=-1.0
            )
        return response


async def traffic_of(*, repeats: bool, drafts_ahead: bool = False) -> Traffic:
    """One request's rounds; where the text repeats, the prefix cache adds a tree of its own to every draft."""
    script = make_script()
    script.num_nodes, script.repeats = NODES, repeats
    servers, addresses = await serve(script, AheadDrafter if drafts_ahead else ScriptedDrafter)
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
