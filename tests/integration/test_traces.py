"""One request is one trace across the three services, and its spans say what the answer says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from coppice.net import rpc
from coppice.obs.tracing import TRACEPARENT, Tracing
from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from drafter_svc.sequence_traces import sequence_traces as drafter_traces
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.fakes import FakeDrafter, FakeVerifier, eventually, serving
from tests.spans import CALLER, UNRECORDED_CALLER, KeptSpans, own_id, parent_id
from tests.tiny_services import tiny_drafter, tiny_verifier
from verifier_svc.stream.sequence_traces import sequence_traces

SECRET = "the password is swordfish"
TOKENS = 20


@contextlib.asynccontextmanager
async def traced(
    spans: KeptSpans, verifier: str, *drafters: str, rounds_share: float = 0.0, silent: bool = False, **settings: Any
) -> AsyncIterator[tuple[inference_pb2_grpc.InferenceServiceStub, Orchestrator]]:
    """An orchestrator that traces, and a stub for it."""
    tracer = spans.silent_tracer() if silent else spans.tracer()
    defaults = {"connect_timeout_s": 10.0, "grace_s": 0.0, "cache_drafter": False, "planner": "fixed"}
    config = Config(verifier_address=verifier, drafter_addresses=drafters, **{**defaults, **settings})
    async with (
        running(config, Tracing(tracer, rounds_share)) as orchestrator,
        rpc.open_channel(orchestrator.address) as channel,
    ):
        yield inference_pb2_grpc.InferenceServiceStub(channel), orchestrator


def request(num_outputs: int = 1, prompt: str = SECRET, **sampling: float) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id="mine",
        prompt=prompt,
        num_outputs=num_outputs,
        sampling=sampling_pb2.SamplingParams(seed=(1 << 64) - 1, **sampling),
        stopping=sampling_pb2.StoppingOptions(max_tokens=TOKENS, ignore_eos=True, stop_strings=["swordfishes"]),
    )


async def last_of(
    stub: Any, message: inference_pb2.GenerateRequest, caller: str = ""
) -> inference_pb2.GenerateResponse:
    metadata = [(TRACEPARENT, caller)] if caller else []
    return [response async for response in stub.Generate(message, timeout=20, metadata=metadata)][-1]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_is_one_trace_of_its_caller_s_across_three_services() -> None:
    spans = KeptSpans()
    async with (
        tiny_verifier([partial(sequence_traces, spans.tracer())]) as verifier,
        tiny_drafter([partial(drafter_traces, spans.tracer(), "chain")]) as drafter,
        traced(spans, verifier, drafter, linger_ms=500.0) as (stub, _),
    ):
        last = await last_of(stub, request(prompt="ab"), CALLER)
        await eventually(lambda: "draft" in spans.by_name())
    assert {f"{span.context.trace_id:032x}" for span in spans.all} == {CALLER[3:35]}
    call, output = spans.only("text_completion"), spans.only("output")
    assert f"{parent_id(call):016x}" == CALLER[36:52]
    above = {name: parent_id(spans.only(name)) for name in spans.by_name()}
    assert above == {
        "text_completion": parent_id(call),
        "tokenize": own_id(call),
        "output": own_id(call),
        **dict.fromkeys(("prompt", "decode", "verify", "draft"), own_id(output)),
    }
    told, verified, drafted = (attributes(spans.only(name)) for name in ("output", "verify", "draft"))
    stats = last.speculation
    assert stats.draft_tokens > 0
    for found in (told, verified):
        assert found["coppice.rounds"] == stats.rounds
        assert found["coppice.draft_tokens"] == stats.draft_tokens
        assert found["coppice.accepted_tokens"] == stats.accepted_tokens
        assert found["gen_ai.usage.output_tokens"] == last.usage.completion_tokens == TOKENS
        assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert told["coppice.forward_ms"] == pytest.approx(verified["coppice.forward_ms"]) == last.timing.forward_ms
    for found in (attributes(call), verified, drafted):
        assert found["gen_ai.usage.input_tokens"] == last.usage.prompt_tokens
    assert drafted["coppice.drafts"] >= drafted["coppice.outcomes"] > 0
    assert "error.type" not in drafted
    assert drafted["coppice.source"] == "chain"


async def test_spans_of_a_call_have_what_was_asked_for_and_none_of_its_text() -> None:
    spans = KeptSpans()
    async with (
        serving(FakeVerifier()) as verifier,
        serving(FakeDrafter()) as drafter,
        traced(spans, verifier, drafter) as (stub, _),
    ):
        text = "".join([response.text async for response in stub.Generate(request(temperature=0.5), timeout=20)])
    found = attributes(spans.only("text_completion"))
    assert {name: value for name, value in found.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "coppice",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.response.id": "mine",
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": TOKENS,
        "gen_ai.request.seed": str((1 << 64) - 1),
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": TOKENS,
        "gen_ai.response.finish_reasons": ("length",),
    }
    everything = "".join(span.to_json() for span in spans.all)
    assert "mine" in everything
    for hidden in (SECRET, "swordfish", text, text[:12]):
        assert hidden not in everything


async def test_each_output_has_a_span_and_back_ends_are_told_of_it() -> None:
    spans, fake = KeptSpans(), FakeVerifier()
    async with serving(fake) as verifier, traced(spans, verifier) as (stub, _):
        await last_of(stub, request(num_outputs=3))
    outputs = spans.by_name()["output"]
    assert sorted(attributes(span)["coppice.output_index"] for span in outputs) == [0, 1, 2]
    told = {f"{span.context.span_id:016x}" for span in outputs}
    assert {opened.traceparent[36:52] for opened in fake.opened} == told
    call = attributes(spans.only("text_completion"))
    assert call["gen_ai.usage.output_tokens"] == 3 * TOKENS
    assert call["gen_ai.response.finish_reasons"] == ("length",) * 3


async def test_waiting_for_a_place_is_a_span_of_those_who_waited() -> None:
    spans = KeptSpans()
    async with serving(FakeVerifier()) as verifier, traced(spans, verifier, max_requests=1) as (stub, _):
        await asyncio.gather(*(last_of(stub, request()) for _ in range(3)))
    calls, queued = spans.by_name()["text_completion"], spans.by_name()["queue"]
    assert len(calls) == 3
    assert len({parent_id(span) for span in queued}) == 2
    assert {parent_id(span) for span in queued} < {own_id(span) for span in calls}


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["none", "all"])
async def test_rounds_are_spans_where_that_is_asked_for(share: float) -> None:
    spans = KeptSpans()
    async with serving(FakeVerifier()) as verifier, traced(spans, verifier, rounds_share=share) as (stub, _):
        last = await last_of(stub, request())
    rounds = spans.by_name().get("round", [])
    assert len(rounds) == (last.speculation.rounds if share else 0)
    for before, after in pairwise(rounds):
        # Back to back, save for how exactly two clocks are compared.
        assert abs((after.start_time or 0) - (before.end_time or 0)) < 1e6
    lengths = [attributes(span)["coppice.base_length"] for span in rounds]
    assert lengths == list(range(len(SECRET), len(SECRET) + len(rounds)))


async def test_a_lost_verifier_is_seen_as_a_second_opening() -> None:
    spans = KeptSpans()
    async with serving(FakeVerifier(drops=1)) as verifier, traced(spans, verifier) as (stub, _):
        await last_of(stub, request())
    assert [event.name for event in spans.only("output").events] == ["opened", "opened"]


async def test_what_nobody_records_is_not_recorded_by_back_ends_either() -> None:
    spans, fake = KeptSpans(), FakeVerifier()
    async with serving(fake) as verifier, traced(spans, verifier, silent=True) as (stub, _):
        await last_of(stub, request())
        await last_of(stub, request(), UNRECORDED_CALLER)
        assert not spans.all
        await last_of(stub, request(), CALLER)
    assert spans.by_name().keys() == {"text_completion", "tokenize", "output", "prompt", "decode"}
    # The last bit says whether it is recorded.
    assert [int(opened.traceparent[-2:], 16) & 1 for opened in fake.opened] == [0, 0, 1]


@pytest.mark.parametrize(
    ("fake", "message", "reason", "is_fault"),
    [
        (FakeVerifier(), request(temperature=-1.0), "invalid", False),
        (FakeVerifier(fails_with=grpc.StatusCode.INTERNAL.value[0]), request(), "internal", True),
    ],
    ids=["the client's mistake", "ours"],
)
async def test_what_fails_says_why(
    fake: FakeVerifier, message: inference_pb2.GenerateRequest, reason: str, is_fault: bool
) -> None:
    spans = KeptSpans()
    async with serving(fake) as verifier, traced(spans, verifier) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await last_of(stub, message)
        await eventually(lambda: "text_completion" in spans.by_name())
    ended = [span for name in ("text_completion", "output") for span in spans.by_name().get(name, [])]
    assert [attributes(span)["error.type"] for span in ended] == [reason] * (1 + is_fault)
    assert [not span.status.is_ok for span in ended] == [is_fault] * len(ended)


async def test_a_cancelled_call_ends_every_span_of_every_service() -> None:
    spans = KeptSpans()
    async with (
        tiny_verifier([partial(sequence_traces, spans.tracer())]) as verifier,
        traced(spans, verifier) as (stub, _),
    ):
        call = stub.Generate(request(prompt="ab"), timeout=20)
        await call.read()
        call.cancel()
        await eventually(lambda: {"text_completion", "output", "verify"} <= spans.by_name().keys())
    ended = {name: attributes(spans.only(name)).get("error.type") for name in ("text_completion", "output")}
    assert ended == {"text_completion": "cancelled", "output": "cancelled"}


async def test_untraced_requests_tell_back_ends_nothing() -> None:
    fake, drafter = FakeVerifier(), FakeDrafter()
    async with serving(fake) as verifier, serving(drafter) as drafting:
        config = Config(
            verifier_address=verifier, drafter_addresses=(drafting,), grace_s=0.0, cache_drafter=False, planner="fixed"
        )
        async with running(config) as orchestrator, rpc.open_channel(orchestrator.address) as channel:
            await last_of(inference_pb2_grpc.InferenceServiceStub(channel), request(), CALLER)
    assert [opened.traceparent for opened in (*fake.opened, *drafter.opened)] == ["", ""]
