"""The drafter as a process: when it is ready, how it stops, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.net import rpc
from coppice.net.certificates import Certificates
from coppice.v1 import drafter_pb2_grpc
from drafter_svc.service import SERVICE_NAME
from tests.certificates import directory
from tests.integration.draft_peer import TIMEOUT_S, Peer
from tests.integration.test_orchestrator_metrics import free_port
from tests.tiny_drafter import write_tiny_drafter


@contextlib.asynccontextmanager
async def running(**env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The service as a process of its own, which does not outlive the test."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "drafter_svc",
        env={**os.environ, **env},
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_the_process_says_when_it_is_ready_and_drains_on_sigterm(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path, vocab_size=53, max_context_tokens=48)
    files = directory(tmp_path / "tls", trustme.CA())
    health_port, metrics_port = free_port(), free_port()
    secured = {"TLS_CERT": files.cert, "TLS_KEY": files.key, "TLS_CLIENT_CA": files.ca, "HEALTH_PORT": str(health_port)}
    secured |= {"METRICS_PORT": str(metrics_port), "METRICS_TLS": "on"}
    async with running(MODEL=str(tmp_path), DEVICE="cpu", GRACE_S="60", **secured) as process:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("ready 127.0.0.1:")
        async with (
            rpc.open_channel(line.split()[1], certificates=Certificates(files.caller())) as channel,
            rpc.open_channel(f"127.0.0.1:{health_port}") as probe,
        ):
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            health = health_pb2_grpc.HealthStub(probe).Watch(request, timeout=TIMEOUT_S)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            peer = Peer(drafter_pb2_grpc.DrafterServiceStub(channel))
            await peer.open(1)
            await peer.tree(1, 5)
            text = await asyncio.to_thread(read_metrics, metrics_port, files.ca)
            assert "coppice_drafter_opened_sequences_total 1.0" in text
            process.send_signal(signal.SIGTERM)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            health.cancel()
            await peer.commit(1, 5, 6)
            await peer.tree(1, 6)
            await peer.finish()
        output, _ = await process.communicate()
        assert output == b""
        assert process.returncode == 0


def read_metrics(port: int, ca: str) -> str:
    trusts = ssl.create_default_context(cafile=ca)
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S, context=trusts) as answer:
        text: bytes = answer.read()
    return text.decode()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MODEL": "/nonexistent", "THREADS": "x"}, "THREADS must be a whole number in 0..1024, got 'x'"),
        ({"MODEL": ""}, "MODEL must be a checkpoint directory or hub id, got ''"),
        (
            {"MODEL": "/nonexistent", "TLS_CERT": "/none", "TLS_KEY": "/none", "TLS_CLIENT_CA": "/none"},
            "TLS_CERT cannot be read: [Errno 2] No such file or directory: '/none'",
        ),
    ],
)
async def test_a_bad_configuration_stops_the_process(env: dict[str, str], message: str) -> None:
    async with running(**env) as process:
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert errors.decode().strip() == message
