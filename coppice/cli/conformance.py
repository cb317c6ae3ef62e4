"""`coppice conformance`: the lossless suite against a running deployment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.cli.options import ServerOptions
from coppice.cli.topology import TopologySpec, running
from coppice.net.tls import ChannelTls

if TYPE_CHECKING:
    from coppice.lab.conformance.catalogue import Case

# What the scheduler says of a sequence that has ended.
_PREEMPTED = re.compile(r"sequence \d+ of stream \d+ was preempted (\d+) times")


class PreemptionLog:
    """Counts how often sequences that have ended had to make room for others."""

    def __init__(self) -> None:
        self.num_preemptions = 0

    def read(self, line: str) -> None:
        if found := _PREEMPTED.search(line):
            self.num_preemptions += int(found[1])


def conformance(
    server: ServerOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Cases to run, such as 'stops/*'; repeatable.")
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names of the cases, and run none.")] = False,
    reference: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The served checkpoint, to compare greedy outputs with transformers."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a case, and each of its requests, may take.")
    ] = (60.0),
    kv_cache_mib: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="KV cache of a private topology. A small one makes sequences preempt each other."
        ),
    ] = 0,
) -> None:
    """Prove that a deployment is lossless over its public API, case by case.

    Exit code 1 when a case fails. A case that the deployment cannot run is skipped, with the reason.
    """
    from coppice.lab.conformance.catalogue import cases_like

    cases = cases_like(only or ())
    if not cases:
        raise typer.BadParameter("no case has such a name; --list prints them", param_hint="--only")
    if list_cases:
        typer.echo("\n".join(case.name for case in cases))
        return
    if reference is not None and not (reference / "config.json").is_file():
        raise typer.BadParameter(f"no checkpoint in {reference}", param_hint="--reference")
    secured, spec = server.secured(), server.spec()
    where = server.address if spec is None else replace(spec, kv_cache_mib=kv_cache_mib)
    show: Callable[[str], None] = (lambda text: None) if as_json else typer.echo
    report = asyncio.run(_run(where, secured, server.token, cases, reference, timeout, show))
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    if report["failed"]:
        raise typer.Exit(1)


async def _run(
    where: TopologySpec | str,
    tls: ChannelTls | None,
    token: str,
    cases: list[Case],
    reference: Path | None,
    timeout_s: float,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Run cases against a private topology, or what serves at an address; returns the report as an object."""
    from coppice.lab.conformance.deployment import connected
    from coppice.lab.conformance.reference import ReferenceModel
    from coppice.lab.conformance.report import as_json, heading, result_lines, run_cases, summary

    async with contextlib.AsyncExitStack() as stack:
        log = None
        if isinstance(where, TopologySpec):
            log = PreemptionLog()
            where = (await stack.enter_async_context(running(where, log.read))).address
        deployment = await stack.enter_async_context(connected(where, timeout_s, tls, token))
        if reference is not None:
            # Before the cases, whose time is for the deployment.
            dtype = deployment.info.dtype or "float32"
            deployment.reference = await asyncio.to_thread(
                ReferenceModel, reference, dtype, deployment.info.quantization
            )
        if log is not None:
            deployment.num_preemptions = lambda: log.num_preemptions
        show(heading(where, deployment.info))
        results = await run_cases(cases, deployment, timeout_s, lambda result: show(result_lines(result)))
        num_preemptions = None if log is None else log.num_preemptions
        show(summary(results, num_preemptions))
        return as_json(where, deployment.info, results, num_preemptions)
