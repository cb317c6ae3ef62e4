"""The other side of a drafter's stream: one sequence, told what a recorded output says."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.contenders import BenchmarkError
from benchmarks.profile.verifier_peer import Known
from coppice.tree import ROOT, TokenTree
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, sampling_pb2
from coppice.wire import tree_from_proto

TIMEOUT_S = 120.0

# Of a draft and of what the output says behind its root.
NumCommitted = Callable[[TokenTree, Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class DraftSeen:
    """One draft: its tree, how long the drafter says that it took, and how long the answer did."""

    tree: TokenTree
    num_unread: int
    draft_s: float
    answer_s: float


class DrafterPeer:
    """Opens a call per output."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = drafter_pb2_grpc.DrafterServiceStub(channel)

    async def every_position(self, known: Known, max_nodes: int, row_multiple: int) -> list[DraftSeen]:
        """The tree behind the first n tokens of the output, for each n but its length."""
        return await self._walk(known, max_nodes, row_multiple, lambda _tree, _said: 1)

    async def rounds(self, known: Known, max_nodes: int) -> list[DraftSeen]:
        """The tree of each round, if rounds accept of it what the output says."""
        return await self._walk(known, max_nodes, 1, lambda tree, said: 1 + num_right(tree, said))

    async def _walk(
        self, known: Known, max_nodes: int, row_multiple: int, num_committed: NumCommitted
    ) -> list[DraftSeen]:
        call = self._stub.Draft(timeout=TIMEOUT_S)
        opening = pb.OpenDraft(
            prompt_token_ids=known.prompt,
            sampling=sampling_pb2.SamplingParams(temperature=0.0),
            max_nodes=max_nodes,
            row_multiple=row_multiple,
            # The reading of the prompt is timed, too.
            cache_salt=uuid.uuid4().hex,
        )
        seen = [await _ask(call, pb.DraftRequest(sequence_id=1, open=opening), len(known.prompt))]
        position = 0
        while True:
            count = num_committed(seen[-1].tree, known.said[position:])
            if position + count >= len(known.said):
                break
            outcome = pb.DraftOutcome(
                base_length=len(known.prompt) + position, token_ids=known.said[position : position + count]
            )
            seen.append(await _ask(call, pb.DraftRequest(sequence_id=1, outcome=outcome), 1))
            position += count
        call.cancel()
        return seen


async def _ask(
    call: grpc.aio.StreamStreamCall[pb.DraftRequest, pb.DraftResponse], request: pb.DraftRequest, num_unread: int
) -> DraftSeen:
    started_s = time.perf_counter()
    await call.write(request)
    response: Any = await call.read()
    if response is grpc.aio.EOF or response.WhichOneof("event") != "tree":
        raise BenchmarkError(f"a drafter failed: {response}")
    answer_s = time.perf_counter() - started_s
    return DraftSeen(tree_from_proto(response.tree.tree), num_unread, response.tree.draft_us / 1e6, answer_s)


def num_right(tree: TokenTree, said: Sequence[int]) -> int:
    """How many nodes from the root down are what was said."""
    node = ROOT
    for count, token in enumerate(said):
        child = tree.children.get((node, token))
        if child is None:
            return count
        node = child
    return len(said)
