"""The public API as gRPC serves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from coppice.errors import DeadlineError, OverloadedError
from coppice.output_seed import output_seed
from coppice.rpc import streaming, unary
from coppice.tokenizer import TargetTokenizer
from coppice.v1 import inference_pb2, inference_pb2_grpc
from coppice.version import VERSION
from orchestrator.drafter_client import DrafterPool
from orchestrator.drafting import Drafting
from orchestrator.generation import Generation
from orchestrator.output import Output
from orchestrator.outputs import OneOutput, Outputs
from orchestrator.planner import Planner
from orchestrator.responses import Responses
from orchestrator.statistics import Clock
from orchestrator.transcript import Transcript
from orchestrator.validation import GenerationRequest, validate, wanted_outputs
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
    max_outputs: int
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
        # Requests that run now, each output of a request counted.
        self.num_requests = 0

    @streaming
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Complete one prompt."""
        arrival_s = time.monotonic()
        num_outputs = wanted_outputs(request, self._limits.max_outputs)
        with self._admission(num_outputs):
            valid = await validate(
                request,
                self._verifier.info,
                self._tokenizer,
                self._drafters.known_kinds(),
                self._drafters.connected_kinds(),
            )
            outputs = self._outputs(valid, num_outputs, arrival_s)
            with outputs, self._deadline(outputs, context):
                async for message in outputs.messages():
                    yield message

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
            max_outputs=self._limits.max_outputs,
            acceptance_rules=info.acceptance_rules,
        )

    @contextlib.contextmanager
    def _admission(self, num_outputs: int) -> Iterator[None]:
        if self.num_requests + num_outputs > self._limits.max_requests:
            raise OverloadedError(f"{self.num_requests} requests are running already", RETRY_AFTER_S)
        self.num_requests += num_outputs
        try:
            yield
        finally:
            self.num_requests -= num_outputs

    @contextlib.contextmanager
    def _deadline(self, outputs: Outputs, context: Context) -> Iterator[None]:
        """Ends the outputs at the deadline: what they hold at the back ends must not wait for their reader."""
        remaining_s = context.time_remaining()
        timeout_s = self._limits.default_timeout_s if remaining_s is None else max(remaining_s, 0.0)
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        error = DeadlineError(f"not finished within {timeout_s:.3g} s")
        timers = [loop.call_later(timeout_s, outputs.fail, error)]
        if task is not None:
            timers.append(loop.call_later(timeout_s + UNREAD_GRACE_S, task.cancel))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _outputs(self, request: GenerationRequest, number: int, arrival_s: float) -> Outputs:
        wake = asyncio.Event()
        outputs: list[OneOutput] = []
        for index in range(number):
            seed = output_seed(request.sampling.seed, index)
            one = replace(request, sampling=replace(request.sampling, seed=seed)) if index else request
            generation = self._generation(one, Clock(arrival_s), wake)
            outputs.append(OneOutput(generation, Responses(one, index)))
        # A prompt that fills no block is not shared, so that waiting for it would gain nothing.
        is_shared = 0 < self._verifier.info.shared_block_tokens < len(request.prompt_ids)
        return Outputs(outputs, wake, first_alone=is_shared)

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

    def _generation(self, request: GenerationRequest, clock: Clock, wake: asyncio.Event) -> Generation:
        transcript = self._transcript(request)
        choose = self._drafters.choose_sampling if request.samples_drafts else self._drafters.choose
        drafting = Drafting(
            clients=choose(request.sources) if request.speculates else (),
            planner=self._planner.follow(is_greedy=request.sampling.temperature == 0),
            transcript=transcript,
            sampling=request.sampling,
            requested_nodes=request.max_nodes,
            forced=request.forced,
            vocab_size=self._verifier.info.vocab_size,
            row_multiple=self._verifier.info.row_multiple,
            acceptance=request.acceptance,
        )
        output = Output(self._tokenizer, transcript, request.stopping.stop_strings, request.want_text)
        return Generation(request, transcript, output, drafting, self._verifier, clock, wake)
