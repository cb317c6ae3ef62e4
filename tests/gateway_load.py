"""`python -m tests.gateway_load`: the gateway under load, over HTTP and gRPC in turn. Other processes should be quiet.

Throughput of `--requests` at once with the bundled models, and the longest stall of a gateway on one core with
`--streams` open streams of a toy verifier, seen by probes of /health on other connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from typing import Annotated

import typer

from coppice.cli.topology import TopologySpec, running
from coppice.client import Client, Options
from coppice.net.rpc import run, stop_signal
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeVerifier
from tests.faults.deployment import free_port
from tests.gateway_cost import started
from tests.http_client import chunk_of, head_of, opened, request_bytes

NUM_TOKENS = 512
PROMPTS = ("def fibonacci(n):", "class Stack:", "import os\n", "def read_lines(path):")
# Of the toy verifier: how often each of many streams has a token.
PASS_S = 0.25
STREAM_TOKENS = 40
PROBE_S = 0.005
CONTEXT = 1024


async def http_tokens(address: str, model: str, prompt: str, seed: int, tokens: int) -> int:
    """Number of events of a stream over HTTP."""
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "seed": seed, "stream": True, "ignore_eos": True}
    # A salt of its own: the two ways must not draft from each other's outputs.
    fields["cache_salt"] = f"http{seed}"
    reader, writer = await opened(address)
    try:
        writer.write(request_bytes("POST", "/v1/completions", json.dumps(fields).encode()))
        status, _ = await head_of(reader)
        assert status == 200
        count = 0
        while await chunk_of(reader):
            count += 1
        return count
    finally:
        writer.close()


async def model_of(address: str) -> str:
    """Name of the served model."""
    reader, writer = await opened(address)
    try:
        writer.write(request_bytes("GET", "/v1/models"))
        _, headers = await head_of(reader)
        name: str = json.loads(await reader.readexactly(int(headers["content-length"])))["data"][0]["id"]
        return name
    finally:
        writer.close()


async def throughput(requests: int, repeats: int) -> None:
    """Tokens per second over both, in turn."""
    spec = TopologySpec(http_port=free_port())
    rates: dict[str, list[float]] = {"grpc": [], "http": []}
    async with running(spec) as topology, Client(topology.address) as client:
        model = await model_of(topology.http_address)
        for repeat in range(repeats + 1):
            for kind in ("grpc", "http") if repeat % 2 else ("http", "grpc"):
                seeds = [(repeat * requests + place, PROMPTS[place % len(PROMPTS)]) for place in range(requests)]
                begun_s = time.monotonic()
                if kind == "http":
                    calls = [
                        http_tokens(topology.http_address, model, prompt, seed, NUM_TOKENS) for seed, prompt in seeds
                    ]
                    await asyncio.gather(*calls)
                else:
                    await asyncio.gather(*(grpc_tokens(client, prompt, seed) for seed, prompt in seeds))
                if repeat:
                    rates[kind].append(requests * NUM_TOKENS / (time.monotonic() - begun_s))
    ratios = [http / grpc for http, grpc in zip(rates["http"], rates["grpc"], strict=True)]
    sys.stdout.write(
        f"throughput at {requests} requests: grpc {statistics.median(rates['grpc']):.0f} tokens/s, "
        f"http {statistics.median(rates['http']):.0f}, ratio {statistics.median(ratios):.3f} "
        f"(median of {len(ratios)} pairs, {min(ratios):.3f} to {max(ratios):.3f})\n"
    )


async def grpc_tokens(client: Client, prompt: str, seed: int) -> None:
    """Read a stream over gRPC."""
    options = Options(max_tokens=NUM_TOKENS, seed=seed, temperature=1.0, ignore_eos=True, cache_salt=f"grpc{seed}")
    async for _ in client.stream(prompt, options):
        pass


async def stalls(streams: int) -> None:
    """The longest answer of /health while streams run."""
    server, orchestrator = started("tests.gateway_load", "--serve")
    settings = {"ORCHESTRATOR_ADDRESS": orchestrator, "LISTEN_ADDRESS": "127.0.0.1:0"}
    gateway, address = started("coppice.gateway", **settings)
    try:
        os.sched_setaffinity(gateway.pid, {0})
        opening = [
            asyncio.create_task(http_tokens(address, "toy", "def ", seed, STREAM_TOKENS)) for seed in range(streams)
        ]
        # Streams that are open: not their opening, all at once.
        await asyncio.sleep(STREAM_TOKENS * PASS_S / 4)
        waits = []
        reader, writer = await opened(address)
        while not any(task.done() for task in opening):
            begun_s = time.monotonic()
            writer.write(request_bytes("GET", "/health", headers={"connection": "keep-alive"}))
            _, headers = await head_of(reader)
            await reader.readexactly(int(headers["content-length"]))
            waits.append(1000 * (time.monotonic() - begun_s))
            await asyncio.sleep(PROBE_S)
        writer.close()
        events = sum(await asyncio.gather(*opening))
    finally:
        for process in (gateway, server):
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
    waits.sort()
    sys.stdout.write(
        f"{streams} streams of {1 / PASS_S:.0f} tokens/s on one core: /health after {statistics.median(waits):.1f} ms, "
        f"p99 {waits[int(0.99 * len(waits))]:.1f} ms, at most {waits[-1]:.1f} ms "
        f"({len(waits)} probes, {events} events)\n"
    )


async def serve() -> None:
    """Serve the toy until a stop signal."""
    verifier = FakeVerifier(pass_s=PASS_S, max_context_tokens=CONTEXT)
    async with orchestrator_on_fakes(verifier, max_requests=1024, shared_places=0) as (_, one):
        sys.stdout.write(f"ready {one.address}\n")
        sys.stdout.flush()
        await stop_signal()


def main(
    requests: Annotated[int, typer.Option(help="Requests at once; 0: no throughput.")] = 16,
    repeats: Annotated[int, typer.Option(help="Pairs of runs.")] = 12,
    streams: Annotated[int, typer.Option(help="Open streams; 0: no stalls.")] = 256,
    is_serving: Annotated[bool, typer.Option("--serve", help="Serve the toy, for the other process.")] = False,
) -> None:
    """Measure, or serve."""
    if is_serving:
        run(serve)
        return
    if requests:
        run(lambda: throughput(requests, repeats))
    if streams:
        run(lambda: stalls(streams))


if __name__ == "__main__":
    typer.run(main)
