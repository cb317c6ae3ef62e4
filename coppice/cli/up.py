"""`coppice up`: the whole topology on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.child import ChildError
from coppice.cli.doctor import redis_at
from coppice.cli.errors import require_extra
from coppice.cli.options import (
    AUTO,
    DEFAULT_TARGET,
    OFF,
    Device,
    Drafters,
    Head,
    Space,
    Target,
    Threads,
    refusing,
    topology_spec,
)
from coppice.cli.topology import Topology, TopologySpec, tls_files
from coppice.client import Client, RequestFailedError
from coppice.net.certificates import Certificates
from coppice.net.tls import ChannelTls, TlsError
from coppice.v1 import sampling_pb2

# What each service in front, and then the back ends, have after Ctrl-C: 3 s in all.
INTERRUPTED_S = (0.8, 1.2)
# Of the answer that says what is served.
INFO_S = 2.0


def up(
    target: Target = DEFAULT_TARGET,
    drafter: Drafters = None,
    space: Space = AUTO,
    head: Head = AUTO,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 picks a free one.")] = 0,
    http_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the OpenAI-compatible API over HTTP, with coppice[gateway]. 0: none.",
        ),
    ] = 0,
    redis: Annotated[
        str,
        typer.Option(metavar="URL", help="Redis that keeps the prefix cache. Default: the orchestrator's memory."),
    ] = "",
    device: Device = "",
    threads: Threads = 0,
    dtype: Annotated[
        str,
        typer.Option(metavar="auto|float32|bfloat16", help="Numbers that the target is served in. Default: auto."),
    ] = "",
    quantization: Annotated[
        str, typer.Option(metavar="none|int8", help="int8: the target's weights in 8 bits. Default: none.")
    ] = "",
    tensor_parallel: Annotated[
        int, typer.Option(min=0, metavar="N", help="Processes that hold a part of the target each. Default: one.")
    ] = 0,
    verifiers: Annotated[int, typer.Option(min=1, metavar="N", help="Verifiers, each with the whole target.")] = 1,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            envvar="METRICS_PORT",
            help="Port of the orchestrator's Prometheus metrics; verifiers and drafters have the next ones. 0: none.",
        ),
    ] = 0,
    tls: Annotated[
        str,
        typer.Option(metavar="DIR", help="Speak TLS with ca.pem, cert.pem and key.pem of a directory. Default: plain."),
    ] = "",
    rounds: Annotated[
        str,
        typer.Option(help="asynchronous, or synchronous for comparison: each round waits for its draft."),
    ] = "",
    colocated: Annotated[
        bool, typer.Option("--colocated", help="All services in one process; only the public API has a port.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what services log (LOG_LEVEL), not their warnings alone.")
    ] = False,
) -> None:
    """Run verifier, drafters and orchestrator as separate processes, or as one, until SIGTERM or Ctrl-C.

    Prints `ready 127.0.0.1:PORT` once the orchestrator serves, after the address of HTTP if that is served; what is
    served goes to stderr. SIGTERM lets running requests finish, Ctrl-C does not. Ends with code 2 and the reason when
    something has to be changed, 1 when a service ends by itself.
    """
    require_tls(tls)
    require_tokens(os.environ.get("TOKENS_FILE", ""))
    if http_port:
        require_extra("gateway", "--http-port")
    if redis:
        require_extra("redis", "--redis")
    require_choice("--dtype", dtype, "auto", "float32", "bfloat16")
    require_choice("--quantization", quantization, "none", "int8")
    require_choice("--rounds", rounds, "asynchronous", "synchronous")
    # A target in parts, or in 8 bits, cannot be adapted; nor do parts give the states that a head reads.
    # Synchronous rounds wait for drafters.
    own_space = OFF if space == AUTO and (tensor_parallel > 1 or quantization == "int8") else space
    own_head = OFF if head == AUTO and (tensor_parallel > 1 or rounds == "synchronous") else head
    spec = topology_spec(target, drafter, port, device, threads, own_space, own_head)
    with refusing("--colocated", ValueError):
        spec = replace(
            spec,
            dtype=dtype,
            quantization=quantization,
            tensor_parallel=tensor_parallel,
            redis=redis,
            verifiers=verifiers,
            metrics_port=metrics_port,
            http_port=http_port,
            tls=tls,
            rounds=rounds,
            colocated=colocated,
        )
    if redis.startswith("redis") and (answer := redis_at(redis)).state == "off":
        typer.echo(f"coppice: Redis {answer.found}; {answer.advice}", err=True)
    if not verbose:
        os.environ.setdefault("LOG_LEVEL", "WARNING")
    if error := asyncio.run(serve(spec, partial(expected_gain, target, bool(drafter)), verbose=verbose)):
        raise error


def require_choice(option: str, value: str, *known: str) -> None:
    """Raise typer.BadParameter unless the value of an option is known, or empty."""
    if value and value not in known:
        raise typer.BadParameter(f"must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}", param_hint=option)


def require_tls(directory: str) -> None:
    """Raise typer.BadParameter unless the files of TLS in a directory, if one is given, can be used."""
    if directory:
        with refusing("--tls", TlsError):
            Certificates(ChannelTls(**tls_files(directory)))


def require_tokens(file: str) -> None:
    """Raise ConfigError unless the orchestrator will be able to read its file of tokens, if it is given one."""
    if file:
        from orchestrator.api.token_file import TokenFile

        TokenFile(Path(file))


async def serve(spec: TopologySpec, expected: Callable[[], str], *, verbose: bool) -> ChildError | None:
    """Run a topology until the process is asked to stop; returns the error that ended it before that."""
    topology = Topology(spec, echo=lambda line: typer.echo(line, err=True), verbose=verbose)
    told, interrupted = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    waits = [asyncio.create_task(wait) for wait in (_run(topology, spec, expected), told.wait(), interrupted.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return waits[0].result() if waits[0].done() else None  # type: ignore[return-value]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await (topology.stop(*INTERRUPTED_S, is_interrupted=True) if interrupted.is_set() else topology.stop())


async def _run(topology: Topology, spec: TopologySpec, expected: Callable[[], str]) -> ChildError:
    try:
        await topology.start()
    except ChildError as error:
        return error
    typer.echo(await described(topology, spec), err=True)
    typer.echo(f"gain      {expected()}", err=True)
    if topology.http_address:
        scheme = "https" if topology.tls else "http"
        typer.echo(f"OpenAI's API at {scheme}://{topology.http_address}/v1")
    typer.echo(f"ready {topology.address}")
    return await topology.failed()


async def described(topology: Topology, spec: TopologySpec) -> str:
    """What is served, by the orchestrator's own word where it gives it to anybody, in two lines."""
    tls = ChannelTls(ca=tls_files(spec.tls)["ca"]) if spec.tls else None
    sources = [drafter.kind for drafter in spec.drafters]
    served = ""
    with contextlib.suppress(RequestFailedError):
        async with Client(topology.address, token=os.environ.get("COPPICE_TOKEN", ""), tls=tls) as client:
            info = await client.model_info(INFO_S)
        numbers = info.dtype if info.quantization in ("", "none") else f"{info.quantization} weights"
        exactness = sampling_pb2.Exactness.Name(info.exactness).removeprefix("EXACTNESS_").lower()
        served = f": {numbers}, {exactness}, {info.max_context_tokens} tokens of context"
        sources = list(info.sources)
    return f"target    {Path(spec.target).name}{served}\ndrafters  {', '.join(sources) or 'none'}"


def expected_gain(target: str, has_own_drafters: bool, results: Path = MODELS.parent / "results") -> str:
    """What speculation has gained with the default drafters of a target, by the reports of `coppice bench latency`."""
    for path in () if has_own_drafters else (results / "latency.json", *sorted(results.glob("*/latency.json"))):
        with contextlib.suppress(OSError, ValueError, KeyError):
            report = json.loads(path.read_text())
            machine, at_0, at_1 = report["machine"], report["ratios"]["on/off"], report["ratios"]["on/off@T1"]
            if Path(report["settings"]["target"]).name == Path(target).name:
                where = f"one stream, {machine['cpu']}, {machine['usable_cores']} cores"
                return f"x{at_0:.1f} at temperature 0 and x{at_1:.1f} at 1 where it was measured ({where})"
    return "not measured for this pair; drafting stops where it does not pay"
