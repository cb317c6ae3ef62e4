"""An orchestrator that gives any answer, and its good ones, for gateways."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from coppice.v1 import inference_pb2, sampling_pb2, tree_pb2
from tests.faults.messages import mangled_bytes, mutated, random_message
from tests.grpc_listener import listening

MODEL = "toy"
TEXT = "abc"
# Of calls: those without an end, whose clients wait for their deadline.
SILENT_SHARE = 0.01
# Trailers of failed calls that hold no details.
_DETAILS = ((), (("grpc-status-details-bin", b"\xff\xff"),), (("grpc-status-details-bin", b"\x1a\x02\x0a\x7f"),))


def model_info() -> inference_pb2.GetModelInfoResponse:
    """A model with reasoning."""
    return inference_pb2.GetModelInfoResponse(
        model=MODEL, vocab_size=257, max_context_tokens=400, call_format="hermes", reasoning="tags"
    )


def output(index: int = 0) -> list[inference_pb2.GenerateResponse]:
    """Messages of an output that says `TEXT`."""
    messages = [
        inference_pb2.GenerateResponse(
            output_index=index,
            text=letter,
            token_ids=[ord(letter)],
            log_probs=[
                inference_pb2.TokenLogProbs(
                    log_prob=-0.5,
                    top_token_ids=[ord(letter), 0],
                    top_log_probs=[-0.5, -2.0],
                    token=letter.encode(),
                    top_tokens=[letter.encode(), b"\0"],
                )
            ],
        )
        for letter in TEXT
    ]
    messages[0].request_id, messages[0].seed, messages[0].prompt_tokens = "one", 7, 2
    messages.append(
        inference_pb2.GenerateResponse(
            output_index=index,
            finished=inference_pb2.Finished(reason=sampling_pb2.FINISH_REASON_LENGTH),
            usage=inference_pb2.Usage(prompt_tokens=2, completion_tokens=len(TEXT)),
            speculation=inference_pb2.SpeculationStats(rounds=2),
            timing=inference_pb2.Timing(ttft_ms=1.0),
        )
    )
    return messages


def round_event() -> inference_pb2.WatchRoundsResponse:
    """A round with a tree of two nodes."""
    tree = tree_pb2.TokenTree(
        token_ids=[97, 98], parents=[-1, 0], log_probs=[-0.5, -1.0], sources=[1, 1], source_names=["small-lm"]
    )
    return inference_pb2.WatchRoundsResponse(
        round=inference_pb2.RoundReport(
            request_id="one",
            token_ids=[97],
            tokens=[b"a"],
            tree=tree,
            node_tokens=[b"a", b"b"],
            node_states=[inference_pb2.NODE_STATE_ACCEPTED, inference_pb2.NODE_STATE_REJECTED],
        )
    )


def good_answer(method: str, request: bytes) -> list[Message]:
    """Messages of a good answer to a call."""
    if method == "Generate":
        asked = inference_pb2.GenerateRequest.FromString(request)
        outputs = [output(index) for index in range(asked.num_outputs or 1)]
        return [message for together in zip(*outputs, strict=True) for message in together]
    answers: dict[str, list[Message]] = {
        "GetModelInfo": [model_info()],
        "Tokenize": [inference_pb2.TokenizeResponse(token_ids=[97, 98], tokens=[b"a", b"b"])],
        "Detokenize": [inference_pb2.DetokenizeResponse(text="ab")],
        "WatchRounds": [round_event(), inference_pb2.WatchRoundsResponse(load=inference_pb2.LoadReport(running=1))],
    }
    return answers[method]


@dataclass
class HostileOrchestrator(grpc.GenericRpcHandler):
    """Gives good answers; while it has a `chance`, those of `hostile_answer`; while it has a `lie`, those."""

    chance: random.Random | None = None
    lie: Callable[[str, list[Message]], list[Message]] | None = None
    num_hostile: int = 0
    silent: asyncio.Event = field(default_factory=asyncio.Event)

    def service(self, handler_call_details: Any) -> Any:
        """Handle any method: a single answer is a stream of one message."""
        method = handler_call_details.method.rpartition("/")[2]

        async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
            messages = good_answer(method, request)
            if self.lie is not None:
                messages = self.lie(method, messages)
            if self.chance is None:
                for message in messages:
                    yield message.SerializeToString()
                return
            self.num_hostile += 1
            for data in hostile_answer(messages, self.chance):
                yield data
            await self._end(method, context, self.chance)

        return grpc.unary_stream_rpc_method_handler(answer)

    async def _end(self, method: str, context: Any, chance: random.Random) -> None:
        if method == "Generate" and chance.random() < SILENT_SHARE:
            await asyncio.sleep(math.inf)
        if chance.random() < 0.15:
            codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
            details = chance.choice(("", "prompt: no", "x" * 2_000, "\u202e\n"))
            await context.abort(chance.choice(codes), details, chance.choice(_DETAILS))


def hostile_answer(good: list[Message], chance: random.Random) -> list[bytes]:
    """An answer of which messages are changed, mangled, missing, of anywhere else, or there twice."""
    messages: list[bytes] = []
    for message in good:
        choice = chance.random()
        if choice < 0.75:
            messages.append(message.SerializeToString())
        elif choice < 0.85:
            messages.append(mutated(message, chance).SerializeToString())
        elif choice < 0.9:
            messages.append(mangled_bytes(message.SerializeToString(), chance))
        elif choice < 0.95:
            messages += [random_message(type(message), chance).SerializeToString(), message.SerializeToString()]
    if chance.random() < 0.1:
        messages.append(chance.choice(good).SerializeToString())
    if chance.random() < 0.1:
        chance.shuffle(messages)
    return messages


@contextlib.asynccontextmanager
async def orchestrating(hostile: HostileOrchestrator) -> AsyncIterator[str]:
    """Serve on a free port while the context is open; gives the address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((hostile,))
    async with listening(server) as address:
        yield address
