"""Forms as running services: orchestrators of one topology's back ends, longer wires, one process for all."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from coppice.cli.child import Child
from coppice.cli.topology import START_TIMEOUT_S, STOP_TIMEOUT_S, Topology, TopologySpec
from coppice.lab.bench.forms import Form, Kind
from coppice.lab.bench.latency import LatencySuite
from coppice.lab.bench.services import unless_one_fails
from coppice.lab.fault_proxy import FaultProxy, Link

# What is remembered of a request's own text needs no drafter, and would hide how far away that is.
NO_CACHE = {"CACHE_DRAFTER": "false"}
AHEAD = {"DRAFT_AHEAD": "on"}


async def measure_with_forms(suite: LatencySuite, spec: TopologySpec, forms: Sequence[Form]) -> dict[str, Any]:
    """Start a topology and what the forms need besides, measure, and stop everything.

    Raises BenchmarkError if the measurement cannot go on. Raises ChildError if a process did not start, or ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        topology = Topology(spec)
        stack.push_async_callback(topology.stop)
        await topology.start()
        # One drafter more of each kind, which drafts ahead, where a form asks for it.
        asked = spec.drafters if any(form.kind is Kind.DRAFT_AHEAD for form in forms) else ()
        ahead = [await topology.add_drafter(f"{one.kind} ahead", one, AHEAD) for one in asked]
        addresses, children = {}, []
        for form in forms:
            if form.kind is Kind.COLOCATED:
                drafters = [text for one in spec.drafters for text in ("--drafter", f"{one.kind}={one.model}")]
                threads = ["--threads", str(spec.threads)] if spec.threads else []
                arguments = ["up", "--port", "0", "--target", spec.target, *drafters, *threads, "--colocated"]
                child = Child(form.name, "coppice.cli", NO_CACHE, None, arguments)
                stack.push_async_callback(child.stop, STOP_TIMEOUT_S)
                await child.start()
                addresses[form] = await child.ready(START_TIMEOUT_S)
                children.append(child)
                continue
            near = ahead if form.kind is Kind.DRAFT_AHEAD else topology.drafter_addresses
            far = await stack.enter_async_context(wires(near, form.delay_ms))
            rounds = {"ROUNDS": form.kind.value} if form.kind is Kind.SYNCHRONOUS else {}
            env = {**NO_CACHE, **rounds, "DRAFTER_ADDRESSES": ",".join(far)}
            addresses[form] = await topology.add_orchestrator(form.name, env)
        measuring = replace(suite, forms=addresses).run(topology.address)
        return await unless_one_fails(topology, measuring, children)


@contextlib.asynccontextmanager
async def wires(addresses: Sequence[str], delay_ms: int) -> AsyncIterator[tuple[str, ...]]:
    """Addresses of the same services from further away, each way; their own where they are not."""
    if not delay_ms:
        yield tuple(addresses)
        return
    link = Link(delay_s=delay_ms / 1000)
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(address).running()) for address in addresses]
        for proxy in proxies:
            proxy.shape(link, link)
        yield tuple(proxy.address for proxy in proxies)
