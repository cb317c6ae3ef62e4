"""The verifier as a process, and what it says of itself by how it is configured."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import StoppingOptions
from coppice.net import rpc
from coppice.net.certificates import Certificates
from coppice.v1 import verifier_pb2_grpc
from tests.certificates import directory
from tests.integration.test_orchestrator_metrics import free_port
from tests.integration.verify_peer import TIMEOUT_S, Peer
from tests.tiny_checkpoint import write_tiny_llama
from tests.unit.verifier_svc.engine_harness import Harness
from verifier_svc.app import new_servicer
from verifier_svc.config import ENGINE_LOST, VerifierConfig
from verifier_svc.engine.kv_cache import BLOCK_SIZE, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model import loading
from verifier_svc.model.loading import load_probed_target
from verifier_svc.verify.output_end import FinishReason

VOCAB = 61
CONTEXT = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verifier")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=CONTEXT)
    return directory


@pytest.mark.parametrize(("switch", "expected"), [("on", BLOCK_SIZE), ("off", 0)])
def test_prefix_reuse_can_be_switched_off(checkpoint: Path, switch: Literal["on", "off"], expected: int) -> None:
    config = VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=1, prefix_reuse=switch)
    target, info = load_probed_target(config)
    tokens = [5] * (BLOCK_SIZE + 1)
    first, second = SequenceCache(target.cache, 2 * BLOCK_SIZE), SequenceCache(target.cache, 2 * BLOCK_SIZE)
    target.forward(target.plan([SequenceRows(first, tokens)]))
    first.keep(range(len(tokens)))
    first.publish(tokens)
    assert second.adopt(tokens) == expected
    assert info.shared_block_tokens == expected


def test_the_server_says_what_the_exactness_probe_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=1)
    monkeypatch.setattr(loading, "rows_stand_alone", lambda *_: False)
    target, info = load_probed_target(config)
    assert (info.exact, info.bit_exact, info.near_tie_gap) == (False, False, 1e-4)
    # It does not pay for what it does not get.
    assert len(target.plan([SequenceRows(SequenceCache(target.cache, 64), [5])]).token_ids) == 1


@pytest.mark.parametrize(
    ("settings", "exact", "gap"),
    [({}, True, 0.0), ({"near_tie_gap": 0.5}, True, 0.0), ({"exactness": "fast", "near_tie_gap": 0.5}, False, 0.5)],
    ids=["strict", "strict with a gap", "fast"],
)
def test_near_ties_are_counted_in_fast_mode_alone(
    settings: dict[str, Any], exact: bool, gap: float, checkpoint: Path
) -> None:
    _, info = load_probed_target(
        VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=1, **settings)
    )
    assert (info.exact, info.near_tie_gap) == (exact, gap)
    assert info.bit_exact >= exact


def test_where_the_cache_holds_less_than_the_model_s_context_requests_without_max_tokens_run_to_its_end(
    tmp_path: Path,
) -> None:
    write_tiny_llama(tmp_path, vocab_size=VOCAB, max_context_tokens=8192)
    config = VerifierConfig(model=str(tmp_path), device="cpu", threads=1, kv_cache_mib=1)
    target, info = load_probed_target(config)
    assert info.max_context_tokens == target.cache.num_blocks * BLOCK_SIZE - config.max_nodes < 8192
    engine, _ = new_servicer(config, target, info)
    engine.start()
    prompt = [5] * (info.max_context_tokens - 3)
    [result] = Harness(engine).generate([prompt], stopping=StoppingOptions(ignore_eos=True))
    engine.stop()
    assert result.error is None
    assert result.finish is not None
    assert (result.finish.reason, len(result.token_ids)) == (FinishReason.CONTEXT_LENGTH, 3)
    with pytest.raises(IncompatibleError, match="KV_CACHE_MIB"):
        load_probed_target(config.model_copy(update={"max_nodes": 8192}))


async def test_the_process_serves_metrics_and_health_where_it_is_told_to_speaks_tls_and_drains(
    checkpoint: Path, tmp_path: Path
) -> None:
    files = directory(tmp_path / "tls", trustme.CA())
    port, health_port = free_port(), free_port()
    secured = {"TLS_CERT": files.cert, "TLS_KEY": files.key, "TLS_CLIENT_CA": files.ca, "HEALTH_PORT": str(health_port)}
    # Every choice is a near-tie.
    settings = {
        "EXACTNESS": "fast",
        "COPPICE_LAB": '{"near_tie_gap": 1e9}',
        "METRICS_PORT": str(port),
        "METRICS_TLS": "on",
        "KV_CACHE_MIB": "1",
    }
    env = {
        **os.environ,
        "MODEL": str(checkpoint),
        "DEVICE": "cpu",
        "THREADS": "1",
        "GRACE_S": "300",
        **settings,
        **secured,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "verifier_svc", env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(60):
        word, address = (await process.stdout.readline()).decode().split()
        assert word == "ready"
        async with rpc.open_channel(f"127.0.0.1:{health_port}") as channel:
            request = health_pb2.HealthCheckRequest(service="coppice.v1.VerifierService")
            reply = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        async with rpc.open_channel(address, certificates=Certificates(files.caller())) as channel:
            peer = Peer(verifier_pb2_grpc.VerifierServiceStub(channel))
            await peer.open()
            near_ties = 0
            while (response := await peer.next()).HasField("outcome"):
                near_ties += response.outcome.near_ties
            text = await asyncio.to_thread(_get, f"https://127.0.0.1:{port}/metrics", files.ca)
            process.send_signal(signal.SIGTERM)
            assert (await peer.next()).HasField("draining")
            # What is left of its grace is not waited for once nobody uses it.
            peer.call.cancel()
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0
    assert near_ties == 12
    assert 'coppice_verifier_exactness{mode="fast"} 1.0' in text
    assert "coppice_verifier_near_ties_total 12.0" in text
    assert "coppice_verifier_committed_tokens_total 12.0" in text
    assert 'coppice_verifier_certificate_expiry_timestamp_seconds{use="server"}' in text
    assert "fast mode" in log


def _get(address: str, ca: str) -> str:
    with urllib.request.urlopen(address, timeout=TIMEOUT_S, context=ssl.create_default_context(cafile=ca)) as answer:
        content: bytes = answer.read()
        return content.decode()


# The model thread itself fails with the first sequence.
BROKEN_SCHEDULER = """
import runpy
from verifier_svc.engine.scheduler import Scheduler
Scheduler.next_batch = None
runpy.run_module("verifier_svc", run_name="__main__")
"""


async def test_a_process_that_can_compute_nothing_any_more_cuts_its_streams_off_and_ends(checkpoint: Path) -> None:
    env = {**os.environ, "MODEL": str(checkpoint), "DEVICE": "cpu", "THREADS": "1", "GRACE_S": "300"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BROKEN_SCHEDULER),
        env={**env, "KV_CACHE_MIB": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(60):
        _, address = (await process.stdout.readline()).decode().split()
        async with rpc.open_channel(address) as channel:
            peer = Peer(verifier_pb2_grpc.VerifierServiceStub(channel))
            await peer.open()
            assert await peer.call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        log = (await process.stderr.read()).decode()
        assert await process.wait() == ENGINE_LOST
    assert "the model thread has ended" in log


# Nothing can be loaded.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_module("verifier_svc", run_name="__main__")
"""


def test_a_bad_setting_stops_the_process_before_it_loads_anything_and_is_named() -> None:
    env = {**os.environ, "MODEL": "a model", "THREADS": "two"}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "THREADS must be a whole number of at least 0, got 'two'" in ended.stderr
