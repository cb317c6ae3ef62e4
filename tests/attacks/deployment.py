"""What is attacked: one verifier, drafter and orchestrator with the bundled models, and perhaps a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import trustme

from coppice.checkpoints.bundled import MODELS
from tests import certificates
from tests.attacks.chart_limits import settings
from tests.faults.deployment import Service, left_in

GRACE_S = "5"
DRAFTER_NICENESS = "10"
_MIB = 1024.0 * 1024.0


class WatchedService(Service):
    """A service whose log lines are counted.

    It listens on all interfaces, as in a cluster: back ends on loopback have no guard.
    """

    num_lines = 0

    def __init__(self, name: str, module: str, env: Mapping[str, str]) -> None:
        super().__init__(name, module, env)
        self._env["LISTEN_ADDRESS"] = f"0.0.0.0:{self.address.rpartition(':')[2]}"

    def _hear(self, line: str) -> None:
        self.num_lines += 1
        super()._hear(line)


@dataclass
class Deployment:
    """Running services by name: orchestrator, verifier and drafter, and the gateway where clients speak HTTP."""

    services: dict[str, WatchedService]
    # The CA of the orchestrator's certificate; empty: its port is in plaintext.
    ca: str = ""

    @property
    def address(self) -> str:
        """Where clients call, as a URL where they speak HTTP."""
        gateway = self.services.get("gateway")
        return self.services["orchestrator"].address if gateway is None else f"http://{gateway.address}"

    def pids(self) -> dict[str, int]:
        """Process ids of all services; 0 for one that has ended."""
        return {name: service.pid for name, service in self.services.items()}

    async def left(self) -> int:
        """Requests and sequences that any service still holds.

        Raises:
            OSError: a service does not serve its metrics.
        """
        held = await left_in({name: service for name, service in self.services.items() if name != "gateway"})
        return sum(count for name, count in held.items() if name.startswith("requests"))

    async def start(self) -> None:
        """Start all services, those that call others last."""
        await asyncio.gather(self.services["verifier"].start(), self.services["drafter"].start())
        for name in ("orchestrator", "gateway"):
            if name in self.services:
                await self.services[name].start()

    async def stop(self) -> None:
        """Stop all services, those that call others first."""
        for name in ("gateway", "orchestrator"):
            if name in self.services:
                await self.services[name].stop()
        await asyncio.gather(self.services["verifier"].stop(), self.services["drafter"].stop())


@contextlib.asynccontextmanager
async def deployed(*, tls: bool = False, http: bool = False) -> AsyncIterator[Deployment]:
    """The services with the chart's settings, as `coppice up` starts them; clients may have to speak TLS, or HTTP."""
    chart = settings()
    common = {"HEALTH_PORT": "0", "GRACE_S": GRACE_S}
    verifier = WatchedService(
        "verifier", "verifier_svc", {**chart["verifier"], **common, "MODEL": str(MODELS / "target")}
    )
    drafter = WatchedService(
        "drafter",
        "drafter_svc",
        {
            **chart["drafter"],
            **common,
            "MODEL": str(MODELS / "small-lm"),
            "DRAFTER_KIND": "small-lm",
            "NICENESS": DRAFTER_NICENESS,
        },
    )
    env = {
        **chart["orchestrator"],
        **common,
        "VERIFIER_ADDRESS": verifier.address,
        "DRAFTER_ADDRESSES": drafter.address,
        "REQUIRE_DRAFTERS": "true",
    }
    with tempfile.TemporaryDirectory() as directory:
        ca = ""
        if tls:
            issued = certificates.directory(Path(directory), trustme.CA())
            ca, env["TLS_CERT"], env["TLS_KEY"] = issued.ca, issued.cert, issued.key
        orchestrator = WatchedService("orchestrator", "orchestrator", env)
        services = {"orchestrator": orchestrator, "verifier": verifier, "drafter": drafter}
        if http:
            env = {**chart["gateway"], "GRACE_S": GRACE_S, "ORCHESTRATOR_ADDRESS": orchestrator.address}
            services["gateway"] = WatchedService("gateway", "coppice.gateway", env)
        deployment = Deployment(services, ca)
        try:
            await deployment.start()
            yield deployment
        finally:
            await deployment.stop()


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process now, and its peak since `reset_peak`, both in MiB.

    Raises:
        OSError: there is no such process.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {name: value for name, _, value in (line.partition(":") for line in lines)}
    if "VmRSS" not in values:  # it has just ended
        raise ProcessLookupError(f"process {pid} has no memory")
    return tuple(int(values[name].split()[0]) * 1024 / _MIB for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def reset_peak(pid: int) -> None:
    """Let the peak of a process begin at what it has now.

    Raises:
        OSError: there is no such process, or it is somebody else's.
    """
    Path(f"/proc/{pid}/clear_refs").write_text("5\n")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has had.

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
