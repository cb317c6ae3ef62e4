"""Our own server as a contender: one streamed call per task over a plain gRPC channel."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc

from coppice.completion import origin_name
from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.lab.bench.contenders import BenchmarkError, Completion, OriginCounts, PassTime, Speculation, Task
from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from coppice.wire.convert import denoising_to_proto, sampling_to_proto, stopping_to_proto

# Generous: a completion takes seconds. It only keeps a hung server from hanging the benchmark.
DEADLINE_S = 600.0

Mode = inference_pb2.SpeculationPolicy.Mode
AcceptanceRule = sampling_pb2.AcceptanceRule


class CoppiceContender:
    """Completions by a running orchestrator under one speculation policy."""

    def __init__(
        self,
        name: str,
        channel: grpc.Channel,
        mode: Mode,
        max_nodes: int | None = None,
        setting: str = "",
        sources: Sequence[str] = (),
        acceptance: AcceptanceRule | None = None,
        denoising: Denoising = LEFT_TO_DRAFTER,
    ) -> None:
        """Requests name `sources` as those that may draft; without any, all may. None is the server's own rule."""
        self.name = name
        self._stub = _stub(channel)
        self._policy = inference_pb2.SpeculationPolicy(
            mode=mode,
            max_nodes=max_nodes,
            sources=sources,
            acceptance=acceptance,
            denoising=denoising_to_proto(denoising),
        )
        budget = "the server's own" if max_nodes is None else max_nodes
        self.note = f"coppice, {Mode.Name(mode)}, node budget: {budget}" + (f", {setting}" if setting else "")

    def complete(self, task: Task) -> Completion:
        """Complete one task.

        Raises:
            BenchmarkError: the call failed.
        """
        token_ids: list[int] = []
        ttft_s = 0.0
        last = inference_pb2.GenerateResponse()
        start = time.perf_counter()
        try:
            for response in self._stub.Generate(self._request(task), timeout=DEADLINE_S):
                if response.token_ids and not token_ids:
                    ttft_s = time.perf_counter() - start
                token_ids.extend(response.token_ids)
                last = response
        except grpc.RpcError as error:
            raise BenchmarkError(f"{self.name}: {_explain(error)}") from error
        wall_s = time.perf_counter() - start
        return _completion(tuple(token_ids), wall_s, ttft_s, last)

    def _request(self, task: Task) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=task.prompt_ids),
            sampling=sampling_to_proto(
                SamplingParams(temperature=task.temperature, seed=task.seed, repetition_penalty=task.repetition_penalty)
            ),
            stopping=stopping_to_proto(StoppingOptions(max_tokens=task.max_tokens, ignore_eos=True)),
            speculation=self._policy,
            # Prompts come again, run after run and group after group: none may find what an earlier call has computed.
            cache_salt=uuid.uuid4().hex,
        )


def get_model_info(channel: grpc.Channel) -> inference_pb2.GetModelInfoResponse:
    """What the server serves.

    Raises:
        BenchmarkError: the call failed.
    """
    request = inference_pb2.GetModelInfoRequest()
    try:
        info: inference_pb2.GetModelInfoResponse = _stub(channel).GetModelInfo(request, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        raise BenchmarkError(f"GetModelInfo: {_explain(error)}") from error
    return info


def _explain(error: grpc.RpcError) -> str:
    """Status and details; a failed call is raised as the call itself, which the library's types do not say."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)


def _stub(channel: grpc.Channel) -> Any:
    """The generated stub, which has no types."""
    make: Any = inference_pb2_grpc.InferenceServiceStub
    return make(channel)


def _completion(
    token_ids: tuple[int, ...], wall_s: float, ttft_s: float, last: inference_pb2.GenerateResponse
) -> Completion:
    stats, timing = last.speculation, last.timing
    return Completion(
        token_ids=token_ids,
        wall_s=wall_s,
        ttft_s=ttft_s,
        num_rounds=stats.rounds,
        forward_s=timing.forward_ms / 1000,
        linger_s=timing.linger_ms / 1000,
        bubble_s=timing.bubble_ms / 1000,
        passes={item.rows: PassTime(item.count, item.total_ms / 1000) for item in timing.passes},
        speculation=Speculation(
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            redraft_tokens=stats.redraft_tokens,
            stale_drafts=stats.stale_drafts,
            drafted_by_depth=tuple(stats.rounds_drafted_by_depth),
            accepted_by_depth=tuple(stats.rounds_accepted_by_depth),
            sources={item.source: (item.proposed, item.accepted) for item in stats.sources},
            origins={
                origin_name(item.origin): OriginCounts(item.rounds, item.accepted_tokens) for item in stats.origins
            },
            expected_outcomes=stats.expected_outcomes,
            draft_ahead_hits_by_rank=tuple(stats.draft_ahead_hits_by_rank),
            outcomes_inside_expected=stats.outcomes_inside_expected,
        ),
    )
