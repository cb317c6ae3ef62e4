"""`python -m tests.faults.kills`: verifier, drafter, orchestrator and Redis killed under load, again and again.

Requests go on with the tokens that they have: every output is that of an undisturbed run, none is lost, and nothing is
left of any. Exit code 1 where that is not so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from coppice.client import Client, RequestFailedError
from coppice.lab.bench.environment import describe_machine, describe_run
from tests.faults.deployment import CONTEXT, GRACE_S, MAX_SEQUENCES, Service, left_in
from tests.faults.doors import write_checkpoint
from tests.faults.resuming import Resumed, complete
from tests.faults.workload import Case, draw_cases
from tests.redis_server import RedisServer, redis_server

KINDS = ("drafter", "orchestrator", "redis", "verifier")
# Requests at them are interrupted, and go on: the verifier takes longer to start than the orchestrator waits for it.
RESUME_S = 1.0
INTERRUPTING = ("orchestrator", "verifier")
NUM_CASES, NUM_CLIENTS = 12, 4
# A verifier that was killed takes a minute to come back on a busy machine; requests wait for it, also more than once.
REQUEST_S = 600.0
# Until the orchestrator has found a service that is back, and until nothing is left of requests that have ended.
RECOVERY_S = 60.0
# How long a service has been back when it is killed again: at random, up to this.
MAX_GAP_S = 0.6


@dataclass
class Kills:
    """What happened while one service was killed again and again; `left` is what nobody needs any more."""

    kills: int = 0
    requests: int = 0
    # Requests that were interrupted and went on.
    resumed: int = 0
    tokens: int = 0
    wrong: int = 0
    lost: int = 0
    left: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass
class Killable:
    """Services in processes of their own."""

    services: dict[str, Service]
    redis: RedisServer

    @property
    def address(self) -> str:
        """The orchestrator's, the same after every restart."""
        return self.services["orchestrator"].address

    async def kill(self, kind: str, chance: random.Random) -> None:
        """Kill one of them, start it again, and return when it is in use again."""
        if kind == "redis":
            await self.redis.kill()
            await asyncio.sleep(chance.uniform(0, MAX_GAP_S))
            await self.redis.start()
            return
        await self.services[kind].kill()
        await self.services[kind].start()
        await self.is_whole()

    async def is_whole(self) -> None:
        """Return when the orchestrator has verifier and drafter, without which their deaths would be none."""
        found = [0.0]
        async with asyncio.timeout(RECOVERY_S):
            while not all(found):
                await asyncio.sleep(0.05)
                metrics = await self.services["orchestrator"].metrics()
                found = [
                    metrics.get(f"coppice_orchestrator_{kind}s_connected", 0.0) for kind in ("verifier", "drafter")
                ]


