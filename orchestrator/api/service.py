"""`InferenceService`: the public API over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
from grpc_status import rpc_status

from coppice.core.chat import ChatTemplate
from coppice.core.errors import CoppiceError, DeadlineError, InvalidRequestError, OverloadedError, UnsupportedError
from coppice.core.sampling import check_token_ids, output_seed
from coppice.core.tokenizer import TargetTokenizer
from coppice.net.rpc import error_status, streaming, unary
from coppice.obs.logs import MAX_REQUEST_ID_BYTES, request_id
from coppice.obs.timeline import Timeline
from coppice.obs.tracing import Tracing
from coppice.v1 import inference_pb2, inference_pb2_grpc
from coppice.version import VERSION
from orchestrator.admission.admission import Admission, Ticket
from orchestrator.admission.fair_queue import AdmissionRequest
from orchestrator.api.authentication import Authentication, calling_peer, calling_tenant
from orchestrator.api.encoder import Encoder
from orchestrator.api.round_messages import load_report, round_report
from orchestrator.api.tenant_usage import TenantUsage, keep_limits
from orchestrator.api.tenants import Tenant
from orchestrator.api.validation import Encode, GenerationRequest, certain_tokens, prompt_ids, validate, wanted_outputs
from orchestrator.peers.drafter_client import DrafterPool
from orchestrator.peers.verifier_pool import VerifierPool
from orchestrator.planner.base import Planner, RequestPlanner
from orchestrator.planner.fleet import adaptive_planners
from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.drafter import CacheDrafter
from orchestrator.prefix_cache.guesses import SOURCE as CACHE
from orchestrator.request.delivery import Delivery, Undelivered, UnreadWatch
from orchestrator.request.drafting import Drafting
from orchestrator.request.generation import Generation
from orchestrator.request.output_text import Output
from orchestrator.request.outputs import OneOutput, Outputs
from orchestrator.request.responses import Responses
from orchestrator.request.round_feed import OutputRounds, RoundFeed
from orchestrator.request.rounds import HEAD, PROMPT_LOOKUP, REDRAFT
from orchestrator.request.statistics import OutputClock
from orchestrator.request.trace import OutputTrace, RequestTrace
from orchestrator.request.transcript import Transcript
from orchestrator.service_counters import ServiceCounters

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from orchestrator.request.latencies import Latencies

logger = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
# Time after the deadline for a client to read the error before its call is cancelled.
UNREAD_GRACE_S = 5.0
# Time between reports of the load to a call of WatchRounds.
LOAD_REPORT_S = 0.5
# Longest call of WatchRounds: how long a token that was revoked may still watch.
MAX_WATCH_S = 600.0

Context = Any  # grpc.aio.ServicerContext, without its two type parameters


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the public API; a client may leave a message unread for `unread_s` (0: without limit)."""

    max_outputs: int
    max_nodes: int
    default_timeout_s: float
    unread_s: float = 10.0
    # Whether each round waits for its draft (a mode for measurements).
    synchronous: bool = False


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """`InferenceService` over the replicas of one verifier and any number of drafters."""

    def __init__(
        self,
        verifiers: VerifierPool,
        drafters: DrafterPool,
        planner: Planner,
        tokenizer: TargetTokenizer,
        template: ChatTemplate,
        admission: Admission,
        limits: RequestLimits,
        cache: PrefixCache | None = None,
        latencies: Latencies | None = None,
        tenant_usage: TenantUsage | None = None,
        authentication: Authentication | None = None,
        tracing: Tracing | None = None,
        timeline: Timeline | None = None,
        round_feed: RoundFeed | None = None,
    ) -> None:
        """Without `latencies` no latency histograms are kept; `authentication` is only read for metrics.

        Without `round_feed` rounds cannot be watched.
        """
        self._round_feed = round_feed
        self._timeline = timeline
        self._tracing = tracing
        self._verifiers = verifiers
        self._cache = cache
        self._drafters = drafters
        self._planner = planner
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self.admission = admission
        self._tenant_usage = tenant_usage or TenantUsage()
        self.authentication = authentication
        self._undelivered = Undelivered()
        self._encoder = Encoder()
        self._telling: set[asyncio.Task[None]] = set()
        self.tally = ServiceCounters(latencies)

    @property
    def num_requests(self) -> int:
        """Outputs that run or wait."""
        return self.admission.num_running + self.admission.num_waiting

    @streaming
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Complete one prompt."""
        arrival_s = time.monotonic()
        deadline_s = arrival_s + self._timeout_s(context)
        # Validation refuses a longer id and replaces an empty one.
        request_id.set(request.request_id[:MAX_REQUEST_ID_BYTES])
        metadata = context.invocation_metadata()
        max_context = self._verifiers.info.max_context_tokens
        with self.tally.request() as counted, RequestTrace(self._tracing, metadata, arrival_s) as trace:
            num_outputs = wanted_outputs(request, self._limits.max_outputs)
            tenant = calling_tenant(metadata)
            keep_limits(request, tenant)
            only_reads = not request.sampling.HasField("grammar")
            peer = calling_peer(metadata)
            claim = AdmissionRequest(
                tenant.name,
                num_outputs,
                request.priority,
                tenant.weight,
                only_reads,
                # Fair shares go by tenant, not by connection, if a token proves the tenant.
                peer="" if tenant.has_token else peer,
                num_bytes=request.ByteSize(),
            )
            with (
                self._tenant_usage.enter(tenant, num_outputs) as use,
                self.admission.enter(claim, deadline_s - arrival_s, certain_tokens(request, max_context)) as ticket,
            ):
                valid = await validate(
                    request,
                    self._verifiers.info,
                    self._tokenizer,
                    self._template,
                    self._drafters.known_kinds() | self._own_sources(),
                    self._sources(),
                    self._encode(tenant, peer),
                )
                if tenant.has_token:
                    valid = replace(valid, cache_salt=self._tenant_usage.salt(tenant, valid.cache_salt))
                request_id.set(valid.request_id)
                trace.validated(valid, self._verifiers.info.model, num_outputs)
                await _admitted(ticket, deadline_s)
                trace.admitted(ticket.started_s)
                outputs = self._outputs(valid, num_outputs, arrival_s, ticket, trace, tenant.name)
                counted.began(outputs, len(valid.prompt_ids))
                end = functools.partial(self._end_unread, context, asyncio.current_task(), outputs)
                try:
                    with (
                        Delivery(self._undelivered, peer, valid, outputs, ticket, use),
                        outputs,
                        _deadline(outputs, arrival_s, deadline_s, end),
                        UnreadWatch(outputs, self._limits.unread_s, end),
                    ):
                        ticket.run(outputs)
                        async for message in outputs.messages():
                            if self._timeline is not None:
                                self._timeline.mark("client.delta.out", size=len(message.token_ids))
                            yield message
                except OverloadedError as error:
                    # The verifier is full; the retry delay comes from this orchestrator's own admission.
                    raise OverloadedError(str(error), self.admission.retry_after_s(num_outputs)) from error

    def metrics(self) -> Iterator[Metric]:
        """Metrics of this service and its peers. On the event loop."""
        # Imported late: only the metrics server needs it.
        from orchestrator import metrics as own

        yield from own.request_metrics(self.tally, self.admission)
        yield from own.speculation_metrics(self.tally)
        if self.tally.latencies is not None:
            yield from own.latency_metrics(self.tally.latencies)
        yield from own.peer_metrics(self._verifiers, self._drafters.clients)
        yield from own.planner_metrics(adaptive_planners(self._planner))
        if self._cache is not None:
            yield from own.cache_metrics(self._cache.counts)
        if self.authentication is not None:
            yield from own.authentication_metrics(self.authentication)

    @unary
    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        """Model, limits and features of this deployment."""
        info = self._verifiers.info
        return inference_pb2.GetModelInfoResponse(
            model=info.model,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            eos_token_ids=info.eos_token_ids,
            sources=self._sources(),
            exactness=info.exactness,
            version=VERSION,
            max_nodes=self._limits.max_nodes,
            max_outputs=self._limits.max_outputs,
            acceptance_rules=info.acceptance_rules,
            num_verifiers=self._verifiers.num_usable,
            refusals=[*self._verifiers.refusals(), *self._drafters.refusals()],
            dtype=info.dtype,
            quantization=info.quantization,
            call_format=self._template.call_format or "",
            reasoning=self._template.reasoning or "",
            weights_fingerprint=info.weights_fingerprint,
            serving_fingerprint=info.serving_fingerprint,
            rounds=inference_pb2.ROUNDS_SYNCHRONOUS if self._limits.synchronous else inference_pb2.ROUNDS_ASYNCHRONOUS,
        )

    @unary
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt or a conversation."""
        adds_special = not request.HasField("special_tokens") or request.special_tokens
        try:
            metadata = context.invocation_metadata()
            encode = self._encode(calling_tenant(metadata), calling_peer(metadata))
            async with asyncio.timeout(self._timeout_s(context)):
                info = self._verifiers.info
                ids = await prompt_ids(request, info, self._tokenizer, self._template, encode, adds_special)
        except TimeoutError as error:
            raise DeadlineError("other texts were tokenized until the deadline") from error
        tokens = map(self._tokenizer.token_bytes, ids) if request.token_bytes else ()
        return inference_pb2.TokenizeResponse(token_ids=ids, tokens=tokens)

    @unary
    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        info = self._verifiers.info
        if len(request.token_ids) > info.max_context_tokens:
            text = f"has {len(request.token_ids)} entries, at most {info.max_context_tokens} are allowed"
            raise InvalidRequestError("token_ids", text)
        ids = tuple(request.token_ids)
        check_token_ids("token_ids", ids, info.vocab_size)
        return inference_pb2.DetokenizeResponse(text=self._tokenizer.decode(ids, skips_special=False))

    @streaming
    async def WatchRounds(
        self, request: inference_pb2.WatchRoundsRequest, context: Context
    ) -> AsyncIterator[inference_pb2.WatchRoundsResponse]:
        """Rounds as they end, and the load."""
        if self._round_feed is None:
            raise UnsupportedError("rounds cannot be watched here: WATCH_ROUNDS is not set")
        if len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequestError("request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes")
        caller = calling_tenant(context.invocation_metadata())
        # Names without a token prove nothing: all these callers are one.
        account = caller.name if caller.has_token else ""
        tenant = caller.name if caller.has_token and not caller.admin else None
        last_s = min(self._timeout_s(context), MAX_WATCH_S)
        with self._round_feed.watch(account, tenant, request.request_id) as watch, _ending(last_s + UNREAD_GRACE_S):
            next_load_s, end_s = 0.0, time.monotonic() + last_s
            while (now_s := time.monotonic()) < end_s:
                if now_s >= next_load_s:
                    next_load_s = now_s + LOAD_REPORT_S
                    load = load_report(self.tally, self.admission, self._verifiers, adaptive_planners(self._planner))
                    yield inference_pb2.WatchRoundsResponse(load=load, missed_rounds=watch.take_missed())
                if (ended := await watch.next(next_load_s - now_s)) is not None:
                    report = round_report(ended, self._tokenizer)
                    yield inference_pb2.WatchRoundsResponse(round=report, missed_rounds=watch.take_missed())

    def _end_unread(
        self, context: Context, task: asyncio.Task[None] | None, outputs: Outputs, error: CoppiceError
    ) -> None:
        """End a call that is blocked on a client that does not read; the client gets the error once it reads."""
        outputs.fail(error)
        # In a task of its own, which lives until the client has read it or is gone; the call frees its resources now.
        telling = asyncio.create_task(_tell(context, error), name="telling of an end")
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        if task is not None:
            task.cancel()

    def _own_sources(self) -> frozenset[str]:
        own = {CACHE} if self._cache is not None else set()
        if self._verifiers.info.redraft_nodes:
            own.add(REDRAFT)
        if self._verifiers.info.lookup_nodes:
            own.add(PROMPT_LOOKUP)
        if self._verifiers.info.head_nodes:
            own.add(HEAD)
        return frozenset(own)

    def _sources(self) -> list[str]:
        return sorted({*self._drafters.connected_kinds(), *self._own_sources()})

    def _encode(self, tenant: Tenant, peer: str) -> Encode:
        """The encoder, for a caller's turns: those of its tenant if a token proves it, else of its host."""
        host, connection = (tenant.name, "") if tenant.has_token else (peer.rpartition(":")[0], peer)
        return functools.partial(self._encoder.run, host=host, connection=connection)

    def _timeout_s(self, context: Context) -> float:
        remaining_s: float | None = context.time_remaining()
        return self._limits.default_timeout_s if remaining_s is None else max(remaining_s, 0.0)

    def _outputs(
        self,
        request: GenerationRequest,
        number: int,
        arrival_s: float,
        ticket: Ticket,
        trace: RequestTrace,
        tenant: str,
    ) -> Outputs:
        wake = asyncio.Event()
        outputs: list[OneOutput] = []
        for index in range(number):
            seed = output_seed(request.sampling.seed, index)
            one = replace(request, sampling=replace(request.sampling, seed=seed)) if index else request
            clock = OutputClock(arrival_s, ticket.waited_s, self.tally.latencies, ticket.tokens_came)
            feed = self._round_feed
            rounds = None if feed is None else feed.output(tenant, request.request_id, index)
            generation = self._generation(one, clock, wake, trace.output(index), rounds)
            outputs.append(OneOutput(generation, Responses(one, index, self._tokenizer)))
        # A prompt shorter than a block shares no KV blocks, so its outputs need not wait for the first.
        is_shared = 0 < self._verifiers.info.shared_block_tokens < len(request.prompt_ids)
        return Outputs(outputs, wake, first_alone=is_shared)

    def _transcript(self, request: GenerationRequest) -> Transcript:
        info = self._verifiers.info
        return Transcript(
            prompt=request.prompt_ids,
            resumed=request.resume_ids,
            max_tokens=request.stopping.max_tokens,
            max_context_tokens=info.max_context_tokens,
            stop_token_ids=request.stopping.stop_token_ids,
            eos_token_ids=() if request.stopping.ignore_eos else info.eos_token_ids,
        )

    def _cache_drafter(
        self, request: GenerationRequest, transcript: Transcript, drafts_own: bool
    ) -> CacheDrafter | None:
        # Cached drafts are not samples, so sampled trees cannot use them.
        if self._cache is None or not request.speculates or request.samples_drafts:
            return None
        if request.sources and CACHE not in request.sources:
            return None
        sampled = request.sampling.temperature > 0
        return self._cache.drafter(request.cache_salt, transcript.tokens, transcript.num_prompt, sampled, drafts_own)

    def _verifier_nodes(self, request: GenerationRequest, source: str, offered: int) -> int:
        """Most nodes of the verifier's own drafts; 0 for sampled trees (they are no samples) and synchronous rounds."""
        if not request.speculates or request.samples_drafts or self._limits.synchronous:
            return 0
        if request.sources and source not in request.sources:
            return 0
        return offered if request.max_nodes is None else min(request.max_nodes, offered)

    def _generation(
        self,
        request: GenerationRequest,
        clock: OutputClock,
        wake: asyncio.Event,
        trace: OutputTrace | None,
        rounds: OutputRounds | None,
    ) -> Generation:
        transcript = self._transcript(request)
        is_greedy = request.sampling.temperature == 0
        choose = self._drafters.choose_sampling if request.samples_drafts else self._drafters.choose
        if request.forced and request.sources:
            plans: RequestPlanner = self._planner.fixed
        else:
            plans = self._planner.follow(is_greedy, request.priority)
        clients = choose(request.sources, transcript.tokens, request.cache_salt) if request.speculates else ()
        info = self._verifiers.info
        # Drafters know more, and rows are theirs.
        lookup_nodes = 0 if clients else self._verifier_nodes(request, PROMPT_LOOKUP, info.lookup_nodes)
        head_nodes = 0 if clients else self._verifier_nodes(request, HEAD, info.head_nodes)
        drafting = Drafting(
            clients=clients,
            planner=plans,
            transcript=transcript,
            sampling=request.sampling,
            requested_nodes=request.max_nodes,
            forced=request.forced,
            vocab_size=info.vocab_size,
            row_multiple=info.row_multiple,
            acceptance=request.acceptance,
            cache=self._cache_drafter(request, transcript, drafts_own=not lookup_nodes),
            request_id=request.request_id,
            cache_salt=request.cache_salt,
            synchronous=self._limits.synchronous,
            records=self.tally.records[is_greedy],
            denoising=request.denoising,
            max_redraft_nodes=self._verifier_nodes(request, REDRAFT, info.redraft_nodes),
            max_lookup_nodes=lookup_nodes,
            max_head_nodes=head_nodes,
        )
        output = Output(self._tokenizer, transcript, request.stopping, request.want_text, request.marks)
        return Generation(request, transcript, output, drafting, self._verifiers, clock, wake, trace, rounds)


