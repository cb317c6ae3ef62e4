"""One verifier, a drafter process for every setting, and an orchestrator for every set of drafters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.cli.topology import LOCAL, Topology, TopologySpec
from coppice.lab.bench.ablation.variants import DrafterSetting, Group, Variant
from coppice.lab.bench.beside_services import unless_one_fails
from coppice.lab.bench.cache.redis_server import free_port

# What an orchestrator is in front of: drafters, and whether it has a cache of its own.
Front = tuple[tuple[DrafterSetting, ...], bool]


@dataclass(frozen=True, slots=True)
class Services:
    """Addresses of orchestrators, and of drafters' metrics."""

    # For what speculation off gives.
    plain: str
    fronts: Mapping[Front, str]
    metrics: Mapping[DrafterSetting, str]

    def address(self, variant: Variant) -> str:
        """Where a variant is served."""
        return self.fronts[front_of(variant)]

    def metrics_urls(self, variant: Variant) -> list[str]:
        """The metrics of the drafters that a variant's requests are sent to."""
        return [self.metrics[drafter] for drafter in variant.asked]


def front_of(variant: Variant) -> Front:
    """The orchestrator that a variant needs."""
    return (variant.drafters, variant.has_cache)


async def measure_on_services(
    measure: Callable[[Services], dict[str, Any]],
    spec: TopologySpec,
    groups: Sequence[Group],
    rounds: str,
    max_nodes: int,
) -> dict[str, Any]:
    """Start everything, measure in a thread, and stop everything; a service that dies ends the measurement.

    `rounds` is what orchestrators have in `ROUNDS`, `max_nodes` what they have in `MAX_NODES`.

    Raises:
        BenchmarkError: the measurement cannot go on.
        ChildError: a service did not start, or ended.
    """
    async with _started(spec, groups, {"ROUNDS": rounds, "MAX_NODES": str(max_nodes)}) as (topology, services):
        return await unless_one_fails(topology, asyncio.to_thread(measure, services))


@contextlib.asynccontextmanager
async def _started(
    spec: TopologySpec, groups: Sequence[Group], orchestrators_env: Mapping[str, str]
) -> AsyncIterator[tuple[Topology, Services]]:
    variants = [variant for group in groups for variant in group.variants]
    topology = Topology(spec)
    try:
        await topology.start()
        addresses: dict[DrafterSetting, str] = {}
        metrics: dict[DrafterSetting, str] = {}
        # One after the other: each compiles and warms up on its own.
        for setting in dict.fromkeys(drafter for variant in variants for drafter in variant.drafters):
            port = await free_port()
            env = {**dict(setting.settings), "METRICS_PORT": str(port)}
            addresses[setting] = await topology.add_drafter(_shown(setting), setting.spec, env)
            metrics[setting] = f"http://{LOCAL}:{port}/metrics"
        fronts: dict[Front, str] = {}
        for front in dict.fromkeys(map(front_of, variants)):
            drafters, has_cache = front
            env = {
                "DRAFTER_ADDRESSES": ",".join(addresses[drafter] for drafter in drafters),
                "CACHE_DRAFTER": "true" if has_cache else "false",
                **orchestrators_env,
            }
            fronts[front] = await topology.add_orchestrator(f"orchestrator {len(fronts) + 1}", env)
        yield topology, Services(topology.address, fronts, metrics)
    finally:
        await topology.stop()


def _shown(setting: DrafterSetting) -> str:
    return " ".join(["drafter", setting.spec.kind, *(f"{name}={value}" for name, value in setting.settings)])
