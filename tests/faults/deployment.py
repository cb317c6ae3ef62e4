"""What faults happen to: services behind proxies, in processes that can be killed, or in this process and without."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coppice.checkpoints.catalogue import local_model
from coppice.cli.child import Child
from orchestrator.app import running
from orchestrator.config import Config
from tests.fakes import FakeDrafter, FakeVerifier, serving
from tests.faults.alarms import Alarms
from tests.faults.doors import write_checkpoint
from tests.faults.proxy import FaultProxy
from tests.http_client import gateway_to
from tests.redis_server import RedisServer, redis_server

LOCAL = "127.0.0.1"
# Below those that systems give to connections.
_PORTS = range(20_000, 32_000)
CONTEXT = 512
# Where machine code is compiled first, on a busy machine, a start takes minutes.
START_S = 600.0
# Longer than the services' own grace.
STOP_S = 30.0
# What an orchestrator remembers must be full long before a run ends, or its memory could not be seen to be flat.
CACHE_MIB = 8
# And so must what a drafter keeps of prompts.
PREFIX_MIB = 4
# Enough for two long sequences of this context or for several short ones: blocks run out.
MAX_SEQUENCES = 16
# Head of the chat model, and a KV cache in which its sequences preempt each other.
HEAD = Path(__file__).resolve().parents[2] / "models" / "eagle-smollm2"
TARGET_CACHE_MIB = 48
MAX_REQUESTS = 48
GRACE_S = 5


class Service:
    """A process on a port of its own, which it has again after every restart."""

    def __init__(self, name: str, module: str, env: Mapping[str, str]) -> None:
        self.name = name
        self._module = module
        self.address = f"{LOCAL}:{free_port()}"
        self.metrics_port = free_port()
        self._env = {**env, "LISTEN_ADDRESS": self.address, "METRICS_PORT": str(self.metrics_port)}
        self._child: Child | None = None
        # Whether it is to be there now, and whether it has served since it was started.
        self._wanted = False
        self.is_up = False
        self.alarms = Alarms(name)

    def change(self, **env: str) -> None:
        """Give it other settings from its next start on."""
        self._env |= env

    @property
    def pid(self) -> int:
        """Of the process as it is now; 0 while there is none."""
        process = self._child._process if self._child is not None else None
        return process.pid if process is not None and process.returncode is None else 0

    @property
    def has_crashed(self) -> bool:
        """Whether it ended without anybody wanting it to."""
        return self._wanted and not self.pid

    async def start(self) -> None:
        """Start it, and return when it serves."""
        self._child = Child(self.name, self._module, self._env, self._hear)
        await self._child.start()
        self._wanted = True
        await self._child.ready(START_S)
        self.is_up = True

    async def kill(self) -> None:
        """End it as a crash does."""
        self._wanted = self.is_up = False
        self.send(signal.SIGKILL)
        if self._child is not None:
            await self._child.stop(STOP_S)

    async def stop(self) -> None:
        """End it as a deployment does."""
        self._wanted = self.is_up = False
        if self._child is not None:
            self.send(signal.SIGCONT)
            await self._child.stop(STOP_S)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        if self.pid and self._child is not None and self._child._process is not None:
            self._child._process.send_signal(number)

    async def metrics(self) -> dict[str, float]:
        """Its metrics, those that have labels added up."""
        return await asyncio.to_thread(read_metrics, self.metrics_port)

    def _hear(self, line: str) -> None:
        self.alarms.hear(line, time.monotonic())


@dataclass
class Deployment:
    """Proxies by the hop that they are in; services where they are processes; what is left over, in words."""

    proxies: dict[str, FaultProxy]
    left: Callable[[], object]
    services: dict[str, Service] = field(default_factory=dict)
    redis: RedisServer | None = None
    # The gateway's; empty if there is none.
    http_address: str = ""

    @property
    def address(self) -> str:
        """Where clients call, through a proxy."""
        return self.proxies["client"].address


@contextlib.asynccontextmanager
async def deployed(seed: int, target: str = "") -> AsyncIterator[Deployment]:
    """Two verifiers, two drafters and a Redis behind proxies, an orchestrator, a gateway; one process each.

    They serve a tiny random model, or `target` with its bundled head in the verifiers and as drafters.
    """
    async with contextlib.AsyncExitStack() as stack:
        common = {"DEVICE": "cpu", "THREADS": "1", "GRACE_S": str(GRACE_S)}
        verifies = {**common, "MAX_SEQUENCES": str(MAX_SEQUENCES)}
        drafts = {**common, "PREFIX_MIB": str(PREFIX_MIB)}
        if target:
            model = local_model(target)
            verifies |= {"MODEL": model, "EAGLE_HEAD": str(HEAD), "KV_CACHE_MIB": str(TARGET_CACHE_MIB)}
            drafts |= {"MODEL": str(HEAD), "DRAFTER_KIND": "eagle", "TARGET_MODEL": model}
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_checkpoint(directory, CONTEXT)
            verifies |= {"MODEL": str(directory), "KV_CACHE_MIB": "1"}
            drafts |= {"MODEL": str(directory)}
        redis = await stack.enter_async_context(redis_server())
        back = [Service(f"verifier {number}", "verifier_svc", verifies) for number in (1, 2)]
        back += [Service(f"drafter {number}", "drafter_svc", drafts) for number in (1, 2)]
        targets = {service.name: service.address for service in back} | {"redis": f"{LOCAL}:{redis.port}"}
        proxies = {name: await _proxy(stack, address, seed) for name, address in targets.items()}
        env = {
            "VERIFIER_ADDRESS": f"{proxies['verifier 1'].address},{proxies['verifier 2'].address}",
            "DRAFTER_ADDRESSES": f"{proxies['drafter 1'].address},{proxies['drafter 2'].address}",
            "REDIS_URL": f"redis://{proxies['redis'].address}/0",
            "CACHE_SECRET": "no secret at all",
            "CACHE_MIB": str(CACHE_MIB),
            "MAX_REQUESTS": str(MAX_REQUESTS),
            "GRACE_S": str(GRACE_S),
        }
        orchestrator = Service("orchestrator", "orchestrator", env)
        proxies["gateway"] = await _proxy(stack, orchestrator.address, seed)
        env = {"ORCHESTRATOR_ADDRESS": proxies["gateway"].address, "METRICS": "on"}
        gateway = Service("gateway", "coppice.gateway", env)
        # It serves them on its only port.
        gateway.metrics_port = int(gateway.address.rpartition(":")[2])
        services = {service.name: service for service in (*back, orchestrator, gateway)}
        stack.push_async_callback(_stop_all, list(services.values()))
        await asyncio.gather(*(service.start() for service in back))
        await orchestrator.start()
        await gateway.start()
        proxies["client"] = await _proxy(stack, orchestrator.address, seed)
        yield Deployment(proxies, lambda: left_in(services), services, redis, gateway.address)


@contextlib.asynccontextmanager
async def deployed_here(seed: int) -> AsyncIterator[Deployment]:
    """The real orchestrator on two verifiers and two drafters without a model, all in this process."""
    async with contextlib.AsyncExitStack() as stack:
        verifiers = [FakeVerifier(instance_id=str(number), reroots=True) for number in (1, 2)]
        drafters = [FakeDrafter(), FakeDrafter()]
        names = ("verifier 1", "verifier 2", "drafter 1", "drafter 2")
        fakes: list[FakeVerifier | FakeDrafter] = [*verifiers, *drafters]
        proxies = {}
        for name, fake in zip(names, fakes, strict=True):
            proxies[name] = await _proxy(stack, await stack.enter_async_context(serving(fake)), seed)
        config = Config(
            verifier_address=f"{proxies['verifier 1'].address},{proxies['verifier 2'].address}",
            drafter_addresses=(proxies["drafter 1"].address, proxies["drafter 2"].address),
            connect_timeout_s=10.0,
            grace_s=0.0,
        )
        orchestrator = await stack.enter_async_context(running(config))
        proxies["client"] = await _proxy(stack, orchestrator.address, seed)
        proxies["gateway"] = await _proxy(stack, orchestrator.address, seed)
        http_address = await stack.enter_async_context(gateway_to(proxies["gateway"].address))

        async def left() -> Counter[str]:
            return Counter(
                {
                    "requests": orchestrator.service.num_requests,
                    "sequences of verifiers": sum(len(fake.active) for fake in verifiers),
                    "sequences of drafters": sum(len(fake.active) for fake in drafters),
                }
            )

        yield Deployment(proxies, left, http_address=http_address)


async def _stop_all(services: list[Service]) -> None:
    await asyncio.gather(*(service.stop() for service in services))


async def _proxy(stack: contextlib.AsyncExitStack, address: str, seed: int) -> FaultProxy:
    return await stack.enter_async_context(FaultProxy(address, seed).running())


async def left_in(services: Mapping[str, Service]) -> Counter[str]:
    """What services hold of requests, as their own metrics have it."""
    left: Counter[str] = Counter()
    for name, service in services.items():
        if name == "gateway":
            # It holds nothing of a request but its call, which the orchestrator has.
            continue
        metrics = await service.metrics()
        if name == "orchestrator":
            own = ("coppice_orchestrator_num_requests_running", "coppice_orchestrator_num_requests_waiting")
        elif name.startswith("verifier"):
            own = ("coppice_verifier_running_sequences", "coppice_verifier_waiting_sequences")
            blocks = metrics["coppice_verifier_kv_blocks"] - metrics["coppice_verifier_free_kv_blocks"]
            left[f"blocks of {name}"] = int(blocks)
        else:
            own = ("coppice_drafter_sequences", "coppice_drafter_waiting_jobs")
        left[f"requests or sequences of {name}"] = int(sum(metrics[key] for key in own))
    return left


def read_metrics(port: int) -> dict[str, float]:
    """Metrics in Prometheus' text format; those that have labels are added up."""
    with urllib.request.urlopen(f"http://{LOCAL}:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    values: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return dict(values)


def free_port() -> int:
    """A port at which nothing listens now; none of those that connections get, which may have it a moment later."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
