"""gRPC service of a drafter: messages in, trees out; the model runs on its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc
from google.rpc import code_pb2

from coppice.core.errors import CoppiceError, InvalidRequestError, OverloadedError, UnsupportedError
from coppice.core.sampling import check_token_ids
from coppice.core.tree import TokenTree
from coppice.net import rpc
from coppice.net.message_writer import MessageWriter
from coppice.net.stream_observer import StreamObserver
from coppice.obs.logs import of_request
from coppice.obs.metrics import histogram
from coppice.obs.timeline import Timeline
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, features_pb2, sampling_pb2
from coppice.version import VERSION
from coppice.wire.convert import (
    denoising_from_proto,
    samples_drafts,
    sampling_from_proto,
    tree_from_proto,
    tree_to_proto,
)
from coppice.wire.message_sizes import SAMPLING_BYTES, TREE_BYTES, MessageSizes
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.drafters.base import Drafter, JointDrafter, SamplingDrafter
from drafter_svc.model.cache_budget import CacheBudget
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.session import (
    AheadDrafts,
    DuplicateSequenceError,
    Session,
    SessionDraft,
    SessionOpening,
    SessionOutcome,
    SessionPrompt,
    UnknownSequenceError,
)

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name


# Prompts may have any length, and outcomes carry features per token: two and a half million tokens, or features of a
# thousand tokens of 8,192 numbers.
MAX_REQUEST_BYTES = 16 * 1024 * 1024
# Size limits of fields, with packed lists.
REQUEST_SIZES = MessageSizes(pb.DraftRequest, {"open.sampling": SAMPLING_BYTES, "expect.tree": TREE_BYTES})


SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
NODES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# Statuses counted from the start, so that metrics show a 0.
USUAL_FAILURES = ("already_exists", "internal", "invalid_argument", "not_found", "resource_exhausted", "unimplemented")


class DrafterCounts:
    """Counts for metrics.

    Each is written by one thread, event loop or model thread, and readable by any.
    """

    def __init__(self) -> None:
        # Event loop: sequences opened, and failed ones by name of the status.
        self.num_opened = 0
        # Their prompt tokens.
        self.num_prompt_tokens = 0
        self.failed = dict.fromkeys(USUAL_FAILURES, 0)
        # Expectations for sequences that had ended.
        self.num_gone = 0
        # Model thread:
        self.queue_s = histogram("coppice_drafter_queue_seconds", "Time that a draft waited for the model.", SECONDS)
        self.draft_s = histogram(
            "coppice_drafter_draft_seconds", "Time of a draft, from its turn on, the reading included.", SECONDS
        )
        self.nodes = histogram("coppice_drafter_draft_nodes", "Nodes of a draft.", NODES)
        # Expectations drafted for; and dropped ones, because more was committed or drafting ahead is off.
        self.num_expected = 0
        self.num_dropped = 0
        # Trees sent for likely outcomes.
        self.num_ahead = 0

    def drafted(self, queue_s: float, draft_s: float, num_nodes: int) -> None:
        """Count a draft that was sent."""
        self.queue_s.observe(queue_s)
        self.draft_s.observe(draft_s)
        self.nodes.observe(num_nodes)

    def count_failure(self, status: str) -> None:
        """Count a refused or failed sequence; `status` is the lower-case name."""
        self.failed[status] = self.failed.get(status, 0) + 1


Turn: TypeAlias = Callable[[], None]


class JointTurns:
    """Turns of sequences on the model thread, taken in groups of as many as the drafter drafts jointly.

    A turn comes in order or together with an earlier one.
    """

    def __init__(self, drafter: Drafter, thread: ModelThread, caches: CacheBudget) -> None:
        self._joint = drafter.joint if isinstance(drafter, JointDrafter) else None
        self._thread = thread
        self._caches = caches
        self._turns: deque[Turn] = deque()

    @property
    def num_joint_passes(self) -> int:
        """Passes shared by several drafts."""
        return 0 if self._joint is None else self._joint.num_joint

    def submit(self, turn: Turn) -> None:
        """Queue a turn of a sequence that has none queued. Safe on any thread."""
        self._turns.append(turn)
        self._thread.submit(self._take)

    def _take(self) -> None:
        """Take the next turns, unless earlier groups included them. On the model thread."""
        if not self._turns:
            return
        first = self._turns.popleft()
        if self._joint is None:
            first()
            return
        turns = [first]
        while self._turns and len(turns) < self._joint.most:
            turns.append(self._turns.popleft())
        # Caches of sequences in the middle of a draft must not be dropped.
        with self._caches.held():
            self._joint.together(turns)


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves one drafter to any number of streams. `thread` must be running."""

    def __init__(
        self,
        drafter: Drafter,
        thread: ModelThread,
        max_nodes: int,
        max_sequences: int,
        observe: Sequence[Callable[[], StreamObserver]] = (),
        timeline: Timeline | None = None,
        acceptance: AcceptanceMap | None = None,
        caches: CacheBudget | None = None,
    ) -> None:
        """Each of `observe` creates an observer per stream; `timeline` records drafts.

        Without `acceptance` calibration starts fresh; without `caches` no cache is dropped.
        """
        self.timeline = timeline
        self.acceptance = acceptance or AcceptanceMap()
        self.caches = caches or CacheBudget()
        self._observe = observe
        self.drafter = drafter
        self.thread = thread
        self.turns = JointTurns(drafter, thread, self.caches)
        self.max_nodes = max_nodes
        self._max_sequences = max_sequences
        # Open sequences over all streams.
        self.num_sequences = 0
        self.counts = DrafterCounts()

    async def Draft(
        self,
        request_iterator: AsyncIterator[pb.DraftRequest],
        context: grpc.aio.ServicerContext[pb.DraftRequest, pb.DraftResponse],
    ) -> None:
        """Draft for the sequences of one peer until it half-closes and is answered, or disconnects."""
        async with rpc.conversing(context):
            stream = DraftStream(self, context.write, [make() for make in self._observe])
            try:
                await stream.converse(request_iterator)
            finally:
                await stream.close()

    @rpc.unary
    async def Describe(
        self,
        request: pb.DrafterServiceDescribeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.DrafterServiceDescribeResponse:
        """Properties and requirements of this drafter."""
        info = self.drafter.info
        return pb.DrafterServiceDescribeResponse(
            kind=info.kind,
            model=info.model,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            needs_features=info.feature_size > 0,
            feature_size=info.feature_size,
            feature_layers=info.feature_layers,
            max_prompt_features=info.max_prompt_features,
            target_weights_fingerprint=info.target_weights,
            acceptance_by_rank=info.acceptance_by_rank,
            version=VERSION,
            acceptance_rules=_rules(self.drafter),
            shared_block_tokens=self.drafter.prefixes.shared_block_tokens,
            drafts_ahead=info.drafts_ahead,
        )

    def new_session(self, opening: SessionOpening) -> Session:
        """A session that counts against the limit until `release`.

        Raises:
            InvalidRequestError: the drafter cannot take this sequence.
            UnsupportedError: sampled trees are requested, and the drafter cannot sample.
            OverloadedError: too many sequences are open.
        """
        opening.check(self.drafter.info)
        if opening.is_sampled and not isinstance(self.drafter, SamplingDrafter):
            raise UnsupportedError(f"open.acceptance: {self.drafter.info.kind} does not sample trees")
        if self.num_sequences >= self._max_sequences:
            raise OverloadedError(f"{self.num_sequences} sequences are open, the most this drafter holds")
        self.num_sequences += 1
        self.counts.num_opened += 1
        self.counts.num_prompt_tokens += len(opening.prompt)
        return Session(self.drafter, opening, self.acceptance, self.caches)

    def release(self, session: Session) -> None:
        """End a session; the model thread frees its memory later."""
        session.closed = True
        self.num_sequences -= 1


@dataclass(slots=True)
class _Turn:
    """A session's turn on the model thread: pieces of a long prompt, one at a time, then a draft.

    `submitted` is a time of `perf_counter`, `spent_s` the seconds of reading; `came` is the thread's `num_pieces` when
    reading (`reads`) started.
    """

    sequence_id: int
    session: Session
    submitted: float
    reads: bool = False
    came: int = 0
    spent_s: float = 0.0


class DraftStream:
    """Sequences of one peer. Methods run on the event loop unless stated otherwise.

    After an error a sequence is closed: later outcomes get NOT_FOUND, and its id may be reused.
    """

    def __init__(
        self,
        service: DrafterService,
        write: Callable[[pb.DraftResponse], Awaitable[None]],
        observers: Sequence[StreamObserver] = (),
    ) -> None:
        self._service = service
        self._observers = observers
        self._thread = service.thread
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, Session] = {}
        # If the call ends, the reader ends too.
        self._writer = MessageWriter(write, lambda: None)
        # Model thread: turns that are reading, and a callback for when there are none.
        self._num_reading = 0
        self._on_read: Callable[[], None] | None = None

    async def converse(self, requests: AsyncIterator[pb.DraftRequest]) -> None:
        """Handle messages in order until the peer half-closes; returns after the last answer."""
        async for request in requests:
            for observer in self._observers:
                observer.heard(request)
            try:
                self._handle(request)
            except CoppiceError as error:
                self._fail(request.sequence_id, error)
        drained = asyncio.Event()
        self._thread.submit(lambda: self._when_read(lambda: self._call(drained.set)))
        await drained.wait()
        await self._writer.flush()

    async def close(self) -> None:
        """Free every sequence."""
        for session in self._sessions.values():
            self._service.release(session)
        self._sessions.clear()
        await self._writer.close()
        for observer in self._observers:
            observer.over()

    def _handle(self, request: pb.DraftRequest) -> None:
        kind = request.WhichOneof("event")
        if kind == "outcome":
            self._outcome(request.sequence_id, request.outcome)
        elif kind == "open":
            self._open(request.sequence_id, request.open)
        elif kind == "expect":
            self._expect(request.sequence_id, request.expect)
        elif kind == "prompt_features":
            self._prompt(request.sequence_id, request.prompt_features)
        elif kind == "close":
            # Closing a sequence that an error has closed is valid.
            session = self._sessions.pop(request.sequence_id, None)
            if session is not None:
                self._service.release(session)
        else:
            raise InvalidRequestError("event", "must be set")

    def _open(self, sequence_id: int, message: pb.OpenDraft) -> None:
        if sequence_id in self._sessions:
            raise DuplicateSequenceError(f"sequence {sequence_id} is open already")
        opening = SessionOpening(
            prompt=tuple(message.prompt_token_ids),
            sampling=sampling_from_proto(message.sampling),
            max_nodes=min(message.max_nodes, self._service.max_nodes),
            row_multiple=max(1, message.row_multiple),
            is_sampled=samples_drafts(message.acceptance, message.sampling.temperature),
            request_id=message.request_id,
            cache_salt=message.cache_salt,
            is_synchronous=message.synchronous,
            denoising=denoising_from_proto(message.denoising),
        )
        session = self._service.new_session(opening)
        self._sessions[sequence_id] = session
        self._schedule(sequence_id, session)

    def _outcome(self, sequence_id: int, message: pb.DraftOutcome) -> None:
        session = self._session(sequence_id)
        budget = min(message.max_nodes, self._service.max_nodes) if message.HasField("max_nodes") else None
        multiple = max(1, message.row_multiple) if message.HasField("row_multiple") else None
        session.post(SessionOutcome(message.base_length, tuple(message.token_ids), message.features, budget, multiple))
        self._schedule(sequence_id, session)

    def _prompt(self, sequence_id: int, message: features_pb2.PromptFeatures) -> None:
        session = self._sessions.get(sequence_id)
        # A hint: late for a sequence that was dropped, or to a drafter that reads none.
        if session is not None and self._service.drafter.info.max_prompt_features:
            session.post(SessionPrompt(message.first_token, message.features))
            self._schedule(sequence_id, session)

    def _expect(self, sequence_id: int, message: pb.Expect) -> None:
        session = self._sessions.get(sequence_id)
        if session is None:
            # A late hint: the sequence was dropped, and the peer told.
            self._service.counts.num_gone += 1
            return
        tree = tree_from_proto(message.tree)
        check_token_ids("expect.tree.token_ids", tree.token_ids, self._service.drafter.info.vocab_size)
        # Limit the tree to the largest draft; parents precede children.
        tree = tree.first(min(len(tree), self._service.max_nodes))
        self._thread.submit(lambda: self._begin_ahead(sequence_id, session, message.base_length, tree))

    def _session(self, sequence_id: int) -> Session:
        session = self._sessions.get(sequence_id)
        if session is None:
            raise UnknownSequenceError(f"sequence {sequence_id} is not open")
        return session

    def _schedule(self, sequence_id: int, session: Session) -> None:
        if session.schedule():
            turn = _Turn(sequence_id, session, time.perf_counter())
            self._service.turns.submit(lambda: self._take_turn(turn))

    def _fail(self, sequence_id: int, error: CoppiceError) -> None:
        session = self._sessions.pop(sequence_id, None)
        if session is not None:
            self._service.release(session)
        status = rpc.error_status(error)
        self._service.counts.count_failure(error.status.name.lower())
        self._put_error(sequence_id, status.code, status.message)

    def _put_error(self, sequence_id: int, code: int, message: str) -> None:
        error = pb.DraftError(code=code, message=message)
        self._send(pb.DraftResponse(sequence_id=sequence_id, error=error))

    def _send(self, response: pb.DraftResponse) -> None:
        self._writer.send(response)
        for observer in self._observers:
            observer.told(response)

    def _drop(self, sequence_id: int, session: Session, code: int, message: str) -> None:
        """Report a failed draft, unless the sequence has ended."""
        if self._sessions.get(sequence_id) is session:
            del self._sessions[sequence_id]
            self._service.release(session)
            self._service.counts.count_failure(rpc.status_code_name(code).lower())
            self._put_error(sequence_id, code, message)

    def _take_turn(self, turn: _Turn) -> None:
        """Read a piece or draft for a session. On the model thread."""
        num_left = 0 if turn.session.closed else self._advance(turn)
        if num_left:
            if not turn.reads:
                turn.reads, turn.came = True, self._thread.num_pieces
                self._num_reading += 1
            self._thread.submit_piece(lambda: self._take_turn(turn), turn.came, num_left)
        elif turn.reads:
            self._num_reading -= 1
            if self._on_read is not None:
                self._when_read(self._on_read)

    def _when_read(self, function: Callable[[], None]) -> None:
        """Call a function once no turn is reading. On the model thread."""
        if self._num_reading:
            self._on_read = function
        else:
            function()

    def _advance(self, turn: _Turn) -> int:
        """Read, or draft and send the tree; returns the pieces left to read. On the model thread."""
        sequence_id, session = turn.sequence_id, turn.session
        started = time.perf_counter()
        draft = None
        with self._failures_dropped(sequence_id, session):
            if num_left := session.read(max_pieces=1 if turn.reads else 0):
                turn.spent_s += time.perf_counter() - started
                return num_left
            draft = session.advance()
        if draft is not None and not session.closed:
            elapsed_s = turn.spent_s + time.perf_counter() - started
            self._mark("draft", sequence_id, elapsed_s, len(draft.tree))
            self._call(self._send, draft_response(sequence_id, draft, elapsed_s))
            self._service.counts.drafted(started - turn.submitted - turn.spent_s, elapsed_s, len(draft.tree))
        self._prepare_when_idle(sequence_id, session)
        return 0

    @contextlib.contextmanager
    def _failures_dropped(self, sequence_id: int, session: Session) -> Iterator[None]:
        """Drop the sequence if this fails, as the state of its cache is unknown. On the model thread."""
        try:
            yield
        except CoppiceError as error:
            status = rpc.error_status(error)
            code, message = status.code, status.message
        except Exception:  # any error only ends this sequence
            incident = uuid.uuid4().hex[:12]
            logger.exception("drafting failed, incident %s", incident, extra=of_request(session.request_id))
            code, message = code_pb2.INTERNAL, f"internal error, incident {incident}"
        else:
            return
        # Its queued work must not run meanwhile.
        session.closed = True
        self._call(self._drop, sequence_id, session, code, message)

    def _begin_ahead(self, sequence_id: int, session: Session, base_length: int, tree: TokenTree) -> None:
        """Draft after likely outcomes of a tree while idle. On the model thread."""
        is_expected = False
        with self._failures_dropped(sequence_id, session):
            is_expected = session.expect(base_length, tree)
        if is_expected:
            self._service.counts.num_expected += 1
            self._prepare_when_idle(sequence_id, session)
        else:
            self._service.counts.num_dropped += 1

    def _prepare_when_idle(self, sequence_id: int, session: Session) -> None:
        if not session.preparing and not session.closed:
            session.preparing = True
            self._thread.submit_idle(lambda: self._prepare(sequence_id, session))

    def _prepare(self, sequence_id: int, session: Session) -> None:
        """Draft ahead in short jobs, so that arriving jobs go first. On the model thread."""
        started = time.perf_counter()
        drafts = None
        with self._failures_dropped(sequence_id, session):
            session.preparing = session.prepare()
            drafts = session.ahead()
        if session.preparing and not session.closed:
            self._thread.submit_idle(lambda: self._prepare(sequence_id, session))
        self._mark("ahead", sequence_id, time.perf_counter() - started, 0 if drafts is None else drafts.num_nodes)
        if drafts is not None:
            self._service.counts.num_ahead += len(drafts.drafts)
            self._call(self._send, ahead_response(sequence_id, drafts))

    def _mark(self, what: str, sequence_id: int, elapsed_s: float, num_nodes: int) -> None:
        """Record work that ends now in the timeline, if any. On the model thread."""
        if (timeline := self._service.timeline) is not None:
            now_s = time.monotonic()
            timeline.took(what, now_s - elapsed_s, now_s, sequence_id, num_nodes)

    def _call(self, function: Any, *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


def _rules(drafter: Drafter) -> list[sampling_pb2.AcceptanceRule]:
    rules = [sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW]
    if isinstance(drafter, SamplingDrafter):
        rules.append(sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)
    return rules


def draft_response(sequence_id: int, draft: SessionDraft, elapsed_s: float) -> pb.DraftResponse:
    """Message of a draft that took `elapsed_s` seconds."""
    tree = pb.DraftTree(base_length=draft.base_length, tree=tree_to_proto(draft.tree), draft_us=int(elapsed_s * 1e6))
    return pb.DraftResponse(sequence_id=sequence_id, tree=tree)


def ahead_response(sequence_id: int, ahead: AheadDrafts) -> pb.DraftResponse:
    """Message of trees after likely outcomes."""
    response = pb.DraftResponse(sequence_id=sequence_id)
    for draft in ahead.drafts:
        response.ahead.trees.add(
            base_length=ahead.base_length,
            # Without sources: the sequence and the orchestrator identify them.
            tree=tree_to_proto(replace(draft.tree, source_names=())),
            assumed_token_ids=draft.assumed,
            outcome_log_prob=draft.log_prob,
        )
    return response
