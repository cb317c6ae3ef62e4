"""One verifier as the orchestrator sees it: one stream for all of its sequences."""

from __future__ import annotations

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
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.net.certificates import Certificates
from coppice.obs.logs import of_request
from coppice.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.wire import convert as wire
from coppice.wire.unreadable import received
from orchestrator.peers.peer_channel import Dial, PeerChannel, dial
from orchestrator.peers.peer_stream import PeerStream
from orchestrator.peers.routing import RouteCandidate
from orchestrator.planner.base import VerifierLoad
from orchestrator.request.rounds import Finish, Outcome, VerifyOpening

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
# A verifier tells its load ten times a second while passes run; what it said, or refused, longer ago than this says
# nothing.
LOAD_IS_NEWS_S = 1.0


@dataclass(frozen=True)
class VerifierInfo:
    """What a verifier serves, and its limits."""

    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    max_nodes: int
    exactness: sampling_pb2.Exactness
    version: str
    # Prompts that begin alike share what is computed for them in blocks of this many tokens; 0 when they do not.
    shared_block_tokens: int
    # A pass computes its rows in multiples of this.
    row_multiple: int = 1
    # Every verifier samples and follows.
    acceptance_rules: tuple[sampling_pb2.AcceptanceRule, ...] = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW,)
    # What its passes run on, in words, and which process it is; empty where it does not say.
    hardware: str = ""
    instance_id: str = ""
    # Most nodes of the target's own drafts; 0 where it makes none.
    redraft_nodes: int = 0
    # Numbers of a committed token's feature; 0 where it gives none.
    feature_size: int = 0


class VerifierHandler(Protocol):
    """A sequence's owner. All calls come from the event loop and have to be quick."""

    @property
    def request_id(self) -> str: ...

    def opening(self) -> VerifyOpening | None:
        """How to open the sequence as it is now; None when its output has ended already."""

    def finish_if_complete(self) -> bool:
        """End the output where the tokens that are here already reach its end; whether they do."""

    def refused(self) -> int:
        """A verifier has no room for it; returns how many have said so since the last outcome."""

    def on_opened(self, place: SequenceHandle) -> None:
        """The sequence was sent to a verifier, which knows nothing else of it."""

    def on_outcome(self, outcome: Outcome, load: VerifierLoad) -> None:
        """A round is over; `load` is the verifier's, when it last told."""

    def on_finished(self, finish: Finish) -> None: ...

    def on_failed(self, error: CoppiceError) -> None: ...


class VerifierOwner(Protocol):
    """Who decides which verifiers are used, and what becomes of their sequences."""

    def check(self, client: VerifierClient, info: VerifierInfo) -> None:
        """Raise IncompatibleError to refuse what a verifier serves."""

    def on_up(self, client: VerifierClient) -> None: ...

    def on_down(self, client: VerifierClient, handlers: Sequence[VerifierHandler]) -> None:
        """The verifier is lost, and with it the sequences of `handlers`."""

    def on_refused(self, handler: VerifierHandler, error: OverloadedError) -> None:
        """A verifier has no room for a sequence that it was to open."""

    def on_idle(self, client: VerifierClient) -> None:
        """A verifier that is about to stop has no sequence of ours any more."""


