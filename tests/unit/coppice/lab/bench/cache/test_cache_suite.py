"""The cache benchmark on a server that is there already, and a Redis that only notes what is done to it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.client import Client
from coppice.lab.bench.cache import Instance, Services, make_workload, measure_cache, settings
from coppice.lab.bench.comparison import Plan, Setup
from coppice.lab.bench.prompts import Prompt
from orchestrator.prefix_cache.store import CacheCounts
from tests.unit.coppice.lab.bench.schema import lost_fields

PROMPTS = [Prompt(f"f{number}(x)", "here") for number in range(20)]
WORKLOAD = make_workload(PROMPTS, num_systems=1, num_endings=4)


def counting(reads: int) -> Callable[[], Awaitable[CacheCounts]]:
    """Counts that grow by so many reads from one look to the next."""
    total = CacheCounts()

    async def counts() -> CacheCounts:
        total.reads += reads
        return CacheCounts(reads=total.reads)

    return counts


class NotedRedis:
    """Notes how many requests there were when something was done to it."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.events: list[tuple[str, int]] = []

    async def start(self) -> None:
        self.events.append(("start", self.num_answers))

    async def kill(self) -> None:
        self.events.append(("kill", self.num_answers))


def services(address: str, redis: NotedRedis | None = None) -> Services:
    second = Instance(address, counting(7)) if redis else None
    return Services(address, Instance(address, counting(2)), second, redis)


async def test_redis_is_killed_in_the_middle_of_its_phase_and_comes_back_before_the_end(
    server: str, tiny_target: Path
) -> None:
    redis = NotedRedis()
    asked = Client.stream_request

    def noted(self: Client, *arguments: Any, **named: Any) -> Any:
        redis.num_answers += 1
        return asked(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "stream_request", noted)
        setup = Setup(tiny_target, WORKLOAD.prompts, Plan(1, 2, (0.0,), seed=0), threads=1)
        await measure_cache(setup, WORKLOAD, settings([]), services(server, redis))
    # Two to warm up each of three clients, six without speculation, and the phases before: the third of the last four
    # sees it die.
    before = 2 * 3 + 6 + 6 + 4 + 4 + 2 + 6
    assert redis.events == [("kill", before + 2), ("start", before + 3)]


async def test_the_report_has_every_setting_heat_and_phase(server: str, tiny_target: Path) -> None:
    setup = Setup(tiny_target, WORKLOAD.prompts, Plan(1, 4, (0.0, 1.0), seed=0), threads=1)
    report = await measure_cache(setup, WORKLOAD, settings(["small-lm"]), services(server, NotedRedis()))
    names = ("cold", "fill", "again", "shifted", "second", "killed")
    expected = []
    for heat in (0, 1):
        expected.append(f"off T={heat}")
        expected += [f"{setting} T={heat} {phase}" for setting in ("small-lm+cache", "cache") for phase in names]
    assert [row["name"] for row in report["rows"]] == expected
    by_name = {row["name"]: row for row in report["rows"]}
    assert [by_name[f"cache T=0 {phase}"]["num_requests"] for phase in names] == [6, 4, 4, 2, 6, 4]
    assert [by_name[f"cache T=0 {phase}"]["cache_reads"] for phase in names] == [2, 2, 2, 2, 7, 2]
    assert report["mismatches"] == []
    # The server says the same of every round, so that nothing is better for being warm.
    assert report["ratios"]["warm/cold.tau"] == report["ratios"]["warm-second/cold.tau"] == 1.0
    assert set(report["ratio_spread"]) == set(report["ratios"])
    assert {"machine", "versions", "command", "commit", "settings"} <= set(report)
    assert json.loads(json.dumps(report)) == report
    # Prompts had three kinds of endings when that was measured.
    kinds = ("new", "repeated", "edited")
    assert lost_fields(report, "cache.json") == {f"rows.mean_acceptance_length_{kind}" for kind in kinds}
