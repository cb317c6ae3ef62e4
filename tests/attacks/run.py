"""A run: for each attack a quiet phase before it, and what it did to a good client and to the services.

Beside the good client there is always one more process: in quiet phases one that only keeps a core busy, then the
attacker on the same core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.attacks.attacker import BUSY, SLACK_S, STARTED
from tests.attacks.chart_limits import memory_limits_mib
from tests.attacks.deployment import Deployment, cpu_s, deployed, memory_mib, reset_peak
from tests.attacks.good_client import LASTING, NEW, TIMEOUT_S
from tests.attacks.kinds import GATEWAY, Attack

SAMPLE_S = 0.05
# A quiet phase lasts until there are so many requests, and no longer than that.
QUIET_REQUESTS, MOST_QUIET_S = 40, 12.0
# After an attack: how long the services may take to end what it has left.
PAUSE_S, RECOVERY_S = 1.0, 5.0
# Measurements of a row whose latency was over its limit; the median counts.
ATTEMPTS = 3
MAX_MEMORY_SHARE = 0.6
# Services that keep so much more than at their start are started anew, so that the next row begins like the first.
MAX_KEPT_MIB = 128.0
START_S = 60.0
STOP_S = 5.0
OK = "OK"
# What an attacker has sent that did not say.
CRASHED = {"crashed": 1}
SLOW = "p99"


@dataclass(frozen=True)
class Settings:
    """How long attacks last, which core they have, and whom they and the good client say they are."""

    seconds: float
    core: int
    attacker_address: str = "127.0.0.2"
    tenant: str = ""
    # Least length of a quiet phase, and when memory is looked at after an attack.
    quiet_s: float = 4.0
    after_s: float = 5.0
    # Whether the latency's ratio is a limit, or only told.
    limits_latency: bool = True
    # Whether attacks last no longer than `seconds`, whatever they need to show what they do, and quiet phases no longer
    # than `quiet_s`, whatever percentiles need.
    is_short: bool = False


@dataclass(frozen=True)
class Request:
    """One request of the good client: times of `time.monotonic` in seconds, and how it ended."""

    kind: str
    start: float
    end: float
    status: str
    same: bool
    detail: str = ""


@dataclass
class Latencies:
    """Of the requests that ended well, in milliseconds."""

    requests: int
    p50_ms: float
    p99_ms: float
    most_ms: float


@dataclass
class Row:
    """What one attack did."""

    name: str
    service: str
    what: str
    seconds: float
    sent: dict[str, int]
    quiet: Latencies
    attack: Latencies
    # p99 under attack over p99 in the quiet phase, and what it may be.
    ratio: float
    max_ratio: float
    # Those of all measurements; the row is of the one that counts.
    ratios: list[float]
    # Ends of the good client's requests under attack that were no success, by status.
    failed: dict[str, int]
    # What the first of each status said.
    details: dict[str, str]
    # The same of the quiet phase afterwards.
    failed_afterwards: dict[str, int]
    # Requests of the good client with other tokens than undisturbed.
    wrong: int
    # By service, in MiB: before, at the peak, 5 s afterwards, and the chart's limit.
    before_mib: dict[str, float]
    peak_mib: dict[str, float]
    after_mib: dict[str, float]
    limit_mib: dict[str, float]
    # Processor time by service, in seconds, while the attack ran.
    cpu_s: dict[str, float]
    log_lines: dict[str, int]
    # Services that have ended or been started anew.
    died: list[str]
    load_average_1m: float
    # Whether the services had ended all requests within RECOVERY_S.
    recovered: bool = True
    broken: list[str] = field(default_factory=list)


class GoodClient:
    """Processes with valid requests, one that keeps its connection and one with new ones; `requests` are theirs."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        # What each of them was told undisturbed.
        self.right: list[object] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._ready: asyncio.Queue[object] = asyncio.Queue()

    async def start(self, deployment: Deployment, tenant: str) -> None:
        """Start them, and return when both know what is right.

        Raises:
            RuntimeError: they do not agree about it.
            TimeoutError: one of them had no answer within 60 s.
        """
        for kind in (LASTING, NEW):
            process = await _spawn("tests.attacks.good_client", deployment.address, kind, tenant, deployment.ca)
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(process)))
            async with asyncio.timeout(START_S):
                self.right.append(await self._ready.get())
        if self.right[0] != self.right[1]:
            raise RuntimeError("two undisturbed clients have other tokens")

    async def stop(self) -> None:
        """End both."""
        for process in self._processes:
            await _end(process)
        await asyncio.gather(*self._readers)

    def between(self, begin_s: float, end_s: float) -> list[Request]:
        """Requests that began then."""
        return [request for request in self.requests if begin_s <= request.start < end_s]

    def is_alive(self) -> bool:
        """Whether both still run."""
        return all(process.returncode is None for process in self._processes)

    async def settle(self, end_s: float) -> None:
        """Wait until every request that began before `end_s` has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S + 2):
                while not all(
                    any(request.kind == kind and request.end >= end_s for request in self.requests[-200:])
                    for kind in (LASTING, NEW)
                ):
                    self._news.clear()
                    await self._news.wait()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            told = json.loads(line)
            if "right" in told:
                await self._ready.put(told["right"])
            else:
                self.requests.append(Request(**told))
                self._news.set()


class Run:
    """Attacks a deployment, one attack after the other."""

    def __init__(
        self, deployment: Deployment, client: GoodClient, settings: Settings, tell: Callable[[str], None]
    ) -> None:
        self._deployment = deployment
        self._client = client
        self._settings = settings
        self._tell = tell
        self._limits = {name: limit for name, limit in memory_limits_mib().items() if name in deployment.services}
        self._started_mib: dict[str, float] = {}
        # Of the quiet phase that has just been, which is also the next row's.
        self._quiet: list[Request] = []

    async def row(self, attack: Attack) -> Row:
        """The quiet phase, the attack, and the verdict."""
        services, settings = self._deployment.services, self._settings
        if not self._started_mib:
            self._started_mib = self._memory()
        quiet = latencies(self._quiet or await self._quiet_phase())
        pids, before, lines = self._deployment.pids(), self._memory(), self._lines()
        peak = _Peak(pids)
        cpu = _cpu(pids)
        address, ca = services[attack.service].address, self._deployment.ca
        load = os.getloadavg()[0]
        seconds = max(settings.seconds, 0.0 if settings.is_short else attack.least_s)
        async with _attacker(attack.name, address, settings, seconds, ca) as attacker:
            begin_s, sent = time.monotonic(), CRASHED
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds + SLACK_S):
                    sent = await peak.watch(attacker.result())
            end_s = min(time.monotonic(), begin_s + seconds)
        used = {name: round(now - cpu[name], 2) for name, now in _cpu(pids).items() if name in cpu}
        await self._client.settle(end_s)
        requests = self._client.between(begin_s, end_s)
        recovered = await self._recover()
        self._quiet = await self._quiet_phase()
        await asyncio.sleep(max(0.0, end_s + settings.after_s - time.monotonic()))
        under = latencies(requests)
        ratio = round(under.p99_ms / quiet.p99_ms, 2) if quiet.p99_ms and under.requests else 0.0
        return self._judged(
            Row(
                name=attack.name,
                service=attack.service,
                what=attack.what,
                seconds=seconds,
                sent=sent,
                quiet=quiet,
                attack=under,
                ratio=ratio,
                max_ratio=attack.max_ratio,
                ratios=[ratio],
                failed=_failed(requests),
                failed_afterwards=_failed(self._quiet),
                details={request.status: request.detail for request in reversed(requests) if request.status != OK},
                wrong=sum(not request.same for request in requests),
                before_mib=before,
                peak_mib=peak.mib,
                after_mib=self._memory(),
                limit_mib=self._limits,
                cpu_s=used,
                log_lines={name: count - lines[name] for name, count in self._lines().items()},
                died=[name for name, pid in self._deployment.pids().items() if pid != pids[name]],
                load_average_1m=round(load, 2),
                recovered=recovered,
            )
        )

    async def renew(self, row: Row) -> None:
        """Start the services and the good client anew where the row has left something behind.

        Raises:
            RuntimeError: undisturbed, the good client has other tokens than before.
        """
        if row.broken:
            # The quiet phase after it may have been none.
            self._quiet = []
        kept = [name for name, mib in row.after_mib.items() if mib > self._started_mib.get(name, 0.0) + MAX_KEPT_MIB]
        if not (row.died or kept or not row.recovered or not self._client.is_alive()):
            return
        self._tell(f"starting anew: ended {row.died}, memory kept {kept}, recovered {row.recovered}")
        await self._client.stop()
        await self._deployment.stop()
        await self._deployment.start()
        right = self._client.right
        self._client = GoodClient()
        await self._client.start(self._deployment, self._settings.tenant)
        if self._client.right != right:
            raise RuntimeError("services that were started anew have other tokens")
        self._started_mib, self._quiet = {}, []

    async def close(self) -> None:
        """End the good client."""
        await self._client.stop()

    async def _quiet_phase(self) -> list[Request]:
        """The good client beside a process that only keeps the core busy."""
        address = self._deployment.services["orchestrator"].address
        async with _attacker(BUSY, address, self._settings, MOST_QUIET_S):
            begin_s = time.monotonic()
            while time.monotonic() < begin_s + MOST_QUIET_S:
                await asyncio.sleep(SAMPLE_S)
                least = 1 if self._settings.is_short else QUIET_REQUESTS
                enough = len(self._client.between(begin_s, time.monotonic())) >= least
                if enough and time.monotonic() >= begin_s + self._settings.quiet_s:
                    break
            end_s = time.monotonic()
            await self._client.settle(end_s)
        return self._client.between(begin_s, end_s)

    async def _recover(self) -> bool:
        """Wait until nothing but the good client's own requests runs; False when that takes too long."""
        await asyncio.sleep(PAUSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECOVERY_S):
                while True:
                    with contextlib.suppress(OSError, KeyError):
                        # Each of the two requests of the good client counts in three services.
                        if await self._deployment.left() <= 6:
                            return True
                    await asyncio.sleep(0.2)
        return False

    def _memory(self) -> dict[str, float]:
        found = {}
        for name, pid in self._deployment.pids().items():
            with contextlib.suppress(OSError):
                found[name] = round(memory_mib(pid)[0], 1)
        return found

    def _lines(self) -> dict[str, int]:
        return {name: service.num_lines for name, service in self._deployment.services.items()}

    def _judged(self, row: Row) -> Row:
        """The row with what must not be, in words."""
        if row.failed:
            row.broken.append("requests failed: " + _counted(row.failed))
        if row.failed_afterwards:
            row.broken.append("requests failed afterwards: " + _counted(row.failed_afterwards))
        if row.wrong:
            row.broken.append(f"{row.wrong} requests with other tokens")
        if not row.attack.requests:
            row.broken.append("no request was answered")
        if row.died:
            row.broken.append("ended: " + ", ".join(row.died))
        if "crashed" in row.sent:
            row.broken.append("the attacker did not end as it should")
        for name, limit in row.limit_mib.items():
            if row.peak_mib.get(name, 0.0) >= MAX_MEMORY_SHARE * limit:
                row.broken.append(f"memory of {name}: {row.peak_mib[name]:.0f} of {limit:.0f} MiB")
        if self._settings.limits_latency and row.ratio > row.max_ratio:
            row.broken.append(f"{SLOW} {row.ratio:g} times as long, limit {row.max_ratio:g}")
        return row


