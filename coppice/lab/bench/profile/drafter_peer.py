"""The other side of a drafter's stream: one sequence, told what a recorded output says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from coppice.core.tree import TokenTree
from coppice.lab.bench.contenders import BenchmarkError
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, sampling_pb2
from coppice.wire.convert import tree_from_proto

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and its greedy output."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]


class DrafterPeer:
    """Opens a call per output."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = drafter_pb2_grpc.DrafterServiceStub(channel)

    async def every_position(self, known: Known, max_nodes: int, row_multiple: int) -> list[TokenTree]:
        """The tree behind the first n tokens of the output, for each n but its length."""
        call = self._stub.Draft(timeout=TIMEOUT_S)
        opening = pb.OpenDraft(
            prompt_token_ids=known.prompt,
            sampling=sampling_pb2.SamplingParams(temperature=0.0),
            max_nodes=max_nodes,
            row_multiple=row_multiple,
        )
        trees = [await _ask(call, pb.DraftRequest(sequence_id=1, open=opening))]
        for position, token in enumerate(known.said[:-1]):
            outcome = pb.DraftOutcome(base_length=len(known.prompt) + position, token_ids=[token])
            trees.append(await _ask(call, pb.DraftRequest(sequence_id=1, outcome=outcome)))
        call.cancel()
        return trees


async def _ask(
    call: grpc.aio.StreamStreamCall[pb.DraftRequest, pb.DraftResponse], request: pb.DraftRequest
) -> TokenTree:
    await call.write(request)
    response: Any = await call.read()
    if response is grpc.aio.EOF or response.WhichOneof("event") != "tree":
        raise BenchmarkError(f"a drafter failed: {response}")
    return tree_from_proto(response.tree.tree)