@contextlib.asynccontextmanager
async def killable() -> AsyncIterator[Killable]:
    """A verifier, a drafter, a Redis and an orchestrator, one process each."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(directory, CONTEXT)
        common = {"MODEL": str(directory), "DEVICE": "cpu", "THREADS": "1", "GRACE_S": str(GRACE_S)}
        limits = {"KV_CACHE_MIB": "1", "MAX_SEQUENCES": str(MAX_SEQUENCES)}
        redis = await stack.enter_async_context(redis_server())
        verifier = Service("verifier", "verifier_svc", {**common, **limits})
        drafter = Service("drafter", "drafter_svc", common)
        env = {
            "VERIFIER_ADDRESS": verifier.address,
            "DRAFTER_ADDRESSES": drafter.address,
            "REDIS_URL": redis.url,
            "CACHE_SECRET": "no secret at all",
            "RESUME_S": str(RESUME_S),
            "GRACE_S": str(GRACE_S),
        }
        orchestrator = Service("orchestrator", "orchestrator", env)
        services = {service.name: service for service in (verifier, drafter, orchestrator)}
        for service in services.values():
            stack.push_async_callback(service.stop)
        await asyncio.gather(verifier.start(), drafter.start())
        await orchestrator.start()
        yield Killable(services, redis)


async def kill_run(
    deployment: Killable,
    kind: str,
    number: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
    pause_s: float = 0.0,
) -> Kills:
    """Kill one service so many times at random moments under load; then look what is left.

    Clients pause for up to `pause_s` between two requests.
    """
    chance = random.Random(f"{seed}/{kind}")
    result = Kills()
    await deployment.is_whole()
    cases = await draw_cases(deployment.address, NUM_CASES, chance)
    started = time.monotonic()
    stopping = asyncio.Event()
    clients = [
        asyncio.create_task(
            _client(deployment.address, cases, random.Random(f"{seed}/{client}"), stopping, result, pause_s)
        )
        for client in range(NUM_CLIENTS)
    ]
    try:
        while result.kills < number:
            await asyncio.sleep(chance.uniform(0, MAX_GAP_S))
            await deployment.kill(kind, chance)
            result.kills += 1
            if result.kills % 10 == 0:
                tell(f"{result.kills} kills of the {kind}, {result.requests} requests")
        stopping.set()
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    result.left = await _left(lambda: left_in(deployment.services))
    result.seconds = round(time.monotonic() - started, 1)
    result.violations += _violations(deployment, kind, result)
    return result


async def _client(
    address: str, cases: Sequence[Case], chance: random.Random, stopping: asyncio.Event, result: Kills, pause_s: float
) -> None:
    """One request after the other, each to its end."""
    async with Client(address) as client:
        while not stopping.is_set():
            await _request(client, chance.choice(cases), result)
            await asyncio.sleep(chance.uniform(0, pause_s))


async def _request(client: Client, case: Case, result: Kills) -> None:
    got = Resumed()
    end = "completed"
    try:
        await complete(client, case, got, REQUEST_S)
    except (TimeoutError, RequestFailedError) as error:
        end = f"{type(error).__name__} {error}"
        result.lost += 1
        result.violations.append(f"lost after {len(got.tokens)} tokens: {end}")
    result.requests += 1
    result.resumed += got.interruptions > 0
    result.tokens += len(got.tokens)
    if got.tokens != list(case.tokens[: len(got.tokens)]) or (got.is_whole and len(got.tokens) != len(case.tokens)):
        result.wrong += 1
        result.violations.append(f"{got.tokens} is not {list(case.tokens)}, prompt {case.prompt}")


async def _left(count: Callable[[], Awaitable[Counter[str]]]) -> dict[str, int]:
    """What is left of requests once they have had time to go."""
    left = await count()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RECOVERY_S):
            while left.total():
                await asyncio.sleep(0.2)
                left = await count()
    return {name: number for name, number in left.items() if number}


def _violations(deployment: Killable, kind: str, result: Kills) -> list[str]:
    found = [f"{count} {name} after {kind} was killed" for name, count in result.left.items()]
    if kind not in INTERRUPTING and result.resumed:
        found.append(f"{result.resumed} requests were interrupted though only the {kind} was killed")
    for name, service in deployment.services.items():
        found += [f"{name} has crashed"] if service.has_crashed else []
        found += ["\n".join([f"{name} logged:", *alarm.lines]) for alarm in service.alarms.heard[:3]]
        service.alarms.heard.clear()
    return found


def main(
    kills: Annotated[int, typer.Option(min=1, help="How often each of them is killed.")] = 100,
    kinds: Annotated[str, typer.Option(help="Which, commas between.")] = ",".join(KINDS),
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same moments and requests.")] = 0,
    pause: Annotated[
        float, typer.Option(min=0, help="Longest pause of a client between two requests, s: restarts need cores, too.")
    ] = 0.1,
    out: Annotated[Path | None, typer.Option(help="Write what happened there, as JSON.")] = None,
) -> None:
    """Kill services under load, again and again; print what became of the requests."""
    chosen = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    if unknown := set(chosen) - set(KINDS):
        raise typer.BadParameter(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    logging.basicConfig(level=logging.CRITICAL)
    machine = describe_machine()
    results = asyncio.run(_run_all(chosen, kills, seed, pause))
    command = f"python -m tests.faults.kills {shlex.join(sys.argv[1:])}"
    report = {"killed": {kind: asdict(result) for kind, result in results.items()}, "seed": seed}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**report, **describe_run(machine), "command": command}, indent=2) + "\n")
    for kind, result in results.items():
        figures = {name: value for name, value in asdict(result).items() if name != "violations"}
        typer.echo(f"{kind}: {', '.join(f'{name} {value}' for name, value in figures.items())}")
        for violation in result.violations:
            typer.echo(f"VIOLATION: {violation}")
    raise typer.Exit(any(result.violations for result in results.values()))


async def _run_all(kinds: Sequence[str], kills: int, seed: int, pause_s: float) -> dict[str, Kills]:
    async with killable() as deployment:
        return {kind: await kill_run(deployment, kind, kills, seed, typer.echo, pause_s) for kind in kinds}


if __name__ == "__main__":
    typer.run(main)
