"""A public load tool, h2load of nghttp2, unchanged against the orchestrator, as in docs/load.md."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from coppice.v1 import inference_pb2, sampling_pb2
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect

pytestmark = pytest.mark.skipif(not shutil.which("h2load"), reason="no h2load (Debian: nghttp2-client)")

NUM_REQUESTS = 40
NUM_TOKENS = 12
METHOD = "/coppice.v1.InferenceService/Generate"


@pytest.mark.parametrize(("temperature", "num_ended"), [(0.0, NUM_REQUESTS), (-1.0, 0)], ids=["good", "refused"])
async def test_its_requests_end_as_those_of_a_grpc_client_and_refused_ones_succeed_over_http(
    start_fakes: StartFakes, tmp_path: Path, temperature: float, num_ended: int
) -> None:
    """h2load knows no gRPC status: whether requests were answered, the orchestrator's metrics say."""
    request = inference_pb2.GenerateRequest(
        prompt="def ",
        stopping=sampling_pb2.StoppingOptions(max_tokens=NUM_TOKENS),
        sampling=sampling_pb2.SamplingParams(temperature=temperature),
    ).SerializeToString()
    body = tmp_path / "request.bin"
    # gRPC's frame: not compressed, and the length.
    body.write_bytes(b"\0" + len(request).to_bytes(4, "big") + request)
    options = ["-n", str(NUM_REQUESTS), "-c", "4", "-m", "2", "-d", str(body)]
    options += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    async with start_fakes(FakeVerifier(), FakeDrafter(propose=perfect(depth=3))) as (_, orchestrator):
        tool = await asyncio.create_subprocess_exec(
            "h2load", *options, f"http://{orchestrator.address}{METHOD}", stdout=asyncio.subprocess.PIPE
        )
        said = (await asyncio.wait_for(tool.communicate(), 90))[0].decode()
        tally = orchestrator.service.tally
        await eventually(lambda: tally.finished["length"] == num_ended)
        assert tally.num_generated() == num_ended * NUM_TOKENS
    assert tool.returncode == 0
    assert re.search(rf"^requests: .* {NUM_REQUESTS} succeeded, 0 failed, 0 errored, 0 timeout$", said, re.MULTILINE)
