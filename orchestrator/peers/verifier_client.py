"""Verifier client: one stream for all sequences of this orchestrator."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from coppice.core.errors import (
    CoppiceError,
    IncompatibleError,
    InvalidRequestError,
    InvalidTreeError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from coppice.core.tokenizer import fingerprint
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.net.certificates import Certificates
from coppice.net.rpc import status_code_name
from coppice.obs.logs import of_request
from coppice.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.wire import convert as wire
from coppice.wire.unreadable import received
from orchestrator.peers.peer_channel import Dial, PeerChannel, dial
from orchestrator.peers.peer_stream import MOST_WORDS, PeerStream
from orchestrator.peers.routing import RouteCandidate
from orchestrator.request.rounds import Finish, Outcome, VerifierLoad, VerifyOpening

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
# Verifiers report load ten times a second while passes run; older reports and refusals are ignored.
LOAD_IS_NEWS_S = 1.0
_FINISH_REASONS = frozenset(sampling_pb2.FinishReason.values()) - {sampling_pb2.FINISH_REASON_UNSPECIFIED}


@dataclass(frozen=True)
class VerifierInfo:
    """Model and limits of a verifier."""

    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    max_nodes: int
    exactness: sampling_pb2.Exactness
    version: str
    # Block size of its prefix cache in tokens; 0 without one.
    shared_block_tokens: int
    # Rows of a pass are padded to multiples of this.
    row_multiple: int = 1
    # Every verifier has this rule.
    acceptance_rules: tuple[sampling_pb2.AcceptanceRule, ...] = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW,)
    # Hardware in words, and id of the process; empty if not reported.
    hardware: str = ""
    instance_id: str = ""
    # Most nodes of in-pass re-drafts; 0 if it makes none.
    redraft_nodes: int = 0
    # Most nodes of its drafts by prompt lookup; 0 if it makes none.
    lookup_nodes: int = 0
    # Most nodes of its drafts with a head of its own; 0 without one.
    head_nodes: int = 0
    # Numbers per token in features, and the layers that they are of; 0 and none if it sends none.
    feature_size: int = 0
    feature_layers: tuple[int, ...] = ()
    # As in GetModelInfoResponse; empty where it does not say.
    dtype: str = ""
    quantization: str = ""
    weights_fingerprint: str = ""
    serving_fingerprint: str = ""
    target_revision: str = ""


class VerifierHandler(Protocol):
    """Owner of a sequence. Calls come from the event loop and must be quick."""

    @property
    def request_id(self) -> str: ...

    def opening(self) -> VerifyOpening | None:
        """Message to open the sequence in its current state; None if its output has ended."""

    def finish_if_complete(self) -> bool:
        """End the output if its committed tokens are already complete; returns whether they are."""

    def refused(self) -> int:
        """Count a refusal by a full verifier; returns the refusals since the last outcome."""

    def on_opened(self, place: SequenceHandle) -> None:
        """The sequence was sent to a verifier, which has no other state of it."""

    def on_outcome(self, outcome: Outcome, load: VerifierLoad) -> None:
        """A round is over; `load` is the verifier's latest report."""

    def on_prompt_features(self, first_token: int, features: bytes) -> None:
        """Receive features of the prompt's tokens from `first_token` on."""

    def on_finished(self, finish: Finish) -> None: ...

    def on_failed(self, error: CoppiceError) -> None: ...


class VerifierOwner(Protocol):
    """Decides on the use of verifiers and on their sequences."""

    def check(self, client: VerifierClient, info: VerifierInfo) -> None:
        """Raise IncompatibleError to refuse the verifier."""

    def on_up(self, client: VerifierClient) -> None: ...

    def on_down(self, client: VerifierClient, handlers: Sequence[VerifierHandler]) -> None:
        """The verifier is lost, with the sequences of `handlers`."""

    def on_refused(self, handler: VerifierHandler, error: OverloadedError) -> None:
        """The verifier has no room for a sequence."""

    def on_idle(self, client: VerifierClient) -> None:
        """A draining verifier has no sequence of ours left."""


