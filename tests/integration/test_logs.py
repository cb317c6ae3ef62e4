"""What services log of requests: their ids, and never what they say."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

import grpc
import pytest

from coppice.net import rpc
from coppice.obs.logs import JsonFormatter
from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, wrong
from tests.toy_target import babble, plain

SECRET = "the password is swordfish"
PROMPT = [ord(character) for character in SECRET]


def request(identity: str, **sampling: float) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=identity,
        prompt=SECRET,
        sampling=sampling_pb2.SamplingParams(seed=1, **sampling),
        stopping=sampling_pb2.StoppingOptions(max_tokens=30, ignore_eos=True),
    )


async def test_records_of_a_request_have_its_id_and_no_text(
    start_fakes: StartFakes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(JsonFormatter())
    verifier = FakeVerifier(drops=1)
    drafters = FakeDrafter(propose=wrong()), FakeDrafter(gives_up=True, kind="shy")
    async with (
        start_fakes(verifier, *drafters, cache_drafter=True) as (_, orchestrator),
        rpc.open_channel(orchestrator.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        text = "".join([response.text async for response in stub.Generate(request("good-one"), timeout=20)])
        for bad in (request("bad-one", temperature=-1.0), request("bad-two", top_p=7.0)):
            with pytest.raises(grpc.aio.AioRpcError):
                [response async for response in stub.Generate(bad, timeout=20)]
    said = bytes(plain(babble, PROMPT, 30, 1)).decode(errors="replace")
    assert text == said
    lines = [line for line in caplog.text.splitlines() if line.startswith("{")]
    records = [json.loads(line) for line in lines]
    messages = {record["message"]: record.get("request_id") for record in records}
    assert next((key for key in messages if "output ended: length, after 30 tokens" in key), None)
    assert {messages[key] for key in messages if "output ended" in key} == {"good-one"}
    refused = [record["request_id"] for record in records if record["message"] == "request refused: invalid"]
    assert refused == ["bad-one", "bad-two"]
    [dropped] = [identity for message, identity in messages.items() if "shy is dropped" in message]
    assert dropped == "good-one"
    for hidden in (SECRET, said, said[:12], str(PROMPT)[1:40], "swordfish"):
        assert hidden not in caplog.text
    # The back ends are told the id for their own logs.
    assert {opened.request_id for opened in verifier.opened} == {"good-one"}
    assert {opened.request_id for opened in drafters[0].opened} == {"good-one"}


@pytest.mark.parametrize(
    ("module", "name"), [("orchestrator", "LOG_FORMAT"), ("verifier_svc", "LOG_LEVEL"), ("drafter_svc", "LOG_FORMAT")]
)
async def test_a_bad_setting_stops_each_service_and_is_named(module: str, name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        env={**os.environ, "MODEL": "none", "VERIFIER_ADDRESS": "127.0.0.1:1", name: "loud"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert f"{name} must be one of" in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_the_other_ranks_of_a_target_log_as_the_first_does() -> None:
    """Without a model none of them comes far, which it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "verifier_svc.model.parallel.tensor_worker", "3", str(os.getpid()), "0", "none"),
        env={**os.environ, "MODEL": "", "LOG_FORMAT": "json"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    [line] = stderr.decode().splitlines()
    record = json.loads(line)
    assert record["rank"] == 3
    assert record["level"] == "ERROR"
    assert "MODEL" in record["message"]
