"""The public API as gRPC serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from coppice.errors import DeadlineError, OverloadedError
from coppice.rpc import streaming, unary
from coppice.tokenizer import TargetTokenizer
from coppice.v1 import inference_pb2, inference_pb2_grpc
from coppice.version import VERSION
from orchestrator.drafter_client import DrafterPool
from orchestrator.drafting import Drafting
from orchestrator.generation import Generation
from orchestrator.output import Output
from orchestrator.planner import Planner
from orchestrator.responses import Responses
from orchestrator.statistics import Clock
from orchestrator.transcript import Transcript
from orchestrator.validation import GenerationRequest, validate
from orchestrator.verifier_client import VerifierClient

logger = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
RETRY_AFTER_S = 1.0
# How long a client that does not read may keep its call once the deadline has passed.
UNREAD_GRACE_S = 5.0

Context = Any  # grpc.aio.ServicerContext, whose type parameters say nothing here


@dataclass(frozen=True)
class Limits:
    """Bounds of the public edge."""

    max_requests: int
    max_nodes: int
    default_timeout_s: float


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """`InferenceService` on one verifier and any number of drafters."""

    def __init__(
        self,
        verifier: VerifierClient,
        drafters: DrafterPool,
        planner: Planner,
        tokenizer: TargetTokenizer,
        limits: Limits,
    ) -> None:
        self._verifier = verifier
        self._drafters = drafters
        self._planner = planner
        self._tokenizer = tokenizer
        self._limits = limits
        self.num_requests = 0

    @streaming
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Complete one prompt."""
        clock = Clock()
        with self._admission():
            valid = await validate(
                request,
                self._verifier.info,
                self._tokenizer,
                self._drafters.known_kinds(),
                self._drafters.connected_kinds(),
            )
            transcript = self._transcript(valid)
            responses = Responses(valid)
            generation = self._generation(valid, transcript, clock)
            with generation, self._deadline(generation, context):
                async for delta in generation.deltas():
                    if (message := responses.delta(delta)) is not None:
                        yield message
                if generation.finish is not None:
                    yield responses.last(generation, generation.finish, transcript.num_generated)

    @unary
    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        """What is served here, and its limits."""
        info = self._verifier.info
        return inference_pb2.GetModelInfoResponse(
            model=info.model,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            eos_token_ids=info.eos_token_ids,
            sources=self._drafters.connected_kinds(),
            exactness=info.exactness,
            version=VERSION,
            max_nodes=self._limits.max_nodes,
        )

    @contextlib.contextmanager
    def _admission(self) -> Iterator[None]:
        if self.num_requests >= self._limits.max_requests:
            raise OverloadedError(f"{self.num_requests} requests are running already", RETRY_AFTER_S)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextlib.contextmanager
    def _deadline(self, generation: Generation, context: Context) -> Iterator[None]:
        """Ends the generation at the deadline: what it holds at the back ends must not wait for its reader."""
        remaining_s = context.time_remaining()
        timeout_s = self._limits.default_timeout_s if remaining_s is None else max(remaining_s, 0.0)
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        error = DeadlineError(f"not finished within {timeout_s:.3g} s")
        timers = [loop.call_later(timeout_s, generation.fail, error)]
        if task is not None:
            timers.append(loop.call_later(timeout_s + UNREAD_GRACE_S, task.cancel))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _transcript(self, request: GenerationRequest) -> Transcript:
        info = self._verifier.info
        return Transcript(
            prompt=request.prompt_ids,
            resumed=request.resume_ids,
            max_tokens=request.stopping.max_tokens,
            max_context_tokens=info.max_context_tokens,
            stop_token_ids=request.stopping.stop_token_ids,
            eos_token_ids=() if request.stopping.ignore_eos else info.eos_token_ids,
        )

    def _generation(self, request: GenerationRequest, transcript: Transcript, clock: Clock) -> Generation:
        clients = self._drafters.choose(request.sources) if request.speculates else ()
        drafting = Drafting(
            clients=clients,
            planner=self._planner,
            transcript=transcript,
            sampling=request.sampling,
            requested_nodes=request.max_nodes,
            forced=request.forced,
            vocab_size=self._verifier.info.vocab_size,
        )
        output = Output(self._tokenizer, transcript, request.stopping.stop_strings, request.want_text)
        return Generation(request, transcript, output, drafting, self._verifier, clock)
