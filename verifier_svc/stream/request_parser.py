"""Validates an orchestrator's messages, before anything is allocated, and passes them to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coppice.core.errors import CoppiceError, InvalidRequestError, UnsupportedError
from coppice.core.feature_layers import MOST_PROMPT_FEATURES
from coppice.core.log_probs import check_top_log_probs
from coppice.core.sampling import check_token_ids
from coppice.core.tree import TokenTree
from coppice.obs.logs import check_request_id
from coppice.v1 import sampling_pb2, verifier_pb2
from coppice.wire.convert import samples_drafts, sampling_from_proto, stopping_from_proto, tree_from_proto
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.stream.events import DraftRejection, ErrorEvent, Event


class RequestParser:
    """Parser of one stream's messages. Errors go to `tell` and fail only their own sequence or draft.

    Drafts of sequences that are not open are dropped unread: sequences end while drafts are under way.
    """

    def __init__(self, engine: Engine, info: TargetInfo, stream: int, tell: Callable[[Sequence[Event]], None]) -> None:
        self._engine = engine
        self._info = info
        self._stream = stream
        self._tell = tell
        # Sequences opened, and not closed, finished or failed yet.
        self._open: set[int] = set()

    def take(self, request: verifier_pb2.VerifyRequest) -> None:
        """Execute a message, or report its error."""
        key = SequenceKey(self._stream, request.sequence_id)
        try:
            self._carry_out(key, request)
        except CoppiceError as error:
            self._tell([ErrorEvent(key.sequence_id, error)])

    def ended(self, sequence_id: int) -> None:
        """Note that a sequence has finished or failed."""
        self._open.discard(sequence_id)

    def _carry_out(self, key: SequenceKey, request: verifier_pb2.VerifyRequest) -> None:
        kind = request.WhichOneof("event")
        if kind == "open":
            self._engine.open(key, self._spec(request.open))
            self._open.add(key.sequence_id)
        elif kind == "draft":
            if key.sequence_id in self._open:
                self._submit(key, request.draft)
        elif kind == "close":
            self._open.discard(key.sequence_id)
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
        check_request_id(message.request_id)
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
            synchronous=message.synchronous,
            max_redraft_nodes=message.max_redraft_nodes,
            max_lookup_nodes=message.max_lookup_nodes,
            max_head_nodes=message.max_head_nodes,
            request_id=message.request_id,
            wants_features=message.want_features,
            max_prompt_features=min(message.max_prompt_features, MOST_PROMPT_FEATURES) if message.want_features else 0,
        )

    def _check_offered(self, message: verifier_pb2.OpenSequence) -> None:
        if message.exactness == sampling_pb2.EXACTNESS_STRICT and not self._info.exact:
            raise UnsupportedError("exactness: this verifier runs in fast mode")
        if message.want_features and not self._info.feature_size:
            raise UnsupportedError("want_features: this verifier does not give the target's hidden states")
        if message.max_redraft_nodes and self._info.redraft is None:
            raise UnsupportedError("max_redraft_nodes: this verifier has no adapter to re-draft with")
        if message.max_lookup_nodes and self._info.lookup is None:
            raise UnsupportedError("max_lookup_nodes: this verifier makes no drafts by prompt lookup")
        if message.max_head_nodes and self._info.head is None:
            raise UnsupportedError("max_head_nodes: this verifier has no head that drafts")

    def _submit(self, key: SequenceKey, message: verifier_pb2.Draft) -> None:
        linger_s = message.linger_us / 1e6 if message.HasField("linger_us") else None
        try:
            tree = self._tree(message)
        except InvalidRequestError as error:
            self._tell([DraftRejection(key.sequence_id, message.base_length, error)])
            return
        self._engine.submit(key, Draft(message.base_length, tree, message.budget or None, linger_s, message.ahead))

    def _tree(self, message: verifier_pb2.Draft) -> TokenTree:
        tree = tree_from_proto(message.tree)
        check_token_ids("draft.tree.token_ids", tree.token_ids, self._info.vocab_size)
        for distribution in tree.distributions:
            if distribution is not None:
                name = "draft.tree.distribution_token_ids"
                check_token_ids(name, distribution.token_ids, self._info.vocab_size)
        return tree