async def _admitted(ticket: Ticket, deadline_s: float) -> None:
    """Wait for a request's places, at most until its deadline."""
    if ticket.started_s is not None:
        return
    try:
        async with asyncio.timeout(deadline_s - time.monotonic()):
            await ticket.admitted()
    except TimeoutError as error:
        raise DeadlineError(f"had no place within {deadline_s - ticket.entered_s:.3g} s") from error


@contextlib.contextmanager
def _ending(after_s: float) -> Iterator[None]:
    """Cancel the call after a time: it may be blocked on its reader."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(after_s, task.cancel)
    try:
        yield
    finally:
        timer.cancel()


async def _tell(context: Context, error: CoppiceError) -> None:
    # Raises AbortError after success, and InvalidStateError if the call is over.
    with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
        await context.abort_with_status(rpc_status.to_status(error_status(error)))


@contextlib.contextmanager
def _deadline(
    outputs: Outputs, arrival_s: float, deadline_s: float, end: Callable[[CoppiceError], None]
) -> Iterator[None]:
    """Fail the outputs at the deadline, and `UNREAD_GRACE_S` later end a call that is blocked on its reader."""
    loop = asyncio.get_running_loop()
    error = DeadlineError(f"not finished within {deadline_s - arrival_s:.3g} s")
    left_s = max(deadline_s - time.monotonic(), 0.0)
    timers = [loop.call_later(left_s, outputs.fail, error), loop.call_later(left_s + UNREAD_GRACE_S, end, error)]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
