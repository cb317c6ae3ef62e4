"""Contenders of a benchmark: what each does with a task and says of it, and our own server as one of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from coppice import completion
from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from coppice.wire.convert import denoising_to_proto, sampling_to_proto, stopping_to_proto

TRANSFORMERS = "transformers"
ASSISTED = "transformers-assisted"
OFF = "coppice-off"
ON = "coppice-on"

# Generous: a completion takes seconds. It only keeps a hung server from hanging the benchmark.
DEADLINE_S = 600.0

Mode = inference_pb2.SpeculationPolicy.Mode
AcceptanceRule = sampling_pb2.AcceptanceRule


@dataclass(frozen=True, slots=True)
class Task:
    """One completion to make. The length is exact: EOS counts as any other token."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class PassTime:
    """How many passes of the target there were, and how long they took together."""

    count: int
    total_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """One completed task. Wall time and time to first token are the caller's; the rest is reported."""

    token_ids: tuple[int, ...]
    wall_s: float
    ttft_s: float
    # Passes of the target that committed tokens.
    num_rounds: int
    forward_s: float
    linger_s: float = 0.0
    # Between passes, while there was work all along.
    bubble_s: float = 0.0
    # Keyed by the number of rows.
    passes: Mapping[int, PassTime] = field(default_factory=dict)
    speculation: completion.Speculation | None = None
    # What services counted meanwhile, where a benchmark reads it.
    counted: Counters | None = None


class Contender(Protocol):
    """One way to complete a prompt."""

    @property
    def name(self) -> str:
        """Short and unique within a benchmark."""
        ...

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        ...

    def complete(self, task: Task) -> Completion:
        """Complete one task, alone."""
        ...


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
        builder, ttft_s = completion.CompletionBuilder(), 0.0
        start = time.perf_counter()
        try:
            for response in self._stub.Generate(self._request(task), timeout=DEADLINE_S):
                if response.token_ids and not ttft_s:
                    ttft_s = time.perf_counter() - start
                builder.add(response)
        except grpc.RpcError as error:
            raise BenchmarkError(f"{self.name}: {_explain(error)}") from error
        wall_s = time.perf_counter() - start
        if builder.completion is None:
            raise BenchmarkError(f"{self.name}: the stream ended before the output did")
        return _completion(builder.completion, wall_s, ttft_s)

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


def max_context(address: str) -> int:
    """Tokens of prompt and output together that a server takes.

    Raises:
        BenchmarkError: the call failed.
    """
    with grpc.insecure_channel(address) as channel:
        return get_model_info(channel).max_context_tokens


def _explain(error: grpc.RpcError) -> str:
    """Status and details; a failed call is raised as the call itself, which the library's types do not say."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)


def _stub(channel: grpc.Channel) -> Any:
    """The generated stub, which has no types."""
    make: Any = inference_pb2_grpc.InferenceServiceStub
    return make(channel)


def _completion(result: completion.Completion, wall_s: float, ttft_s: float) -> Completion:
    counts, timing = result.speculation, result.timing
    return Completion(
        token_ids=result.token_ids,
        wall_s=wall_s,
        ttft_s=ttft_s,
        num_rounds=counts.rounds,
        forward_s=timing.forward_ms / 1000,
        linger_s=timing.linger_ms / 1000,
        bubble_s=timing.bubble_ms / 1000,
        passes={item.rows: PassTime(item.count, item.total_ms / 1000) for item in timing.passes},
        speculation=counts,
    )
