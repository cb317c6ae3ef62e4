"""`python -m tests.gateway_cost`: what HTTP costs against gRPC, over a toy verifier, in turn, with a raw-socket client.

The verifier draws a token every 5 ms. A chunk's delay counts from when its token was drawn, in another process: both
read the machine's one monotonic clock. Other processes should be quiet.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coppice.client import Client, Options
from coppice.net.rpc import run, stop_signal
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeVerifier
from tests.http_client import request_bytes
from tests.toy_target import babble

NUM_TOKENS = 40
PASS_S = 0.005
WARM_UP = 5
PAUSE_S = 0.02


async def serve(drawn: Path) -> None:
    """Serve the toy until a stop signal; then write when each seed's tokens were drawn, in nanoseconds."""
    times: dict[int, list[int]] = {}

    def target(tokens: Sequence[int], seed: int) -> int:
        times.setdefault(seed, []).append(time.monotonic_ns())
        return babble(tokens, seed)

    async with orchestrator_on_fakes(FakeVerifier(target=target, pass_s=PASS_S)) as (_, one):
        sys.stdout.write(f"ready {one.address}\n")
        sys.stdout.flush()
        await stop_signal()
    drawn.write_text(json.dumps(times))  # noqa: ASYNC240  at the end


def started(*arguments: str, **env: str) -> tuple[subprocess.Popen[str], str]:
    """A process that says where it serves."""
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
    assert process.stdout is not None
    return process, process.stdout.readline().split()[1]


def over_http(client: socket.socket, seed: int) -> list[int]:
    """When the request was sent, and when each chunk came."""
    fields = {"model": "toy", "prompt": "def ", "max_tokens": NUM_TOKENS, "seed": seed, "stream": True}
    body = json.dumps({**fields, "ignore_eos": True}).encode()
    times = [time.monotonic_ns()]
    client.sendall(request_bytes("POST", "/v1/completions", body, {"connection": "keep-alive"}))
    with client.makefile("rb") as answer:
        while answer.readline() != b"\r\n":
            pass
        while size := int(answer.readline(), 16):
            answer.read(size + 2)
            times.append(time.monotonic_ns())
        answer.readline()
    return times


async def over_grpc(client: Client, seed: int) -> list[int]:
    """When the request was sent, and when each chunk came."""
    times = [time.monotonic_ns()]
    options = Options(max_tokens=NUM_TOKENS, seed=seed, temperature=1.0, ignore_eos=True)
    async for _ in client.stream("def ", options):
        times.append(time.monotonic_ns())
    return times


async def measure(requests: int) -> None:
    """Requests over both in turn, from seeds that tell them apart."""
    with tempfile.TemporaryDirectory() as directory:
        drawn = Path(directory) / "drawn.json"
        server, orchestrator = started("tests.gateway_cost", "--drawn", str(drawn))
        settings = {"ORCHESTRATOR_ADDRESS": orchestrator, "LISTEN_ADDRESS": "127.0.0.1:0"}
        gateway, address = started("coppice.gateway", **settings)
        came: dict[str, dict[int, list[int]]] = {"grpc": {}, "http": {}}
        try:
            host, _, port = address.rpartition(":")
            async with Client(orchestrator) as client:
                with socket.create_connection((host, int(port))) as raw:
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for seed in range(0, 2 * (requests + WARM_UP), 2):
                        came["grpc"][seed] = await over_grpc(client, seed)
                        await asyncio.sleep(PAUSE_S)
                        came["http"][seed + 1] = over_http(raw, seed + 1)
                        await asyncio.sleep(PAUSE_S)
        finally:
            for process in (gateway, server):
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=30)
        times = {int(seed): values for seed, values in json.loads(drawn.read_text()).items()}
    firsts: dict[str, list[float]] = {}
    for kind, by_seed in came.items():
        kept = {seed: values for seed, values in by_seed.items() if seed >= 2 * WARM_UP}
        first = firsts[kind] = [(values[1] - values[0]) / 1e6 for values in kept.values()]
        delays = [
            (chunk - token) / 1e6
            for seed, values in kept.items()
            for chunk, token in zip(values[1 : NUM_TOKENS + 1], times[seed], strict=True)
        ]
        sys.stdout.write(
            f"{kind}: first token p50 {statistics.median(first):.3f} ms, "
            f"delay of a chunk p50 {statistics.median(delays):.3f} ms "
            f"({len(first)} requests, {len(delays)} chunks)\n"
        )
    # Of neighbours: what changes meanwhile is in both.
    added = [http - grpc for grpc, http in zip(firsts["grpc"], firsts["http"], strict=True)]
    sys.stdout.write(f"added to the first token by http, p50 of pairs: {statistics.median(added):.3f} ms\n")


def main(
    requests: Annotated[int, typer.Option(help="Requests over each.")] = 60,
    drawn: Annotated[Path | None, typer.Option(help="For the serving process: where it writes its times.")] = None,
) -> None:
    """Measure, or serve."""
    run(lambda: measure(requests) if drawn is None else serve(drawn))


if __name__ == "__main__":
    typer.run(main)
