"""A fault run: load, faults at random moments, and what must hold all along and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import RedisError

from coppice.cli.child import ChildError
from coppice.client import Client, RequestFailedError
from tests.faults.alarms import excused
from tests.faults.deployment import Deployment
from tests.faults.kinds import KINDS, Fault, RefusedWronglyError
from tests.faults.processes import num_threads, open_files, resident_mib
from tests.faults.workload import Load, draw_cases

# How long a deployment may take, after the last fault, until everything is there and nothing is left.
RECOVERY_S = 60.0
# Killed processes take seconds to come back, and others have to bear the load meanwhile.
MAX_AT_ONCE = 6
SAMPLE_S = 1.0
# A process that lived on may have grown by so much since the first third of a run, and have so much more than before
# the first fault, of each: connections differ, and libraries start threads when they first need them.
MAX_GROWTH_MIB = 48.0
MAX_MORE = {"files": 8, "threads": 4, "tasks": 8}
# Undisturbed load before the first fault, in which connections and threads come to be.
WARM_UP_S = 5.0
# What flipped bytes have done may be read, or logged, so much later.
FLIP_SLACK_S = 5.0
# Fewer samples than these say nothing of a slope.
MIN_SAMPLES = 30
# Means of so many parts of a run depend little on each other; the quantile is Student's, for 95 % and that many less 2.
NUM_PARTS, QUANTILE = 10, 2.306
# Asyncio's tasks of a service, where it tells them.
TASKS = ("coppice_orchestrator_event_loop_tasks", "coppice_gateway_event_loop_tasks")


@dataclass(frozen=True)
class Plan:
    """How much happens: at least so many faults, and for at least so long."""

    num_faults: int
    least_s: float = 0.0
    mean_gap_s: float = 0.3
    max_duration_s: float = 0.8
    num_cases: int = 40
    num_clients: int = 8
    # Without, every process lives as long as the run, and how its memory grows can be seen.
    kills: bool = True
    seed: int = 0


@dataclass
class Report:
    """What happened; the run is good when `violations` is empty."""

    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    # Of the requests, those to the gateway.
    http_requests: int = 0
    num_tokens: int = 0
    wrong: int = 0
    hung: int = 0
    crashed: int = 0
    seconds: float = 0.0
    recovered_s: float = 0.0
    # Tracebacks of gRPC's own in logs, of headers that flipped bytes had made unreadable.
    unreadable_headers: int = 0
    # When bytes were flipped: beginnings and ends, of the monotonic clock.
    flips_s: list[tuple[float, float]] = field(default_factory=list)
    # By process: MiB after the first third and at the end, and MiB per minute between, plus or minus its error (95 %).
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    # By process that lived on: open files, threads and tasks before the first fault, and at the end more than these.
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class Samples:
    """Memory of every process over time: seconds and MiB."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._taken: dict[tuple[str, int], list[tuple[float, float]]] = {}

    async def take(self) -> None:
        """Take one of each process now and then, until cancelled."""
        while True:
            for name, service in self._deployment.services.items():
                # What starting takes is no growth.
                if (pid := service.pid) and service.is_up:
                    # It may end between two lines.
                    with contextlib.suppress(OSError):
                        self._taken.setdefault((name, pid), []).append((time.monotonic(), resident_mib(pid)))
            await asyncio.sleep(SAMPLE_S)

    def summary(self) -> dict[str, dict[str, float]]:
        """Of each process that is still there and has been for long: how it grew after the first third of its life."""
        return {
            name: growth(samples[len(samples) // 3 :])
            for (name, pid), samples in self._taken.items()
            if pid == self._deployment.services[name].pid and len(samples) >= MIN_SAMPLES
        }


def schedule(plan: Plan, deployment: Deployment) -> Callable[[], tuple[float, Fault]]:
    """Draws the pause before the next fault, and the fault, from the plan's seed alone."""
    chance = random.Random(f"{plan.seed}/schedule")
    kinds = [name for name, kind in KINDS.items() if deployment.services or not kind.needs_processes]
    kinds = [name for name in kinds if plan.kills or name != "kill"]
    weights = [KINDS[name].weight for name in kinds]

    def draw() -> tuple[float, Fault]:
        kind = chance.choices(kinds, weights)[0]
        there = deployment.proxies.keys() | deployment.services.keys()
        target = chance.choice([target for target in KINDS[kind].targets if target in there])
        own = random.Random(chance.randrange(2**32))
        return chance.expovariate(1 / plan.mean_gap_s), Fault(kind, target, chance.uniform(0, plan.max_duration_s), own)

    return draw


async def fault_run(deployment: Deployment, plan: Plan, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Load the deployment, disturb it, leave it alone, and look what is left."""
    report = Report()
    cases = await draw_cases(deployment.address, plan.num_cases, random.Random(f"{plan.seed}/cases"))
    load = Load(deployment.address, cases, plan.num_clients, plan.seed, deployment.http_address)
    samples = Samples(deployment)
    if deployment.services:
        await load.run_for(WARM_UP_S)
    before = await _held(deployment)
    started = time.monotonic()
    sampling = asyncio.create_task(samples.take())
    loading = asyncio.create_task(load.run())
    try:
        await _disturb(deployment, plan, report, tell)
        tell(f"{report.faults.total()} faults, the last one is over")
        load.stop()
        await loading
        report.memory = samples.summary()
        report.seconds = time.monotonic() - started
        await _recover(deployment, report, load, random.Random(f"{plan.seed}/after"))
        after = await _held(deployment)
        report.held = {name: _more(before[name], after[name]) for name in before if _is_same(name, before, after)}
        tell(f"recovered after {report.recovered_s:.1f} s")
    finally:
        for task in (sampling, loading):
            task.cancel()
        await asyncio.gather(sampling, loading, return_exceptions=True)
    report.requests, report.num_tokens = load.ends.counts, load.ends.num_tokens
    report.http_requests = load.ends.num_http
    report.wrong, report.hung = load.ends.num_wrong, load.ends.num_hung
    report.violations += [*load.ends.violations, *_process_violations(deployment, report)]
    return report


async def _disturb(deployment: Deployment, plan: Plan, report: Report, tell: Callable[[str], None]) -> None:
    """Inject fault after fault, several at once but one at a time at each target."""
    draw = schedule(plan, deployment)
    busy: set[str] = set()
    end_s = time.monotonic() + plan.least_s
    next_tell_s = time.monotonic() + 15
    async with asyncio.TaskGroup() as running:
        while report.faults.total() < plan.num_faults or time.monotonic() < end_s:
            gap_s, fault = draw()
            await asyncio.sleep(gap_s)
            if fault.target in busy or len(busy) >= MAX_AT_ONCE or not _may(fault, busy):
                continue
            busy.add(fault.target)
            report.faults[fault.kind] += 1
            running.create_task(_inject(fault, deployment, report, busy))
            if time.monotonic() >= next_tell_s:
                next_tell_s = time.monotonic() + 15
                tell(f"{report.faults.total()} faults")


def _may(fault: Fault, busy: set[str]) -> bool:
    """A deployment of two verifiers has no promise to keep while both of them are gone for long."""
    return fault.kind not in ("kill", "lost", "partition", "stop long") or not {"verifier 1", "verifier 2"} & busy


async def _inject(fault: Fault, deployment: Deployment, report: Report, busy: set[str]) -> None:
    started_s = time.monotonic()
    try:
        await fault.inject(deployment)
    except (ChildError, RefusedWronglyError, RedisError, OSError) as error:
        report.violations.append(f"{fault.kind} at {fault.target}: {type(error).__name__}: {error}")
    finally:
        if fault.kind == "flip":
            report.flips_s.append((started_s, time.monotonic()))
        busy.discard(fault.target)


async def _recover(deployment: Deployment, report: Report, load: Load, chance: random.Random) -> None:
    """Everything is there again, answers are right, and nothing is left of any request."""
    for proxy in deployment.proxies.values():
        proxy.shape()
    started = time.monotonic()
    num_violations = len(load.ends.violations)
    missing: object = "an answer"
    try:
        async with asyncio.timeout(RECOVERY_S), Client(deployment.address) as client:
            while missing:
                missing = await _missing(client)
                await asyncio.sleep(0.1 if missing else 0)
            missing = "an answer to every request"
            await asyncio.gather(*(load.request(client, case, chance) for case in load.cases))
            if deployment.http_address:
                before = load.ends.counts["completed"]
                await asyncio.gather(*(load.http_request(case, chance) for case in load.cases))
                if load.ends.counts["completed"] == before:
                    report.violations.append("no answer of the gateway after the last fault")
            missing = await _left(deployment)
            while missing:
                await asyncio.sleep(0.2)
                missing = await _left(deployment)
    except TimeoutError:
        report.violations.append(f"after {RECOVERY_S:g} s without faults: {missing}")
    report.recovered_s = time.monotonic() - started
    if len(load.ends.violations) > num_violations:
        report.violations.append("wrong answers after the last fault")


async def _missing(client: Client) -> str:
    """What is not there yet."""
    try:
        info = await client.model_info(timeout_s=5.0)
    except RequestFailedError as error:
        return f"no answer: {error}"
    if info.num_verifiers < 2:
        return f"{info.num_verifiers} of 2 verifiers"
    return "" if set(info.sources) - {"cache"} else "no drafter"


async def _left(deployment: Deployment) -> str:
    left: Any = deployment.left()
    counts = await left if isinstance(left, Coroutine) else left
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _process_violations(deployment: Deployment, report: Report) -> list[str]:
    found = []
    for name, service in deployment.services.items():
        if service.has_crashed:
            report.crashed += 1
            found.append(f"{name} has crashed")
        strange = [alarm for alarm in service.alarms.heard if not excused(alarm, report.flips_s, FLIP_SLACK_S)]
        report.unreadable_headers += len(service.alarms.heard) - len(strange)
        found += ["\n".join([f"{name} logged:", *alarm.lines]) for alarm in strange[:3]]
    for name, figures in report.memory.items():
        if figures["last_mib"] - figures["first_mib"] > MAX_GROWTH_MIB:
            found.append(f"{name} grew: {figures}")
    for name, counts in report.held.items():
        if any(counts.get(f"more_{kind}", 0) > most for kind, most in MAX_MORE.items()):
            found.append(f"{name} holds more than before the first fault: {counts}")
    return found


async def _held(deployment: Deployment) -> dict[str, dict[str, float]]:
    """Process number, open files, threads and tasks of every service."""
    found = {}
    for name, service in deployment.services.items():
        counts: dict[str, float] = {"pid": service.pid}
        counts |= {"files": open_files(service.pid), "threads": num_threads(service.pid)}
        metrics = await service.metrics()
        if told := [value for key, value in metrics.items() if key in TASKS]:
            counts["tasks"] = sum(told)
        found[name] = counts
    return found


def _is_same(name: str, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> bool:
    """Whether the process of a service was not started again."""
    return before[name]["pid"] == after[name]["pid"]


def _more(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    kinds = [kind for kind in MAX_MORE if kind in before]
    return {kind: before[kind] for kind in kinds} | {f"more_{kind}": after[kind] - before[kind] for kind in kinds}


def growth(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians of the first and the last tenth, and the slope in MiB per minute with half its 95 % interval.

    Neighbouring samples are alike, so that the error is that of a line through the means of `NUM_PARTS` parts (batch
    means).
    """
    tenth = max(1, len(samples) // 10)
    first, last = samples[:tenth], samples[-tenth:]
    size = len(samples) // NUM_PARTS
    parts = [samples[place * size : (place + 1) * size] for place in range(NUM_PARTS)]
    minutes = [statistics.fmean(at_s for at_s, _ in part) / 60 for part in parts]
    mib = [statistics.fmean(value for _, value in part) for part in parts]
    line = statistics.linear_regression(minutes, mib)
    rest = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(minutes, mib, strict=True))
    spread = sum((x - statistics.fmean(minutes)) ** 2 for x in minutes)
    return {
        "first_mib": round(statistics.median(mib for _, mib in first), 1),
        "last_mib": round(statistics.median(mib for _, mib in last), 1),
        "mib_per_minute": round(line.slope, 3),
        "error_mib_per_minute": round(QUANTILE * (rest / (NUM_PARTS - 2) / spread) ** 0.5, 3),
    }
