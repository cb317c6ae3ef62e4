"""A drafter whose work between drafts fails: the sequence ends, and nothing else does."""

from __future__ import annotations

from coppice.core.tree import TokenTree, chain
from coppice.v1 import drafter_pb2 as pb
from coppice.wire.convert import tree_to_proto
from drafter_svc.drafters.base import AheadDraft, Drafter, DraftSequence
from tests.integration.draft_peer import Peer
from tests.integration.test_drafter_service import (
    MAX_SEQUENCES,
    BrokenDrafter,
    BrokenSequence,
    RepeatingSequence,
    checkpoint,
    drafter,
    serving,
)

__all__ = ["checkpoint", "drafter"]


class FailsIdle(BrokenSequence):
    """Drafts, and fails in what is done between drafts: where it is told what to expect, or in the work itself."""

    drafts_ahead = True

    def __init__(self, *, expects: bool) -> None:
        self._expects = expects

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        return chain([0])

    def prepare(self) -> bool:
        if self._expects:
            return False
        raise MemoryError("secret detail")

    def expect(self, tree: TokenTree) -> None:
        raise MemoryError("secret detail")

    def ahead(self) -> tuple[AheadDraft, ...]:
        return ()


class FailsIdleDrafter(BrokenDrafter):
    """Its first sequence fails where it is told what to expect, the second in idle work, others at neither."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._sequences = iter([FailsIdle(expects=True), FailsIdle(expects=False)])

    def open(self, prompt: object, sampling: object, cache_salt: str = "") -> DraftSequence:
        return next(self._sequences, RepeatingSequence())


async def test_a_failure_between_drafts_ends_the_sequence_alone(drafter: Drafter) -> None:
    async for stub in serving(FailsIdleDrafter(drafter)):
        peer = Peer(stub)
        await peer.open(1)
        await peer.tree(1, 5)
        await peer.send(1, expect=pb.Expect(base_length=5, tree=tree_to_proto(chain([0]))))
        first = await peer.error(1)
        await peer.open(2)
        await peer.tree(2, 5)
        second = await peer.error(2)
        for code, message in (first, second):
            assert code == "INTERNAL"
            assert message.startswith("internal error, incident ")
        # Both are gone, and have made room for others.
        for sequence_id in (1, 2):
            await peer.commit(sequence_id, 5, 6)
            assert (await peer.error(sequence_id))[0] == "NOT_FOUND"
        for sequence_id in range(3, 3 + MAX_SEQUENCES):
            await peer.open(sequence_id)
            await peer.tree(sequence_id, 5)
        assert await peer.finish() == []
