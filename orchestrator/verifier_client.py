"""The verifier as the orchestrator sees it: one stream for all sequences, which outlives a lost connection."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import Protocol

import grpc

from coppice import wire
from coppice.errors import (
    CoppiceError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from coppice.rpc import open_channel
from coppice.tree import TokenTree
from coppice.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from orchestrator.peer_stream import CHANNEL_BACKOFF_MAX_MS, PeerStream
from orchestrator.planner import Load
from orchestrator.rounds import Finish, Opening, Outcome

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0


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


class VerifierHandler(Protocol):
    """A sequence's owner. All calls come from the event loop and have to be quick."""

    def opening(self) -> Opening | None:
        """How to open the sequence as it is now; None when its output has ended already."""

    def on_opened(self, sequence_id: int) -> None:
        """The sequence was sent to the verifier, which knows nothing else of it."""

    def on_outcome(self, outcome: Outcome) -> None: ...

    def on_finished(self, finish: Finish) -> None: ...

    def on_failed(self, error: CoppiceError) -> None: ...


class VerifierClient:
    """Runs sequences on a verifier.

    When the stream is lost, the sequences are opened again on a new one with the tokens that they have by then; when
    that takes longer than `resume_s`, they fail with UnavailableError.
    """

    def __init__(self, address: str, resume_s: float) -> None:
        self.address = address
        self._resume_s = resume_s
        self._channel = open_channel(address, CHANNEL_BACKOFF_MAX_MS)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        self._ids = itertools.count(1)
        self._handlers: dict[int, VerifierHandler] = {}
        self._giving_up: asyncio.TimerHandle | None = None
        self._lost = False
        self._info: VerifierInfo | None = None
        self.tokenizer_json = b""
        self.load = Load()
        self.stream: PeerStream[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse] = PeerStream(
            f"verifier {address}", self._stub.Verify, self
        )

    @property
    def info(self) -> VerifierInfo:
        """What the verifier serves; known once it has been connected."""
        if self._info is None:
            raise UnavailableError(f"the verifier {self.address} has not been connected yet")
        return self._info

    @property
    def num_sequences(self) -> int:
        """Sequences that are open now."""
        return len(self._handlers)

    async def connect(self, timeout_s: float) -> None:
        """Connect for the first time.

        Raises:
            UnavailableError: it took longer than `timeout_s`.
        """
        self.stream.start()
        try:
            async with asyncio.timeout(timeout_s):
                while not self.stream.connected:
                    await self.stream.changed()
        except TimeoutError as error:
            reason = self.stream.last_failure or "no answer"
            raise UnavailableError(
                f"the verifier {self.address} was not reached within {timeout_s:g} s ({reason})"
            ) from error

    async def close(self) -> None:
        """Close the stream; sequences that are still open fail."""
        await self.stream.stop()
        self._give_up()
        if self._giving_up is not None:
            self._giving_up.cancel()
        await self._channel.close()

    def join(self, handler: VerifierHandler) -> int:
        """Open a sequence, now or as soon as the verifier is back; returns its id.

        Raises:
            UnavailableError: the verifier has been away for too long.
        """
        if self._lost:
            raise UnavailableError("the verifier is not connected")
        sequence_id = next(self._ids)
        self._handlers[sequence_id] = handler
        if self.stream.connected:
            self._open(sequence_id, handler)
        return sequence_id

    def draft(self, sequence_id: int, base_length: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        """Send the draft for the round that starts at `base_length`; an empty tree means not to wait for one."""
        if sequence_id in self._handlers:
            draft = verifier_pb2.Draft(
                base_length=base_length, tree=wire.tree_to_proto(tree), budget=budget, linger_us=linger_us
            )
            self.stream.send(verifier_pb2.VerifyRequest(sequence_id=sequence_id, draft=draft))

    def leave(self, sequence_id: int) -> None:
        """Close a sequence, unless it has ended already."""
        if self._handlers.pop(sequence_id, None) is not None:
            close = verifier_pb2.CloseSequence()
            self.stream.send(verifier_pb2.VerifyRequest(sequence_id=sequence_id, close=close))

    async def handshake(self) -> None:
        """Learn what the verifier serves; later, make sure that it is still the same."""
        described = await self._stub.Describe(
            verifier_pb2.VerifierServiceDescribeRequest(), timeout=HANDSHAKE_TIMEOUT_S
        )
        if self._info is None:
            tokenizer = await self._stub.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=HANDSHAKE_TIMEOUT_S)
            self.tokenizer_json = tokenizer.tokenizer_json
            self._info = _info(described)
        elif (described.model, described.tokenizer_fingerprint) != (
            self._info.model,
            self._info.tokenizer_fingerprint,
        ):
            raise IncompatibleError(
                f"the verifier {self.address} now serves {described.model} (tokenizer "
                f"{described.tokenizer_fingerprint}), not {self._info.model} ({self._info.tokenizer_fingerprint})"
            )

    def on_up(self) -> None:
        """Open every sequence from where it is."""
        self._lost = False
        if self._giving_up is not None:
            self._giving_up.cancel()
        for sequence_id, handler in list(self._handlers.items()):
            self._open(sequence_id, handler)

    def on_down(self) -> None:
        """Keep the sequences for a while."""
        if self._handlers:
            logger.warning("the verifier is lost with %d sequences running", len(self._handlers))
        self._giving_up = asyncio.get_running_loop().call_later(self._resume_s, self._give_up)

    def on_message(self, message: verifier_pb2.VerifyResponse) -> None:
        """Hand a message to its sequence; an error of one sequence stays with it."""
        if message.WhichOneof("event") == "load":
            self.load = _load(message.load)
            return
        handler = self._handlers.get(message.sequence_id)
        if handler is None:
            return
        try:
            self._dispatch(handler, message)
        except CoppiceError as error:
            self._fail(message.sequence_id, error)
        except Exception:
            logger.exception("sequence %d failed", message.sequence_id)
            self._fail(message.sequence_id, CoppiceError("internal error"))

    def _dispatch(self, handler: VerifierHandler, message: verifier_pb2.VerifyResponse) -> None:
        match message.WhichOneof("event"):
            case "outcome":
                handler.on_outcome(_outcome(message.outcome))
            case "finished":
                self._handlers.pop(message.sequence_id, None)
                finished = message.finished
                match_text = finished.stop_match if finished.HasField("stop_match") else None
                handler.on_finished(Finish(finished.reason, match_text, finished.queue_us, finished.cached_tokens))
            case "error":
                # Closed at the verifier already.
                self._handlers.pop(message.sequence_id, None)
                handler.on_failed(_error(message.error))
            case "draft_rejected":
                logger.warning("the verifier rejected a draft: %s", message.draft_rejected.message)

    def _open(self, sequence_id: int, handler: VerifierHandler) -> None:
        opening = handler.opening()
        if opening is None:
            self._handlers.pop(sequence_id, None)
            return
        self.stream.send(verifier_pb2.VerifyRequest(sequence_id=sequence_id, open=_open_message(opening)))
        handler.on_opened(sequence_id)

    def _fail(self, sequence_id: int, error: CoppiceError) -> None:
        handler = self._handlers.get(sequence_id)
        self.leave(sequence_id)
        if handler is not None:
            handler.on_failed(error)

    def _give_up(self) -> None:
        self._lost = True
        handlers, self._handlers = list(self._handlers.values()), {}
        for handler in handlers:
            handler.on_failed(UnavailableError("the verifier was lost and did not come back in time"))


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
    )


def _load(load: verifier_pb2.Load) -> Load:
    return Load(load.batch_size, load.rows, load.pass_us, load.queued_sequences, load.free_kv_blocks)


def _open_message(opening: Opening) -> verifier_pb2.OpenSequence:
    return verifier_pb2.OpenSequence(
        prompt_token_ids=opening.token_ids,
        sampling=wire.sampling_to_proto(opening.sampling),
        stopping=wire.stopping_to_proto(opening.stopping),
        acceptance=opening.acceptance,
        exactness=opening.exactness,
        linger_us=opening.linger_us,
        resumed_tokens=opening.resumed_tokens,
        priority=opening.priority,
        want_features=opening.want_features,
        cache_salt=opening.cache_salt,
        top_log_probs=opening.top_log_probs,
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