@dataclass(frozen=True)
class SequenceHandle:
    """A sequence at a verifier. Messages after its end are dropped."""

    verifier: VerifierClient
    sequence_id: int

    def draft(self, base_length: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        """Send the draft for the round at `base_length`; an empty tree means not to wait for one."""
        self.verifier.draft(self.sequence_id, base_length, tree, budget, linger_us)

    def draft_ahead(self, base_length: int, tree: TokenTree) -> None:
        """Send likely outcomes of the round at `base_length` with their continuations."""
        self.verifier.draft_ahead(self.sequence_id, base_length, tree)

    def leave(self) -> None:
        """Close the sequence, unless it has ended already."""
        self.verifier.leave(self.sequence_id)


class VerifierClient:
    """Runs sequences on one verifier; returns them to the owner when the stream is lost, and reconnects."""

    def __init__(
        self, address: str, owner: VerifierOwner, certificates: Certificates | None = None, dial: Dial = dial
    ) -> None:
        self.address = address
        self._owner = owner
        self._channel = PeerChannel(address, verifier_pb2_grpc.VerifierServiceStub, certificates, dial)
        self._ids = itertools.count(1)
        self._handlers: dict[int, VerifierHandler] = {}
        self._info: VerifierInfo | None = None
        self.tokenizer = verifier_pb2.GetTokenizerResponse()
        self.load = VerifierLoad()
        self._load_came_s = -math.inf
        self._refused_s = -math.inf
        # Sequences of other orchestrators, as of the last report.
        self._num_foreign = 0
        # Whether it is about to stop.
        self.is_draining = False
        self.stream: PeerStream[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse] = PeerStream(
            f"verifier {address}", lambda: self._channel.stub.Verify(), self
        )

    @property
    def info(self) -> VerifierInfo:
        """Model and limits of the verifier; available after the first connection."""
        if self._info is None:
            raise UnavailableError(f"the verifier {self.address} has not been connected yet")
        return self._info

    @property
    def is_known(self) -> bool:
        """Whether it has ever been connected."""
        return self._info is not None

    @property
    def num_sequences(self) -> int:
        """Open sequences."""
        return len(self._handlers)

    def candidate(self, known_blocks: int) -> RouteCandidate:
        """Its load as a candidate for a sequence of which it has `known_blocks` blocks cached."""
        if time.monotonic() - self._load_came_s > LOAD_IS_NEWS_S:
            return RouteCandidate(self.num_sequences, known_blocks)
        return RouteCandidate(self.num_sequences + self._num_foreign, known_blocks, self.load.free_kv_blocks)

    @property
    def is_full(self) -> bool:
        """Whether it has refused a sequence within `LOAD_IS_NEWS_S`."""
        return time.monotonic() - self._refused_s <= LOAD_IS_NEWS_S

    async def close(self) -> None:
        """Close the stream."""
        await self.stream.stop()
        await self._channel.close()

    def open(self, handler: VerifierHandler, opening: VerifyOpening) -> None:
        """Open a sequence."""
        sequence_id = next(self._ids)
        self._handlers[sequence_id] = handler
        request = verifier_pb2.VerifyRequest(sequence_id=sequence_id, open=_open_message(opening, self._info))
        self.stream.send(request, sequence_id, request.ByteSize())
        handler.on_opened(SequenceHandle(self, sequence_id))

    def draft(self, sequence_id: int, base_length: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        """Send a draft, unless the sequence has ended."""
        if sequence_id in self._handlers:
            request = verifier_pb2.VerifyRequest(sequence_id=sequence_id)
            request.draft.base_length = base_length
            request.draft.budget = budget
            if linger_us is not None:
                request.draft.linger_us = linger_us
            wire.put_tree(tree, request.draft.tree)
            self.stream.send(request, sequence_id)

    def draft_ahead(self, sequence_id: int, base_length: int, tree: TokenTree) -> None:
        """Send outcomes with continuations, unless the sequence has ended."""
        if sequence_id in self._handlers:
            request = verifier_pb2.VerifyRequest(sequence_id=sequence_id)
            request.draft.base_length = base_length
            request.draft.ahead = True
            wire.put_tree(tree, request.draft.tree)
            self.stream.send(request, sequence_id)

    def leave(self, sequence_id: int) -> None:
        """Close a sequence, unless it has ended already."""
        if sequence_id in self._handlers:
            if not self.stream.withdraw(sequence_id):
                close = verifier_pb2.CloseSequence()
                self.stream.send(verifier_pb2.VerifyRequest(sequence_id=sequence_id, close=close), sequence_id)
            self._forget(sequence_id)

    async def handshake(self) -> None:
        """Fetch the verifier's description and tokenizer, and check them."""
        await self._channel.renew()
        stub = self._channel.stub
        described = await stub.Describe(verifier_pb2.VerifierServiceDescribeRequest(), timeout=HANDSHAKE_TIMEOUT_S)
        info = _info(received(described))
        self._owner.check(self, info)
        if not self.tokenizer.tokenizer_json:
            message = await stub.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=HANDSHAKE_TIMEOUT_S)
            tokenizer = received(message)
            # In a thread: a large vocabulary takes a while.
            actual = await asyncio.to_thread(_fingerprint, tokenizer.tokenizer_json)
            if actual != info.tokenizer_fingerprint:
                raise IncompatibleError(
                    f"the verifier {self.address} sends another tokenizer than it describes: "
                    f"{actual or 'no JSON object'} instead of {info.tokenizer_fingerprint[:64]!a}"
                )
            self.tokenizer = tokenizer
        self._info = info

    def on_up(self) -> None:
        """Take sequences."""
        self._channel.reached()
        self._owner.on_up(self)

    def on_down(self) -> None:
        """Return the sequences to the owner."""
        handlers, self._handlers = list(self._handlers.values()), {}
        self.load, self._load_came_s, self._refused_s, self.is_draining = VerifierLoad(), -math.inf, -math.inf, False
        self._owner.on_down(self, handlers)

    def on_message(self, message: verifier_pb2.VerifyResponse) -> None:
        """Dispatch a message to its sequence; an error only fails that sequence."""
        handler = self._handlers.get(message.sequence_id)
        if handler is None:
            self._on_news(message)
            return
        try:
            self._dispatch(handler, message)
        except CoppiceError as error:
            self._fail(handler, message.sequence_id, error)
        except Exception:  # a bug of ours ends this sequence, not the stream of all
            logger.exception("sequence %d failed", message.sequence_id, extra=of_request(handler.request_id))
            self._fail(handler, message.sequence_id, CoppiceError("internal error"))

    def _dispatch(self, handler: VerifierHandler, message: verifier_pb2.VerifyResponse) -> None:
        match message.WhichOneof("event"):
            case "outcome":
                handler.on_outcome(_outcome(message.outcome), self.load)
            case "prompt_features":
                handler.on_prompt_features(message.prompt_features.first_token, message.prompt_features.features)
            case "finished":
                self._forget(message.sequence_id)
                finished = message.finished
                if finished.reason not in _FINISH_REASONS:
                    raise CoppiceError(f"the verifier ended an output for an unknown reason, {finished.reason}")
                match_text = finished.stop_match if finished.HasField("stop_match") else None
                handler.on_finished(Finish(finished.reason, match_text, finished.queue_us, finished.cached_tokens))
            case "error":
                # The verifier has closed it.
                self._forget(message.sequence_id)
                error = _error(message.error)
                if isinstance(error, OverloadedError):
                    self._refused_s = time.monotonic()
                    self._owner.on_refused(handler, error)
                else:
                    handler.on_failed(error)
            case "draft_rejected":
                told, extra = message.draft_rejected.message[:MOST_WORDS], of_request(handler.request_id)
                logger.warning("the verifier rejected a draft: %s", told, extra=extra)

    def _on_news(self, message: verifier_pb2.VerifyResponse) -> None:
        """Process messages about the verifier itself; those of ended sequences are ignored."""
        event = message.WhichOneof("event")
        if event == "load":
            self.load = _load(message.load)
            self._load_came_s = time.monotonic()
            # The report precedes the ends of our sequences in the same pass, so `_handlers` may be smaller.
            num_open = message.load.running_sequences + message.load.queued_sequences
            self._num_foreign = max(0, num_open - len(self._handlers))
        elif event == "draining":
            logger.info("the verifier %s is about to stop, %d sequences run there", self.address, len(self._handlers))
            self.is_draining = True
            self._leave_if_idle()

    def _forget(self, sequence_id: int) -> None:
        self._handlers.pop(sequence_id, None)
        if self.is_draining:
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self._handlers:
            self._owner.on_idle(self)

    def _fail(self, handler: VerifierHandler, sequence_id: int, error: CoppiceError) -> None:
        self.leave(sequence_id)
        handler.on_failed(error)


def _fingerprint(tokenizer_json: bytes) -> str:
    """Fingerprint of a tokenizer; empty if it is no JSON object."""
    try:
        return fingerprint(tokenizer_json)
    except (ValueError, RecursionError):
        return ""


def _info(described: verifier_pb2.VerifierServiceDescribeResponse) -> VerifierInfo:
    return VerifierInfo(
        model=described.model,
        tokenizer_fingerprint=described.tokenizer_fingerprint,
        vocab_size=described.vocab_size,
        max_context_tokens=described.max_context_tokens,
        eos_token_ids=tuple(described.eos_token_ids),
        max_nodes=described.max_nodes,
        exactness=described.exactness,
        version=described.version,
        shared_block_tokens=described.shared_block_tokens,
        row_multiple=max(1, described.row_multiple),
        acceptance_rules=tuple(described.acceptance_rules) or VerifierInfo.acceptance_rules,
        hardware=described.hardware,
        instance_id=described.instance_id,
        redraft_nodes=described.redraft_nodes,
        lookup_nodes=described.lookup_nodes,
        head_nodes=described.head_nodes,
        feature_size=described.feature_size,
        feature_layers=tuple(described.feature_layers),
        dtype=described.dtype,
        quantization=described.quantization,
        weights_fingerprint=described.weights_fingerprint,
        serving_fingerprint=described.serving_fingerprint,
        target_revision=described.target_revision,
    )


def _load(load: verifier_pb2.Load) -> VerifierLoad:
    return VerifierLoad(load.batch_size, load.rows, load.pass_us, load.queued_sequences, load.free_kv_blocks)


def _open_message(opening: VerifyOpening, info: VerifierInfo | None) -> verifier_pb2.OpenSequence:
    """Message to open a sequence, without features or re-drafts that the verifier does not offer."""
    redraft_nodes, lookup_nodes, head_nodes, feature_size = 0, 0, 0, 0
    if info is not None:
        redraft_nodes, lookup_nodes, head_nodes = info.redraft_nodes, info.lookup_nodes, info.head_nodes
        feature_size = info.feature_size
    wants_features = 0 < opening.feature_size == feature_size
    return verifier_pb2.OpenSequence(
        prompt_token_ids=opening.token_ids,
        sampling=wire.sampling_to_proto(opening.sampling),
        stopping=wire.stopping_to_proto(opening.stopping),
        acceptance=opening.acceptance,
        exactness=opening.exactness,
        linger_us=opening.linger_us,
        resumed_tokens=opening.resumed_tokens,
        priority=opening.priority,
        want_features=wants_features,
        max_prompt_features=opening.max_prompt_features if wants_features else 0,
        cache_salt=opening.cache_salt,
        top_log_probs=opening.top_log_probs,
        request_id=opening.request_id,
        traceparent=opening.traceparent,
        synchronous=opening.synchronous,
        max_redraft_nodes=min(opening.max_redraft_nodes, redraft_nodes),
        max_lookup_nodes=min(opening.max_lookup_nodes, lookup_nodes),
        max_head_nodes=min(opening.max_head_nodes, head_nodes),
    )


def _outcome(message: verifier_pb2.Outcome) -> Outcome:
    try:
        redraft = wire.tree_from_proto(message.redraft) if message.redraft.token_ids else EMPTY_TREE
    except InvalidTreeError as error:  # the verifier's fault, not the client's
        raise CoppiceError(f"the verifier sent an invalid draft of its own: {error}") from error
    return Outcome(
        base_length=message.base_length,
        token_ids=tuple(message.token_ids),
        num_accepted=len(message.accepted_nodes),
        draft_nodes=message.draft_nodes,
        draft_depth=message.draft_depth,
        redraft_nodes=len(message.redraft.token_ids),
        features=message.features,
        pass_rows=message.pass_rows,
        pass_us=message.pass_us,
        linger_us=message.linger_us,
        stale_drafts=message.stale_drafts,
        log_probs=wire.outcome_log_probs(message),
        near_ties=message.near_ties,
        draft_origin=message.draft_origin,
        bubble_us=message.bubble_us,
        redraft=redraft,
    )


_ERRORS: dict[int, type[CoppiceError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: OverloadedError,
    grpc.StatusCode.UNAVAILABLE.value[0]: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED.value[0]: UnsupportedError,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: IncompatibleError,
}


def _error(message: verifier_pb2.SequenceError) -> CoppiceError:
    if message.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
        text = message.message.removeprefix(f"{message.field}: ")
        return InvalidRequestError(message.field or "request", text)
    if message.code in _ERRORS:
        return _ERRORS[message.code](message.message)
    return CoppiceError(f"the verifier failed a sequence ({status_code_name(message.code)}): {message.message}")
