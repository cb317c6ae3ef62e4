"""`coppice up`: the whole topology on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from typing import Annotated

import typer

from coppice.cli.child import ChildError
from coppice.cli.options import (
    AUTO,
    DEFAULT_TARGET,
    OFF,
    Device,
    Drafters,
    Space,
    Target,
    Threads,
    refusing,
    topology_spec,
)
from coppice.cli.topology import Topology, TopologySpec, tls_files
from coppice.net.certificates import Certificates
from coppice.net.rpc import stop_signal
from coppice.net.tls import ChannelTls, TlsError


def up(
    target: Target = DEFAULT_TARGET,
    drafter: Drafters = None,
    space: Space = AUTO,
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
) -> None:
    """Run verifier, drafters and orchestrator as separate processes, or as one, until SIGTERM or Ctrl-C.

    Prints `ready 127.0.0.1:PORT` once the orchestrator serves, after the address of HTTP if that is served. Ends with
    code 1 and the reason when a service does not start or ends by itself.
    """
    require_tls(tls)
    require_gateway(http_port)
    if rounds not in ("", "asynchronous", "synchronous"):
        raise typer.BadParameter(f"must be asynchronous or synchronous, got {rounds!r}", param_hint="--rounds")
    # What a process holds only a part of cannot be adapted.
    own_drafts = OFF if space == AUTO and tensor_parallel > 1 else space
    spec = topology_spec(target, drafter, port, device, threads, own_drafts)
    with refusing("--colocated", ValueError):
        spec = replace(
            spec,
            tensor_parallel=tensor_parallel,
            redis=redis,
            verifiers=verifiers,
            metrics_port=metrics_port,
            http_port=http_port,
            tls=tls,
            rounds=rounds,
            colocated=colocated,
        )
    if error := asyncio.run(serve(spec)):
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1)


def require_tls(directory: str) -> None:
    """Raise typer.BadParameter unless the files of TLS in a directory, if one is given, can be used."""
    if directory:
        with refusing("--tls", TlsError):
            Certificates(ChannelTls(**tls_files(directory)))


def require_gateway(http_port: int) -> None:
    """Raise typer.BadParameter if HTTP is asked for, and the packages that serve it are not installed."""
    if http_port and not all(map(importlib.util.find_spec, ("starlette", "uvicorn", "httptools"))):
        raise typer.BadParameter("needs coppice[gateway], which is not installed", param_hint="--http-port")


async def serve(spec: TopologySpec) -> ChildError | None:
    """Run a topology until the process is asked to stop; returns the error that ended it before that."""
    topology = Topology(spec, echo=lambda line: typer.echo(line, err=True))
    stopped = asyncio.create_task(stop_signal())
    running = asyncio.create_task(_run(topology))
    try:
        await asyncio.wait({stopped, running}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (stopped, running):
            task.cancel()
        await asyncio.gather(stopped, running, return_exceptions=True)
        await topology.stop()


async def _run(topology: Topology) -> ChildError:
    try:
        await topology.start()
    except ChildError as error:
        return error
    if topology.http_address:
        scheme = "https" if topology.tls else "http"
        typer.echo(f"OpenAI's API at {scheme}://{topology.http_address}/v1")
    typer.echo(f"ready {topology.address}")
    return await topology.failed()
