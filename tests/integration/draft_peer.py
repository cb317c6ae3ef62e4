"""The other side of a drafter's stream."""

from __future__ import annotations

import grpc
from google.rpc import code_pb2

from coppice.core.tree import TokenTree
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, sampling_pb2
from coppice.wire.convert import tree_from_proto

PROMPT = (4, 8, 15, 16, 23)
TIMEOUT_S = 20.0
Stub = drafter_pb2_grpc.DrafterServiceStub


class Peer:
    """One stream, from the caller's side."""

    def __init__(self, stub: Stub) -> None:
        self.call = stub.Draft(timeout=TIMEOUT_S)

    async def send(self, sequence_id: int, **event: object) -> None:
        await self.call.write(pb.DraftRequest(sequence_id=sequence_id, **event))

    async def open(
        self, sequence_id: int, prompt: tuple[int, ...] = PROMPT, max_nodes: int = 8, **sampling: object
    ) -> None:
        message = pb.OpenDraft(
            prompt_token_ids=prompt, sampling=sampling_pb2.SamplingParams(**sampling), max_nodes=max_nodes
        )
        await self.send(sequence_id, open=message)

    async def commit(self, sequence_id: int, base_length: int, *token_ids: int, **fields: object) -> None:
        await self.send(sequence_id, outcome=pb.DraftOutcome(base_length=base_length, token_ids=token_ids, **fields))

    async def tree(self, sequence_id: int, base_length: int) -> TokenTree:
        response = await self.call.read()
        assert response.WhichOneof("event") == "tree", response
        assert (response.sequence_id, response.tree.base_length) == (sequence_id, base_length)
        assert response.tree.draft_us > 0
        assert not response.tree.assumed_token_ids
        return tree_from_proto(response.tree.tree)

    async def ahead(self, sequence_id: int) -> list[tuple[int, tuple[int, ...], TokenTree]]:
        """Base length, assumed tokens and tree of each that was drafted ahead."""
        response = await self.call.read()
        assert response.WhichOneof("event") == "ahead", response
        assert response.sequence_id == sequence_id
        trees = response.ahead.trees
        return [(one.base_length, tuple(one.assumed_token_ids), tree_from_proto(one.tree)) for one in trees]

    async def error(self, sequence_id: int) -> tuple[str, str]:
        response = await self.call.read()
        assert response.WhichOneof("event") == "error", response
        assert response.sequence_id == sequence_id
        return code_pb2.Code.Name(response.error.code), response.error.message

    async def finish(self) -> list[pb.DraftResponse]:
        """End our side; what else the server says before it ends its own."""
        await self.call.done_writing()
        rest = []
        while (response := await self.call.read()) is not grpc.aio.EOF:
            rest.append(response)
        assert await self.call.code() == grpc.StatusCode.OK
        return rest
