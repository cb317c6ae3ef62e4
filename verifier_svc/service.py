"""VerifierService: messages to commands, events to messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from coppice.errors import CoppiceError, InvalidRequestError, UnsupportedError
from coppice.log_probs import check_top_log_probs
from coppice.rpc import errors_as_status, unary
from coppice.sampling import check_token_ids
from coppice.tree import TokenTree
from coppice.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.version import VERSION
from coppice.wire import samples_drafts, sampling_from_proto, stopping_from_proto, tree_from_proto
from verifier_svc.engine import Engine
from verifier_svc.events import DraftRejection, ErrorEvent, Event
from verifier_svc.responses import responses
from verifier_svc.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.target_model import TargetInfo

# An orchestrator that has stopped reading must not fill our memory.
MAX_UNREAD_BATCHES = 4096
ACCEPTANCE_RULES = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)

Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves one engine to any number of orchestrators."""

    def __init__(self, engine: Engine, info: TargetInfo, max_nodes: int) -> None:
        self._engine = engine
        self._info = info
        self._max_nodes = max_nodes
        self._streams = itertools.count()

    async def Verify(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        """One orchestrator's stream."""
        stream = next(self._streams)
        loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[Sequence[Event] | None] = asyncio.Queue()
        self._engine.attach(stream, lambda events: _call_soon(loop, outbox, list(events)))
        reader = asyncio.create_task(self._read(stream, request_iterator, outbox))
        try:
            async with errors_as_status(context):
                while (events := await outbox.get()) is not None:
                    if outbox.qsize() > MAX_UNREAD_BATCHES:
                        raise InvalidRequestError("stream", "responses are not being read")
                    for event in events:
                        for response in responses(event):
                            yield response
                await reader
        finally:
            self._engine.detach(stream)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    @unary
    async def Describe(
        self, request: verifier_pb2.VerifierServiceDescribeRequest, context: Context
    ) -> verifier_pb2.VerifierServiceDescribeResponse:
        """The target and its limits."""
        info = self._info
        exactness = sampling_pb2.EXACTNESS_STRICT if info.exact else sampling_pb2.EXACTNESS_FAST
        return verifier_pb2.VerifierServiceDescribeResponse(
            model=info.name,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            eos_token_ids=info.eos_token_ids,
            max_nodes=self._max_nodes,
            hidden_size=info.hidden_size,
            exactness=exactness,
            version=VERSION,
            shared_block_tokens=info.shared_block_tokens,
            row_multiple=info.row_multiple,
            acceptance_rules=ACCEPTANCE_RULES,
        )

    @unary
    async def GetTokenizer(
        self, request: verifier_pb2.GetTokenizerRequest, context: Context
    ) -> verifier_pb2.GetTokenizerResponse:
        """The target's tokenizer."""
        return verifier_pb2.GetTokenizerResponse(
            tokenizer_json=self._info.tokenizer_json,
            tokenizer_fingerprint=self._info.tokenizer_fingerprint,
        )

    async def _read(
        self,
        stream: int,
        requests: AsyncIterator[verifier_pb2.VerifyRequest],
        outbox: asyncio.Queue[Sequence[Event] | None],
    ) -> None:
        """Turn messages into commands; a bad one fails its own sequence only."""
        try:
            async for request in requests:
                key = SequenceKey(stream, request.sequence_id)
                try:
                    self._carry_out(key, request, outbox)
                except CoppiceError as error:
                    outbox.put_nowait([ErrorEvent(key.sequence_id, error)])
        finally:
            outbox.put_nowait(None)

    def _carry_out(
        self,
        key: SequenceKey,
        request: verifier_pb2.VerifyRequest,
        outbox: asyncio.Queue[Sequence[Event] | None],
    ) -> None:
        kind = request.WhichOneof("event")
        if kind == "open":
            self._engine.open(key, self._spec(request.open))
        elif kind == "draft":
            self._submit(key, request.draft, outbox)
        elif kind == "close":
            self._engine.close(key)
        else:
            raise InvalidRequestError("event", "is not set")

    def _spec(self, message: verifier_pb2.OpenSequence) -> SequenceSpec:
        prompt = tuple(message.prompt_token_ids)
        limit = self._info.max_context_tokens
        if not prompt:
            raise InvalidRequestError("prompt_token_ids", "is empty")
        if len(prompt) >= limit:
            raise InvalidRequestError(
                "prompt_token_ids",
                f"has {len(prompt)} tokens; the context of {limit} must have room for one more",
            )
        if message.resumed_tokens >= len(prompt):
            raise InvalidRequestError("resumed_tokens", "must leave at least one prompt token")
        sampling = sampling_from_proto(message.sampling)
        stopping = stopping_from_proto(message.stopping)
        if stopping.max_tokens is not None and message.resumed_tokens >= stopping.max_tokens:
            raise InvalidRequestError("resumed_tokens", f"reaches max_tokens {stopping.max_tokens} already")
        check_token_ids("prompt_token_ids", prompt, self._info.vocab_size)
        check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, self._info.vocab_size)
        for name, token_ids in sampling.named_token_ids().items():
            check_token_ids(name, token_ids, self._info.vocab_size)
        check_top_log_probs("top_log_probs", message.top_log_probs)
        traverses = samples_drafts(message.acceptance, sampling.temperature)
        if traverses and sampling.grammar is not None:
            raise UnsupportedError("sampling.grammar: is not offered together with acceptance TRAVERSAL")
        self._check_offered(message)
        return SequenceSpec(
            prompt=prompt,
            sampling=sampling,
            stopping=stopping,
            num_resumed=message.resumed_tokens,
            linger_s=message.linger_us / 1e6,
            priority=message.priority,
            cache_salt=message.cache_salt,
            top_log_probs=message.top_log_probs if message.HasField("top_log_probs") else None,
            traverses=traverses,
        )

    def _check_offered(self, message: verifier_pb2.OpenSequence) -> None:
        if message.exactness == sampling_pb2.EXACTNESS_STRICT and not self._info.exact:
            raise UnsupportedError("exactness: this verifier runs in fast mode")
        if message.want_features or message.max_redraft_nodes:
            raise UnsupportedError("want_features and max_redraft_nodes are not offered by this version")

    def _submit(
        self,
        key: SequenceKey,
        message: verifier_pb2.Draft,
        outbox: asyncio.Queue[Sequence[Event] | None],
    ) -> None:
        linger_s = message.linger_us / 1e6 if message.HasField("linger_us") else None
        try:
            tree = self._tree(message)
        except InvalidRequestError as error:
            outbox.put_nowait([DraftRejection(key.sequence_id, message.base_length, error)])
            return
        self._engine.submit(key, Draft(message.base_length, tree, message.budget or None, linger_s))

    def _tree(self, message: verifier_pb2.Draft) -> TokenTree:
        tree = tree_from_proto(message.tree)
        check_token_ids("draft.tree.token_ids", tree.token_ids, self._info.vocab_size)
        for distribution in tree.distributions:
            if distribution is not None:
                name = "draft.tree.distribution_token_ids"
                check_token_ids(name, distribution.token_ids, self._info.vocab_size)
        return tree


def _call_soon(
    loop: asyncio.AbstractEventLoop, outbox: asyncio.Queue[Sequence[Event] | None], events: list[Event]
) -> None:
    # The loop closes before the engine when the process stops; nobody is left to read then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(outbox.put_nowait, events)
