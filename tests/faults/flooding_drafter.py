"""A drafter that sends trees unasked, as fast as they are taken: a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

from coppice.v1 import drafter_pb2
from coppice.wire.convert import tree_to_proto
from tests.fakes import FakeDrafter, perfect, serving

KIND = "flood"
# Valid trees of the open sequences, trees of sequences that there are not, and trees of 20 MB for both.
FLOODS = ("valid", "unknown", "huge")
HUGE_NODES = 5_000_000
# No orchestrator gets that far in a test.
UNKNOWN_ID = 10**9


class FloodingDrafter(FakeDrafter):
    """Answers nothing: it just sends, from the stream's beginning on."""

    def __init__(self, flood: str) -> None:
        super().__init__(kind=KIND)
        self._flood = flood
        self._propose = perfect()

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:  # noqa: N802
        sequences: dict[int, tuple[list[int], int, int]] = {}

        async def read() -> None:
            async for request in requests:
                if request.HasField("close"):
                    sequences.pop(request.sequence_id, None)
                else:
                    self._take(sequences, request)

        reader = asyncio.create_task(read())
        huge = drafter_pb2.DraftTree()
        huge.tree.token_ids.extend([300] * (HUGE_NODES if self._flood == "huge" else 0))
        try:
            for number in itertools.count(UNKNOWN_ID):
                known = list(sequences)
                # Requests are read meanwhile.
                await asyncio.sleep(0 if known or self._flood != "valid" else 0.001)
                if self._flood != "valid":
                    tree = huge if self._flood == "huge" else _tree(self._propose([5], 0, 4), 2)
                    yield drafter_pb2.DraftResponse(sequence_id=number, tree=tree)
                for one in known if self._flood != "unknown" else ():
                    tokens, seed, max_nodes = sequences.get(one, ([5], 0, 4))
                    tree = (
                        huge
                        if self._flood == "huge"
                        else _tree(self._propose(tokens, seed, max_nodes or 4), len(tokens))
                    )
                    message = drafter_pb2.DraftResponse(sequence_id=one, tree=tree)
                    for _ in range(1 if self._flood == "huge" else 50):
                        yield message
        finally:
            reader.cancel()


def _tree(tree: Any, length: int) -> drafter_pb2.DraftTree:
    return drafter_pb2.DraftTree(base_length=length, tree=tree_to_proto(tree))


async def main(flood: str, address: str) -> None:
    """Serve one until the process is ended."""
    async with serving(FloodingDrafter(flood), address):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