async def attacked(
    attacks: Sequence[Attack], settings: Settings, tell: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Attack a deployment of its own, one with TLS and one with a gateway; a row for each attack, in this order.

    Raises:
        ChildError: a service did not start.
    """
    rows = []
    for tls, http in ((False, False), (True, False), (False, True)):
        if those := [attack for attack in attacks if (attack.tls, attack.service == GATEWAY) == (tls, http)]:
            async with deployed(tls=tls, http=http) as deployment:
                rows += await _rows(those, deployment, settings, tell)
    return rows


async def _rows(
    attacks: Sequence[Attack], deployment: Deployment, settings: Settings, tell: Callable[[str], None]
) -> list[Row]:
    client, rows = GoodClient(), []
    await client.start(deployment, settings.tenant)
    run = Run(deployment, client, settings, tell)
    try:
        last = None
        for attack in attacks:
            attempts: list[Row] = []
            while not attempts or (is_only_slow(attempts[0]) and len(attempts) < ATTEMPTS):
                if last is not None:
                    await run.renew(last)
                last = await run.row(attack)
                attempts.append(last)
                tell(line(last))
            rows.append(counted(attempts))
    finally:
        await run.close()
    return rows


def is_only_slow(row: Row) -> bool:
    """Whether nothing but its latency is over a limit."""
    return len(row.broken) == 1 and row.broken[0].startswith(SLOW)


def counted(attempts: Sequence[Row]) -> Row:
    """The measurement that counts: one that breaks another limit than latency's, else that of the median ratio."""
    wrong = [row for row in attempts if row.broken and not is_only_slow(row)]
    by_ratio = sorted(attempts, key=lambda row: row.ratio)
    return replace((wrong or by_ratio[len(attempts) // 2 :])[0], ratios=[row.ratio for row in attempts])


def latencies(requests: Sequence[Request]) -> Latencies:
    """Percentiles of those that ended well; zeros where none did."""
    took = [1000 * (request.end - request.start) for request in requests if request.status == OK]
    if not took:
        return Latencies(0, 0.0, 0.0, 0.0)
    p50, p99 = np.percentile(took, (50, 99))
    return Latencies(len(took), round(float(p50), 1), round(float(p99), 1), round(max(took), 1))


def _failed(requests: Sequence[Request]) -> dict[str, int]:
    return dict(Counter(request.status for request in requests if request.status != OK))


def _counted(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in failed.items())


HEADER = (
    f"{'attack':28} {'requests':>8} {'failed':>6} {'wrong':>5} {'p50 ms':>13} {'p99 ms':>15} {'ratio':>6}  "
    f"{'peak MiB (orchestrator, verifier, drafter, gateway)':51}  broken"
)


def line(row: Row) -> str:
    """A row of the table."""
    peak = ", ".join(f"{row.peak_mib.get(name, 0.0):.0f}" for name in row.limit_mib)
    p50 = f"{row.quiet.p50_ms:.0f} -> {row.attack.p50_ms:.0f}"
    p99 = f"{row.quiet.p99_ms:.0f} -> {row.attack.p99_ms:.0f}"
    return (
        f"{row.name:28} {row.attack.requests:8} {sum(row.failed.values()):6} {row.wrong:5} {p50:>13} {p99:>15} "
        f"{row.ratio:6.2f}  {peak:51}  {'; '.join(row.broken) or '-'}"
    )


class _Peak:
    """The most memory of each process, in MiB."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.mib: dict[str, float] = {}
        for pid in pids.values():
            with contextlib.suppress(OSError):
                reset_peak(pid)

    async def watch(self, result: Coroutine[Any, Any, dict[str, int]]) -> dict[str, int]:
        """Take samples until `result` is there, and return it."""
        waiting = asyncio.create_task(result)
        try:
            while not waiting.done():
                self._sample()
                await asyncio.wait({waiting}, timeout=SAMPLE_S)
            self._sample()
            return waiting.result()
        finally:
            waiting.cancel()

    def _sample(self) -> None:
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):
                self.mib[name] = max(self.mib.get(name, 0.0), round(max(memory_mib(pid)), 1))


class _Attacker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def result(self) -> dict[str, int]:
        """What it did, once it has ended; a count `crashed` when it ended otherwise."""
        assert self._process.stdout is not None
        told = (await self._process.stdout.readline()).decode()
        sent: dict[str, int] = json.loads(told) if told else CRASHED
        return sent


@contextlib.asynccontextmanager
async def _attacker(
    name: str, address: str, settings: Settings, seconds: float, ca: str = ""
) -> AsyncIterator[_Attacker]:
    """An attacker's process, from its beginning on; it is killed when the context closes."""
    arguments = (name, address, settings.attacker_address, f"{seconds:g}", str(settings.core), ca)
    process = await _spawn("tests.attacks.attacker", *arguments)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            if (told := (await process.stdout.readline()).decode().strip()) != STARTED:
                raise RuntimeError(f"the attacker did not start, it says {told!r}")
        yield _Attacker(process)
    finally:
        await _end(process)


async def _spawn(module: str, *arguments: str) -> asyncio.subprocess.Process:
    """A process that ends when this one does."""
    tied = ("-m", "coppice.cli.tied_process", str(os.getpid()), module, *arguments)
    return await asyncio.create_subprocess_exec(
        sys.executable, *tied, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _cpu(pids: dict[str, int]) -> dict[str, float]:
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            found[name] = cpu_s(pid)
    return found
