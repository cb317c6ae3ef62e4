"""gRPC service of the verifier."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from coppice.net.rpc import conversing, unary
from coppice.net.stream_observer import StreamObserver
from coppice.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.version import VERSION
from coppice.wire.message_sizes import LISTED_ID_BYTES, SAMPLING_BYTES, STOPPING_BYTES, TREE_BYTES, MessageSizes
from verifier_svc.engine.engine import Engine
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.stream.events import DrainEvent
from verifier_svc.stream.verify_stream import VerifyStream

ACCEPTANCE_RULES = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)

_INSTANCE_ID_BYTES = 8

Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves one engine to any number of orchestrators."""

    def __init__(
        self,
        engine: Engine,
        info: TargetInfo,
        max_nodes: int,
        hardware: str = "",
        observe: Sequence[Callable[[], StreamObserver]] = (),
        target_revision: str = "",
    ) -> None:
        """`observe` are factories of observers, called for every stream."""
        self._observe = observe
        self._engine = engine
        self._info = info
        self._max_nodes = max_nodes
        self._hardware = hardware
        self._target_revision = target_revision
        self._instance_id = secrets.token_hex(_INSTANCE_ID_BYTES)
        self._streams = itertools.count()
        self._open: set[VerifyStream] = set()

    def drain(self) -> None:
        """Tell all orchestrators that this verifier is stopping."""
        for stream in self._open:
            stream.deliver([DrainEvent()])

    async def Verify(self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Context) -> None:
        """One orchestrator's stream."""
        async with conversing(context):
            observers = [make() for make in self._observe]
            stream = VerifyStream(self._engine, self._info, next(self._streams), context.write, observers)
            self._open.add(stream)
            try:
                await stream.converse(request_iterator)
            finally:
                self._open.discard(stream)

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
            hardware=self._hardware,
            instance_id=self._instance_id,
            redraft_nodes=info.redraft.max_nodes if info.redraft is not None else 0,
            lookup_nodes=info.lookup.max_nodes if info.lookup is not None else 0,
            head_nodes=info.head.max_nodes if info.head is not None else 0,
            feature_size=info.feature_size,
            feature_layers=info.feature_layers,
            feature_layer_size=info.feature_size // max(1, len(info.feature_layers)),
            dtype=info.dtype,
            quantization=info.quantization,
            weights_fingerprint=info.weights_fingerprint,
            serving_fingerprint=info.serving_fingerprint,
            target_revision=self._target_revision,
        )

    @unary
    async def GetTokenizer(
        self, request: verifier_pb2.GetTokenizerRequest, context: Context
    ) -> verifier_pb2.GetTokenizerResponse:
        """The target's tokenizer."""
        return verifier_pb2.GetTokenizerResponse(
            tokenizer_json=self._info.tokenizer_json,
            tokenizer_fingerprint=self._info.tokenizer_fingerprint,
            chat_template=self._info.chat_template,
            special_tokens=self._info.special_tokens,
        )


# For fields without limits of their own: ids, traces, numbers.
_OTHER_BYTES = 16 * 1024


def request_sizes(max_context: int) -> MessageSizes:
    """Size limits of the fields of a VerifyRequest for contexts of `max_context` tokens, lists packed."""
    most_bytes = {
        "open.prompt_token_ids": LISTED_ID_BYTES * max_context,
        "open.sampling": SAMPLING_BYTES,
        "open.stopping": STOPPING_BYTES,
        "draft.tree": TREE_BYTES,
    }
    return MessageSizes(verifier_pb2.VerifyRequest, most_bytes)


def max_request_bytes(max_context: int) -> int:
    """Upper bound of a VerifyRequest in bytes for contexts of `max_context` tokens: an opening, or a draft."""
    opening = LISTED_ID_BYTES * max_context + SAMPLING_BYTES + STOPPING_BYTES
    return max(opening, TREE_BYTES) + _OTHER_BYTES
