"""A verifier process for every setting, and an orchestrator for every pair of verifier and drafter.

All run at once, so that all can take turns: a process that nobody asks waits on a socket and a queue, and costs memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coppice.cli.topology import LOCAL, Topology, TopologySpec
from coppice.lab.bench.ablation.variants import DrafterSetting
from coppice.lab.bench.beside_services import unless_one_fails
from coppice.lab.bench.cache.redis_server import free_port
from coppice.lab.bench.in_pass.variants import Group, Variant, VerifierSetting

# What an orchestrator is in front of, and whether its rounds wait for their drafts.
Front = tuple[VerifierSetting, DrafterSetting | None, bool]
# Room for the sequences of a benchmark; so many verifiers at once cannot each have the usual gibibyte.
KV_CACHE_MIB = 256


@dataclass(frozen=True, slots=True)
class Services:
    """Addresses of orchestrators, and of verifiers' metrics."""

    fronts: Mapping[Front, str]
    metrics: Mapping[VerifierSetting, str]

    def address(self, variant: Variant) -> str:
        """Where a variant is served."""
        return self.fronts[front_of(variant)]

    def metrics_url(self, variant: Variant) -> str:
        """The metrics of a variant's verifier."""
        return self.metrics[variant.verifier]


def front_of(variant: Variant) -> Front:
    """The orchestrator that a variant needs."""
    return (variant.verifier, variant.drafter, variant.synchronous)


def variants_of(groups: Iterable[Group]) -> list[Variant]:
    """All variants of all groups, each once."""
    return list(dict.fromkeys(variant for group in groups for variant in group.variants))


async def measure_on_services(
    measure: Callable[[Services], dict[str, Any]], spec: TopologySpec, groups: Sequence[Group]
) -> dict[str, Any]:
    """Start everything, measure in a thread, and stop everything; a service that dies ends the measurement.

    Raises:
        BenchmarkError: the measurement cannot go on.
        ChildError: a service did not start, or ended.
    """
    async with _started(replace(spec, kv_cache_mib=KV_CACHE_MIB), groups) as (topology, services):
        return await unless_one_fails(topology, asyncio.to_thread(measure, services))


@contextlib.asynccontextmanager
async def _started(spec: TopologySpec, groups: Sequence[Group]) -> AsyncIterator[tuple[Topology, Services]]:
    topology, variants = Topology(spec), variants_of(groups)
    try:
        verifiers: dict[VerifierSetting, str] = {}
        metrics: dict[VerifierSetting, str] = {}
        # One after the other: each compiles and warms up on its own.
        for setting in dict.fromkeys(variant.verifier for variant in variants):
            port = await free_port()
            env = {**dict(setting.settings), "METRICS_PORT": str(port)}
            verifiers[setting] = await topology.add_verifier(str(setting), env)
            metrics[setting] = f"http://{LOCAL}:{port}/metrics"
        drafters: dict[DrafterSetting, str] = {}
        for drafter in dict.fromkeys(variant.drafter for variant in variants):
            if drafter is not None:
                drafters[drafter] = await topology.add_drafter(str(drafter.spec), drafter.spec, dict(drafter.settings))
        max_nodes = max((variant.max_nodes or 0 for variant in variants), default=0)
        fronts: dict[Front, str] = {}
        for front in dict.fromkeys(map(front_of, variants)):
            verifier, of_front, synchronous = front
            env = {
                "VERIFIER_ADDRESS": verifiers[verifier],
                "DRAFTER_ADDRESSES": "" if of_front is None else drafters[of_front],
                "CACHE_DRAFTER": "false",
                "ROUNDS": "synchronous" if synchronous else "asynchronous",
            }
            if synchronous:
                env["MAX_NODES"] = str(max_nodes)
            fronts[front] = await topology.add_orchestrator(f"orchestrator {len(fronts) + 1}", env)
        yield topology, Services(fronts, metrics)
    finally:
        await topology.stop()
