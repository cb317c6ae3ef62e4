"""Services with little memory, and with logs that a full disk takes none of."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from coppice import memory_limit
from coppice.client import Client, Options
from tests.faults.doors import write_checkpoint
from tests.http_client import post

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /dev/full")
ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
START_S = 300.0
TOKENS = 40
# Runs a service's module with so many MiB of writable memory.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]) << 20,) * 2)
runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
"""
MIB = {"Mi": 1, "Gi": 1024}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint(directory, 512)
    return directory


def chart_limit(service: str) -> int:
    """Memory of a service's pods, MiB."""
    values = yaml.safe_load((ROOT / "k8s" / "values.yaml").read_text())
    limit = values[service]["resources"]["limits"]["memory"]
    return int(limit[:-2]) * MIB[limit[-2:]]


@contextlib.contextmanager
def process(module: str, limit_mib: int = 0, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A service whose stderr is a full disk."""
    command = [sys.executable, "-c", LIMITED, str(limit_mib), module] if limit_mib else [sys.executable, "-m", module]
    own = {**os.environ, "LISTEN_ADDRESS": "127.0.0.1:0", "LOG_LEVEL": "DEBUG", **env}
    with FULL.open("w") as full:
        one = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full, text=True, env=own, cwd=ROOT)
    try:
        yield one
    finally:
        one.terminate()
        # It ends by itself all the same.
        one.wait(timeout=60)
        assert one.stdout is not None
        one.stdout.close()


async def address_of(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    async with asyncio.timeout(START_S):
        line = await asyncio.to_thread(one.stdout.readline)
    assert line.startswith("ready "), f"it ended: {one.poll()}"
    return line.split()[1]


@contextlib.asynccontextmanager
async def deployed(checkpoint: Path, **limits: int) -> AsyncIterator[tuple[str, str]]:
    """All four services; addresses of the orchestrator and the gateway."""
    model = {"MODEL": str(checkpoint), "DEVICE": "cpu", "THREADS": "1"}
    with contextlib.ExitStack() as stack:
        verifier = stack.enter_context(process("verifier_svc", KV_CACHE_MIB="4", **model))
        drafter = stack.enter_context(process("drafter_svc", **model))
        env = {"VERIFIER_ADDRESS": await address_of(verifier), "DRAFTER_ADDRESSES": await address_of(drafter)}
        front = stack.enter_context(process("orchestrator", limits.get("orchestrator", 0), **env))
        address = await address_of(front)
        gateway = stack.enter_context(
            process("coppice.gateway", limits.get("gateway", 0), ORCHESTRATOR_ADDRESS=address)
        )
        yield address, await address_of(gateway)
        for one in (verifier, drafter, front, gateway):
            assert one.poll() is None


async def test_services_go_on_without_logs_and_within_the_charts_memory(checkpoint: Path) -> None:
    limits = {"orchestrator": chart_limit("orchestrator"), "gateway": chart_limit("gateway")}
    async with deployed(checkpoint, **limits) as (address, http_address), Client(address) as client:
        info = await client.model_info()

        async def one(seed: int) -> None:
            options = Options(max_tokens=TOKENS, seed=seed, temperature=1.0, ignore_eos=True)
            prompt = [98 + seed % 20] * 200
            plain = await client.generate(prompt, Options(**{**vars(options), "speculation": "off"}), timeout_s=60)
            drafted = await client.generate(prompt, options, timeout_s=60)
            fields = {"model": info.model, "prompt": prompt, "max_tokens": TOKENS, "seed": seed, "ignore_eos": True}
            answer = await post(http_address, "/v1/completions", {**fields, "return_token_ids": True})
            assert answer.status == 200, answer.body
            assert list(drafted.token_ids) == list(plain.token_ids) == answer.content["choices"][0]["token_ids"]

        await asyncio.gather(*(one(seed) for seed in range(24)))


def test_a_cache_that_does_not_fit_is_said_in_one_line(checkpoint: Path) -> None:
    env = {**os.environ, "MODEL": str(checkpoint), "DEVICE": "cpu", "THREADS": "1", "LISTEN_ADDRESS": "127.0.0.1:0"}
    command = [sys.executable, "-c", LIMITED, "2500", "verifier_svc"]
    done = subprocess.run(
        command, env={**env, "KV_CACHE_MIB": "8000"}, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 2
    assert "no memory for the target and its KV cache" in done.stderr.splitlines()[-1]
    assert "lower KV_CACHE_MIB" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["verifier_svc", "drafter_svc"])
def test_too_little_memory_for_any_model_is_said_in_one_line(module: str, checkpoint: Path) -> None:
    env = {**os.environ, "MODEL": str(checkpoint), "DEVICE": "cpu", "THREADS": "1", "LISTEN_ADDRESS": "127.0.0.1:0"}
    command = [sys.executable, "-c", LIMITED, "300", module]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("only 300 MiB of memory are allowed here: a model needs at least 512 MiB")


@pytest.mark.parametrize(("name", "no_limit"), [("memory.max", "max"), ("memory.limit_in_bytes", str(2**63 - 4096))])
def test_the_smaller_of_the_limits_counts(
    name: str, no_limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / name
    files = tuple(tmp_path / one.name for one in memory_limit._CGROUPS)
    monkeypatch.setattr(memory_limit, "_CGROUPS", files)
    monkeypatch.setattr(memory_limit.resource, "getrlimit", lambda _: (-1, -1))
    file.write_text(f"{no_limit}\n")
    assert memory_limit.memory_limit_mib() == math.inf
    file.unlink()
    monkeypatch.setattr(memory_limit.resource, "getrlimit", lambda _: (1 << 30, -1))
    assert memory_limit.memory_limit_mib() == 1024
    for text, limit in ((no_limit, 1024), (str(768 << 20), 768), (str(2 << 30), 1024)):
        file.write_text(f"{text}\n")
        assert memory_limit.memory_limit_mib() == limit
    memory_limit.check_memory()
    file.write_text(str(511 << 20))
    with pytest.raises(ValueError, match="only 511 MiB of memory are allowed here"):
        memory_limit.check_memory()
