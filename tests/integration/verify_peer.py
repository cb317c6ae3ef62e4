"""The other side of a verifier's stream."""

from __future__ import annotations

import grpc

from coppice.core.tree import chain
from coppice.v1 import sampling_pb2, tree_pb2, verifier_pb2_grpc
from coppice.v1 import verifier_pb2 as pb
from coppice.wire.convert import tree_to_proto

PROMPT = (4, 8, 15, 16, 23)
TIMEOUT_S = 30.0
Stub = verifier_pb2_grpc.VerifierServiceStub


class Peer:
    """One stream, from the orchestrator's side."""

    def __init__(self, stub: Stub) -> None:
        self.call = stub.Verify(timeout=TIMEOUT_S)

    async def open(
        self,
        sequence_id: int = 1,
        prompt: tuple[int, ...] = PROMPT,
        sampling: sampling_pb2.SamplingParams | None = None,
        stopping: sampling_pb2.StoppingOptions | None = None,
        **fields: object,
    ) -> None:
        message = pb.OpenSequence(
            prompt_token_ids=prompt,
            sampling=sampling,
            stopping=stopping or sampling_pb2.StoppingOptions(max_tokens=12, ignore_eos=True),
            **fields,
        )
        await self.call.write(pb.VerifyRequest(sequence_id=sequence_id, open=message))

    async def draft(self, base_length: int, tree: tree_pb2.TokenTree, sequence_id: int = 1) -> None:
        draft = pb.Draft(base_length=base_length, tree=tree)
        await self.call.write(pb.VerifyRequest(sequence_id=sequence_id, draft=draft))

    async def next(self) -> pb.VerifyResponse:
        """The next response that is not a load report."""
        while True:
            response = await self.call.read()
            assert response is not grpc.aio.EOF
            if response.WhichOneof("event") != "load":
                return response

    async def error(self) -> pb.SequenceError:
        response = await self.next()
        assert response.WhichOneof("event") == "error", response
        return response.error

    async def run(self, drafts: list[int] | None = None, sequence_id: int = 1) -> tuple[list[int], int]:
        """Token ids until the sequence finishes, and its rounds; drafts the known continuation when there is one."""
        tokens: list[int] = []
        rounds = 0
        while True:
            response = await self.next()
            assert response.sequence_id == sequence_id
            if response.WhichOneof("event") == "finished":
                return tokens, rounds
            outcome = response.outcome
            assert response.WhichOneof("event") == "outcome", response
            tokens += outcome.token_ids
            rounds += 1
            if drafts is not None:
                base = outcome.base_length + len(outcome.token_ids)
                await self.draft(base, tree_to_proto(chain(drafts[len(tokens) :][:4])), sequence_id)