@dataclass(frozen=True)
class SequenceHandle:
    """Where a sequence runs. What is sent there once it runs no more is dropped."""

    verifier: VerifierClient
    sequence_id: int

    def draft(self, base_length: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        """Send the draft for the round that starts at `base_length`; an empty tree means not to wait for one."""
        self.verifier.draft(self.sequence_id, base_length, tree, budget, linger_us)

    def draft_ahead(self, base_length: int, tree: TokenTree) -> None:
        """Send outcomes of the round that starts at `base_length`, and what may follow them."""
        self.verifier.draft_ahead(self.sequence_id, base_length, tree)

    def leave(self) -> None:
        """Close the sequence, unless it has ended already."""
        self.verifier.leave(self.sequence_id)


class VerifierClient:
    """Runs sequences on one verifier; when its stream is lost, hands them back to its owner and connects anew."""

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
        # Sequences of other orchestrators, when the load came.
        self._num_foreign = 0
        # Whether it is about to stop.
        self.is_draining = False
        self.stream: PeerStream[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse] = PeerStream(
            f"verifier {address}", lambda: self._channel.stub.Verify(), self
        )

    @property
    def info(self) -> VerifierInfo:
        """What the verifier serves; known once it has been connected."""
        if self._info is None:
            raise UnavailableError(f"the verifier {self.address} has not been connected yet")
        return self._info

    @property
    def is_known(self) -> bool:
        """Whether it has been connected at some time."""
        return self._info is not None

    @property
    def num_sequences(self) -> int:
        """Sequences that are open now."""
        return len(self._handlers)

    def candidate(self, known_blocks: int) -> RouteCandidate:
        """How busy it is, as far as is known, for a sequence of whose blocks it has `known_blocks`."""
        if time.monotonic() - self._load_came_s > LOAD_IS_NEWS_S:
            return RouteCandidate(self.num_sequences, known_blocks)
        return RouteCandidate(self.num_sequences + self._num_foreign, known_blocks, self.load.free_kv_blocks)

    @property
    def is_full(self) -> bool:
        """Whether it has turned a sequence away just now."""
        return time.monotonic() - self._refused_s <= LOAD_IS_NEWS_S

    async def close(self) -> None:
        """Close the stream."""
        await self.stream.stop()
        await self._channel.close()

    def open(self, handler: VerifierHandler, opening: VerifyOpening) -> None:
        """Open a sequence."""
        sequence_id = next(self._ids)
        self._handlers[sequence_id] = handler
        self.stream.send(verifier_pb2.VerifyRequest(sequence_id=sequence_id, open=_open_message(opening, self._info)))
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
            self.stream.send(request)

    def draft_ahead(self, sequence_id: int, base_length: int, tree: TokenTree) -> None:
        """Send outcomes of a round and what may follow them, unless the sequence has ended."""
        if sequence_id in self._handlers:
            request = verifier_pb2.VerifyRequest(sequence_id=sequence_id)
            request.draft.base_length = base_length
            request.draft.ahead = True
            wire.put_tree(tree, request.draft.tree)
            self.stream.send(request)

    def leave(self, sequence_id: int) -> None:
        """Close a sequence, unless it has ended already."""
        if sequence_id in self._handlers:
            close = verifier_pb2.CloseSequence()
            self.stream.send(verifier_pb2.VerifyRequest(sequence_id=sequence_id, close=close))
            self._forget(sequence_id)

    async def handshake(self) -> None:
        """Learn what the verifier serves, and whether that is what is wanted."""
        await self._channel.renew()
        stub = self._channel.stub
        described = await stub.Describe(verifier_pb2.VerifierServiceDescribeRequest(), timeout=HANDSHAKE_TIMEOUT_S)
        info = _info(received(described))
        self._owner.check(self, info)
        if not self.tokenizer.tokenizer_json:
            tokenizer = await stub.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=HANDSHAKE_TIMEOUT_S)
            self.tokenizer = received(tokenizer)
        self._info = info

    def on_up(self) -> None:
        """Take sequences."""
        self._owner.on_up(self)

    def on_down(self) -> None:
        """Give the sequences back."""
        handlers, self._handlers = list(self._handlers.values()), {}
        self.load, self._load_came_s, self._refused_s, self.is_draining = VerifierLoad(), -math.inf, -math.inf, False
        self._owner.on_down(self, handlers)

    def on_message(self, message: verifier_pb2.VerifyResponse) -> None:
        """Hand a message to its sequence; an error of one sequence stays with it."""
        handler = self._handlers.get(message.sequence_id)
        if handler is None:
            self._on_news(message)
            return
        try:
            self._dispatch(handler, message)
        except CoppiceError as error:
            self._fail(message.sequence_id, error)
        except Exception:  # a bug of ours ends this sequence, not the stream of all
            logger.exception("sequence %d failed", message.sequence_id, extra=of_request(handler.request_id))
            self._fail(message.sequence_id, CoppiceError("internal error"))

    def _dispatch(self, handler: VerifierHandler, message: verifier_pb2.VerifyResponse) -> None:
        match message.WhichOneof("event"):
            case "outcome":
                handler.on_outcome(_outcome(message.outcome), self.load)
            case "finished":
                self._forget(message.sequence_id)
                finished = message.finished
                match_text = finished.stop_match if finished.HasField("stop_match") else None
                handler.on_finished(Finish(finished.reason, match_text, finished.queue_us, finished.cached_tokens))
            case "error":
                # Closed at the verifier already.
                self._forget(message.sequence_id)
                error = _error(message.error)
                if isinstance(error, OverloadedError):
                    self._refused_s = time.monotonic()
                    self._owner.on_refused(handler, error)
                else:
                    handler.on_failed(error)
            case "draft_rejected":
                told, extra = message.draft_rejected.message, of_request(handler.request_id)
                logger.warning("the verifier rejected a draft: %s", told, extra=extra)

    def _on_news(self, message: verifier_pb2.VerifyResponse) -> None:
        """Take what the verifier tells of itself; of sequences that have ended here nothing is news."""
        event = message.WhichOneof("event")
        if event == "load":
            self.load = _load(message.load)
            self._load_came_s = time.monotonic()
            # Of ours, those that ended with the pass are gone already.
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

    def _fail(self, sequence_id: int, error: CoppiceError) -> None:
        handler = self._handlers.get(sequence_id)
        self.leave(sequence_id)
        if handler is not None:
            handler.on_failed(error)


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
        feature_size=described.feature_size,
    )


def _load(load: verifier_pb2.Load) -> VerifierLoad:
    return VerifierLoad(load.batch_size, load.rows, load.pass_us, load.queued_sequences, load.free_kv_blocks)


def _open_message(opening: VerifyOpening, info: VerifierInfo | None) -> verifier_pb2.OpenSequence:
    """What opens a sequence; what the verifier does not offer is not asked for, and drafts go on without."""
    offered_redraft_nodes, feature_size = (info.redraft_nodes, info.feature_size) if info is not None else (0, 0)
    return verifier_pb2.OpenSequence(
        prompt_token_ids=opening.token_ids,
        sampling=wire.sampling_to_proto(opening.sampling),
        stopping=wire.stopping_to_proto(opening.stopping),
        acceptance=opening.acceptance,
        exactness=opening.exactness,
        linger_us=opening.linger_us,
        resumed_tokens=opening.resumed_tokens,
        priority=opening.priority,
        want_features=0 < opening.feature_size == feature_size,
        cache_salt=opening.cache_salt,
        top_log_probs=opening.top_log_probs,
        request_id=opening.request_id,
        traceparent=opening.traceparent,
        synchronous=opening.synchronous,
        max_redraft_nodes=min(opening.max_redraft_nodes, offered_redraft_nodes),
    )


def _outcome(message: verifier_pb2.Outcome) -> Outcome:
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
        redraft=wire.tree_from_proto(message.redraft) if message.redraft.token_ids else EMPTY_TREE,
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
    return _ERRORS.get(message.code, CoppiceError)(message.message)
