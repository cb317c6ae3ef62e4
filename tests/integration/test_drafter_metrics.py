"""A drafter's metrics beside what its peer was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from coppice.net import rpc
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc
from coppice.wire.convert import tree_to_proto
from drafter_svc.drafters.base import AheadDraft, DrafterInfo
from drafter_svc.metrics import drafter_metrics
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.model.prefix_blocks import PrefixBlocks
from drafter_svc.service import SERVICE_NAME, DrafterService
from tests.fakes import eventually
from tests.integration.draft_peer import PROMPT, Peer
from tests.metrics import values

INFO = DrafterInfo("chain", "none", "", vocab_size=50, max_length=64)


@dataclass
class ChainSequence:
    """Always drafts as many nodes as it may, and for one outcome ahead; fails when it is to take in a 49."""

    drafts_ahead = True
    expected: TokenTree | None = None

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        if 49 in token_ids:
            raise InvalidRequestError("outcome.token_ids", "no")

    def read(self, max_pieces: int) -> int:
        return 0

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        return chain([1] * max_nodes)

    def expect(self, tree: TokenTree) -> None:
        self.expected = tree

    def ahead(self) -> tuple[AheadDraft, ...]:
        tree, self.expected = self.expected, None
        return () if tree is None else (AheadDraft((*tree.token_ids, 2), -0.5, chain([1, 1])),)

    def prepare(self) -> bool:
        return False


class ChainDrafter:
    """A drafter without a model."""

    info = INFO
    prefixes = PrefixBlocks(0)

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> ChainSequence:
        return ChainSequence()

    def warm_up(self) -> None: ...


@pytest.fixture
async def service() -> AsyncIterator[DrafterService]:
    thread = ModelThread()
    thread.start()
    yield DrafterService(ChainDrafter(), thread, max_nodes=8, max_sequences=2)
    await asyncio.to_thread(thread.stop)


def read(service: DrafterService) -> dict[str, float]:
    return values(drafter_metrics(service), "coppice_drafter_")


async def test_counts_are_those_of_what_was_sent(service: DrafterService) -> None:
    server = rpc.Server([SERVICE_NAME])
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        peer = Peer(drafter_pb2_grpc.DrafterServiceStub(channel))
        await peer.open(1, max_nodes=4)
        tree = await peer.tree(1, 5)
        assert len(tree) == 4
        # For the newest length it is drafted ahead; what comes late, or for a sequence that is gone, is dropped.
        await peer.send(7, expect=pb.Expect(base_length=5))
        await peer.send(1, expect=pb.Expect(base_length=4, tree=tree_to_proto(tree)))
        await peer.send(1, expect=pb.Expect(base_length=5, tree=tree_to_proto(tree)))
        [(base, assumed, ahead)] = await peer.ahead(1)
        assert (base, assumed, len(ahead)) == (5, (1, 1, 1, 1, 2), 2)
        await peer.open(2, max_nodes=2)
        assert len(await peer.tree(2, 5)) == 2
        await peer.open(3)
        assert (await peer.error(3))[0] == "RESOURCE_EXHAUSTED"
        assert read(service)["sequences"] == 2
        await peer.commit(1, len(PROMPT), 49)
        assert (await peer.error(1))[0] == "INVALID_ARGUMENT"
        await peer.commit(1, 6, 3)
        assert (await peer.error(1))[0] == "NOT_FOUND"
        await eventually(lambda: read(service)["sequences"] == 1)
        await peer.finish()
    await server.stop(0)
    found = read(service)
    assert found["info,kind=chain"] == 1
    assert found["prompt_tokens_total"] == 2 * len(PROMPT)
    assert found["opened_sequences_total"] == 2
    assert found["ahead_drafts_total"] == found["expectations_total,result=drafted_for"] == 1
    assert found["expectations_total,result=dropped"] == 2
    assert {key.partition("=")[2]: value for key, value in found.items() if key.startswith("failed") and value} == {
        "resource_exhausted": 1,
        "invalid_argument": 1,
        "not_found": 1,
    }
    assert found["sequences"] == found["waiting_jobs"] == 0
    assert (found["draft_nodes_count"], found["draft_nodes_sum"]) == (2, 6)
    assert found["draft_seconds_count"] == found["queue_seconds_count"] == 2
    assert 0 < found["queue_seconds_sum"] < 5
