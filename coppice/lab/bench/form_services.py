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


def up_arguments(form: Form, spec: TopologySpec) -> list[str]:
    """What follows `coppice` on the command line that starts such a form on a port of its own."""
    arguments = ["up", "--port", "0", "--target", spec.target]
    for drafter in spec.drafters:
        arguments += ["--drafter", f"{drafter.kind}={drafter.model}"]
    if spec.threads:
        arguments += ["--threads", str(spec.threads)]
    if form.kind is Kind.SYNCHRONOUS:
        arguments += ["--rounds", form.kind.value]
    return [*arguments, "--colocated"] if form.kind is Kind.COLOCATED else arguments


def orchestrator_settings(form: Form, drafters: Sequence[str]) -> dict[str, str]:
    """Environment of an orchestrator of such a form, whose drafters it finds at these addresses."""
    rounds = {"ROUNDS": form.kind.value} if form.kind is Kind.SYNCHRONOUS else {}
    return {**NO_CACHE, **rounds, "DRAFTER_ADDRESSES": ",".join(drafters)}


async def measure_with_forms(suite: LatencySuite, spec: TopologySpec, forms: Sequence[Form]) -> dict[str, Any]:
    """Start a topology and what the forms need besides, measure, and stop everything.

    Raises:
        BenchmarkError: the measurement cannot go on.
        ChildError: a process did not start, or ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        topology = Topology(spec)
        stack.push_async_callback(topology.stop)
        await topology.start()
        ahead = await _drafters_ahead(topology, spec, forms)
        addresses, children = {}, []
        for form in forms:
            if form.kind is Kind.COLOCATED:
                child = Child(form.name, "coppice.cli", NO_CACHE, None, up_arguments(form, spec))
                stack.push_async_callback(child.stop, STOP_TIMEOUT_S)
                await child.start()
                addresses[form] = await child.ready(START_TIMEOUT_S)
                children.append(child)
            else:
                near = ahead if form.kind is Kind.DRAFT_AHEAD else topology.drafter_addresses
                drafters = await stack.enter_async_context(wires(near, form.delay_ms))
                env = orchestrator_settings(form, drafters)
                addresses[form] = await topology.add_orchestrator(form.name, env)
        measuring = replace(suite, forms=addresses).run(topology.address)
        return await unless_one_fails(topology, measuring, children)


async def _drafters_ahead(topology: Topology, spec: TopologySpec, forms: Sequence[Form]) -> Sequence[str]:
    """Addresses of one drafter more of each kind, which drafts ahead; none where no form asks for it."""
    if not any(form.kind is Kind.DRAFT_AHEAD for form in forms):
        return ()
    return [await topology.add_drafter(f"{one.kind} ahead", one, AHEAD) for one in spec.drafters]


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
