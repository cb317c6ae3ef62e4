"""What clients are told of errors: their own mistakes by field, ours as such, and nothing of the inside."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice.core.tokenizer import TargetTokenizer
from coppice.net import rpc
from coppice.net.access_token import bearer_metadata, token_digest
from coppice.v1 import inference_pb2, sampling_pb2
from orchestrator.app import Orchestrator
from orchestrator.request.rounds import Outcome
from orchestrator.request.transcript import Transcript
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually
from tests.integration.test_orchestrator_requests import WRONG

# What happens to stand in the texts of errors from inside.
PLANTED = "redis://:swordfish@10.0.0.7:6379 in /srv/coppice/orchestrator/secret.py of class SecretStore"
INSIDE = re.compile(
    r"swordfish|SecretStore|Traceback|<class|\bobject at 0x"
    # Addresses, paths, and names of modules and of classes of errors.
    r"|\d+\.\d+\.\d+\.\d+|localhost|:\d{4,5}\b"
    r"|/(srv|tmp|root|home|usr|etc|proc|work)\b|\.py\b"
    r"|\b(orchestrator|verifier_svc|drafter_svc|coppice|grpc)\.\w"
    r"|\b[A-Z]\w*(Error|Exception)\b"
)
GENERATE, INFO = "/coppice.v1.InferenceService/Generate", "/coppice.v1.InferenceService/GetModelInfo"
GOOD = inference_pb2.GenerateRequest(prompt="def ", stopping=sampling_pb2.StoppingOptions(max_tokens=5))
ENDLESS = inference_pb2.GenerateRequest(prompt="def ")
ENDLESS.stopping.ignore_eos = True
INTERNAL = grpc.StatusCode.INTERNAL


async def told(
    orchestrator: Orchestrator, data: bytes, method: str = GENERATE, token: str = "", timeout_s: float = 10.0
) -> tuple[grpc.StatusCode, str]:
    """Status and everything that comes with it, in one text; a call that ends well is a failed test."""
    async with rpc.open_channel(orchestrator.address) as channel:
        call = channel.unary_stream(method)(data, metadata=bearer_metadata(token), timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        metadata = list(caught.value.trailing_metadata() or ())
    return caught.value.code(), f"{caught.value.details()} {metadata}"


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError(PLANTED)


def test_what_is_looked_for_is_found() -> None:
    for text in (
        "RuntimeError: no",
        "at 10.1.2.3",
        "dns:///a:50051",
        "/tmp/x",
        "verifier_svc.engine.engine",
        "<class 'int'>",
    ):
        assert INSIDE.search(text)
    assert not INSIDE.search("sampling.top_p: must be in (0, 1], got 7.0; 3 running, 2 waiting")


@pytest.mark.parametrize("what", ["reading the prompt", "an outcome", "the place of a request"])
async def test_an_unexpected_error_is_internal_and_its_text_stays_here(
    what: str, start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (_, orchestrator):
        if what == "reading the prompt":
            monkeypatch.setattr(TargetTokenizer, "encode", raising)
        elif what == "an outcome":
            monkeypatch.setattr(Transcript, "append", raising)
        else:
            monkeypatch.setattr(orchestrator.service.admission, "enter", raising)
        code, text = await told(orchestrator, GOOD.SerializeToString())
    assert code == INTERNAL
    assert re.match(r"internal error, incident [0-9a-f]{12} ", text)
    assert not INSIDE.search(text)
    # Those who may see it find it by its number.
    [incident] = re.findall(r"incident ([0-9a-f]+)", text)
    assert incident in caplog.text
    assert "swordfish" in caplog.text


async def test_an_error_of_ours_that_has_a_name_is_told_no_better(start_fakes: StartFakes) -> None:
    """The verifier's own INTERNAL, and an answer of it that makes no sense."""
    verifier = FakeVerifier(fails_with=INTERNAL.value[0])
    async with start_fakes(verifier) as (_, orchestrator):
        failed = await told(orchestrator, GOOD.SerializeToString())
    async with start_fakes(FakeVerifier()) as (_, orchestrator):
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(GOOD)
        # It sends none.
        request.response.top_log_probs = 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outcome, "log_probs", (), raising=False)
            patch.setattr("coppice.wire.convert.outcome_log_probs", lambda message: ())
            senseless = await told(orchestrator, request.SerializeToString())
    for code, text in (failed, senseless):
        assert code == INTERNAL
        assert text.startswith("internal error, incident")
        assert "verifier" not in text
        assert "top_k" not in text


@pytest.mark.parametrize("method", [GENERATE, INFO, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"])
async def test_bytes_that_are_no_message_are_the_caller_s_mistake(
    method: str, start_fakes: StartFakes, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_fakes(FakeVerifier()) as (_, orchestrator):
        caplog.set_level(logging.WARNING)
        for data in (b"\xff\xff\xff", b"\x0a\xff", b"\x08"):
            code, text = await told(orchestrator, data, method)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert text.startswith("request: is not a message of this method")
            assert not INSIDE.search(text)
        assert not caplog.records


async def test_no_wrong_request_is_told_anything_of_the_inside(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (_, orchestrator):
        for field, request in WRONG:
            code, text = await told(orchestrator, request.SerializeToString())
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert not INSIDE.search(text), field


async def test_no_refusal_tells_anything_of_the_inside(start_fakes: StartFakes, tokens_file: Path) -> None:
    good = GOOD.SerializeToString()
    settings = {"tokens_file": str(tokens_file), "max_requests": 1, "max_queued": 0}
    codes = set()
    async with start_fakes(FakeVerifier(pass_s=0.005), **settings) as (_, orchestrator):
        calls: list[Callable[[], Any]] = [
            lambda: told(orchestrator, good),
            lambda: told(orchestrator, good, "/no.such.Service/Method", "mine"),
            lambda: told(orchestrator, bytes(rpc.MAX_MESSAGE_BYTES + 1), GENERATE, "mine"),
            lambda: told(orchestrator, ENDLESS.SerializeToString(), token="mine", timeout_s=0.2),
        ]
        for call in calls:
            code, text = await call()
            codes.add(code)
            assert not INSIDE.search(text.replace(str(rpc.MAX_MESSAGE_BYTES), "")), text
        running = asyncio.create_task(told(orchestrator, ENDLESS.SerializeToString(), token="mine", timeout_s=0.5))
        await asyncio.sleep(0.1)
        code, text = await told(orchestrator, good, token="mine")
        codes.add(code)
        assert not INSIDE.search(text)
        await running
    assert codes == {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(json.dumps({"tenant": "alice", "sha256": [token_digest("mine")]}))
    return path


async def test_a_lost_verifier_and_refused_back_ends_are_told_without_their_addresses(start_fakes: StartFakes) -> None:
    foreign = FakeDrafter(kind="foreign", tokenizer_fingerprint="other")
    verifiers = [FakeVerifier(drops=99, drop_after=1), FakeVerifier(model="another"), FakeVerifier(drops=99)]
    async with start_fakes(verifiers, foreign, resume_s=0.2) as (client, orchestrator):
        await eventually(lambda: bool(orchestrator.verifiers.refusals()))
        info = await client.model_info()
        for verifier in orchestrator.verifiers.clients:
            await verifier.stream.stop()
        code, text = await told(orchestrator, GOOD.SerializeToString())
    assert code == grpc.StatusCode.UNAVAILABLE
    assert len(info.refusals) == 2
    for one in (text, *info.refusals):
        assert not INSIDE.search(one)
