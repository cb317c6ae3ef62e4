"""A drafter is told the features of the tokens that it is told, whatever it knows already, and of prompts."""

from __future__ import annotations

import pytest

from coppice.v1 import drafter_pb2
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.request.rounds import Outcome

ROWS = (b"aaaa", b"bbbb", b"cccc")


def outcome(features: bytes) -> Outcome:
    """Three tokens behind ten."""
    return Outcome(
        base_length=10,
        token_ids=(7, 8, 9),
        num_accepted=2,
        draft_nodes=2,
        draft_depth=2,
        redraft_nodes=0,
        features=features,
        pass_rows=1,
        pass_us=1,
        linger_us=0,
        stale_drafts=0,
    )


@pytest.mark.parametrize(
    ("known", "features", "expected"),
    [
        (10, b"".join(ROWS), b"".join(ROWS)),
        (12, b"".join(ROWS), ROWS[2]),
        (13, b"".join(ROWS), b""),
        # Those of the last tokens are all that is known, as where several rounds are told at once.
        (10, ROWS[2], ROWS[2]),
        (12, ROWS[1] + ROWS[2], ROWS[2]),
        (10, b"", b""),
        # What makes no sense is the drafter's to refuse.
        (10, b"aaa", b"aaa"),
    ],
)
@pytest.mark.parametrize("needs_features", [True, False])
async def test_features_are_those_of_the_tokens_that_are_told(
    known: int, features: bytes, expected: bytes, needs_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = DrafterClient("127.0.0.1:1", "fingerprint")
    client.needs_features, client.feature_size = needs_features, 2
    sent: list[drafter_pb2.DraftRequest] = []
    monkeypatch.setattr(client.stream, "send", lambda message, *_: sent.append(message))
    client._lengths[1], client._limits[1] = known, (4, 1)
    client.outcome(1, outcome(features), 4, 1)
    [request] = sent
    assert tuple(request.outcome.token_ids) == (7, 8, 9)[known - 10 :]
    assert request.outcome.features == (expected if needs_features else b"")
    await client.close()


@pytest.mark.parametrize(("reads", "is_open"), [(512, True), (0, True), (512, False)])
async def test_features_of_a_prompt_go_to_drafters_that_read_them(
    reads: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = DrafterClient("127.0.0.1:1", "fingerprint")
    client.max_prompt_features = reads
    sent: list[drafter_pb2.DraftRequest] = []
    monkeypatch.setattr(client.stream, "send", lambda message, *_: sent.append(message))
    if is_open:
        client._lengths[1], client._limits[1] = 10, (4, 1)
    client.show_prompt(1, 3, ROWS[0])
    assert len(sent) == (reads > 0 and is_open)
    for request in sent:
        assert (request.prompt_features.first_token, request.prompt_features.features) == (3, ROWS[0])
    await client.close()
