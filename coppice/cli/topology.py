"""The whole system on this machine: verifier, drafters and orchestrator as separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coppice.checkpoints.bundled import MODELS, missing_model
from coppice.cli.child import Child, ChildError, Echo

# A foreign checkpoint may have to be downloaded first.
START_TIMEOUT_S = 600.0
# How long the orchestrator may let requests finish, and then each service take to go.
GRACE_S = 10.0
STOP_TIMEOUT_S = 15.0
LOCAL = "127.0.0.1"
DEFAULT_KIND = "small-lm"
DRAFTER_NICENESS = "10"
NO_DRAFTER = "none"


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter: its kind and its checkpoint."""

    kind: str
    model: str

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """From KIND or KIND=PATH_OR_HUB_ID; without a checkpoint, the bundled one of that kind.

        Raises ValueError if there is no kind.
        """
        kind, _, model = text.partition("=")
        if not kind:
            raise ValueError(f"a drafter is KIND or KIND=PATH_OR_HUB_ID, got {text!r}")
        return cls(kind, model or str(MODELS / kind))


def parse_drafters(texts: Sequence[str] | None) -> tuple[DrafterSpec, ...]:
    """Drafters as the command line names them: none given means the bundled one, "none" means no drafter.

    Raises ValueError if one of them is not a drafter.
    """
    named = list(texts or [DEFAULT_KIND])
    if NO_DRAFTER in named:
        if len(named) > 1:
            raise ValueError(f"{NO_DRAFTER!r} cannot be combined with other drafters")
        return ()
    return tuple(DrafterSpec.parse(text) for text in named)


@dataclass(frozen=True)
class TopologySpec:
    """What to run. Port 0 picks a free one; 0 of anything else leaves it to the service."""

    target: str = str(MODELS / "target")
    drafters: tuple[DrafterSpec, ...] = field(default_factory=lambda: parse_drafters(None))
    port: int = 0
    device: str = ""
    threads: int = 0
    # Directory of the adapter with which verifiers' targets draft for themselves, empty for none; None leaves it to the
    # environment.
    space: str | None = None
    tensor_parallel: int = 0
    kv_cache_mib: int = 0
    # Where the prefix cache is kept; empty leaves it in the orchestrator.
    redis: str = ""
    verifiers: int = 1
    # Of the orchestrator's metrics; verifiers and drafters have the next ones, in this order. 0: none are served.
    metrics_port: int = 0
    # Of the gateway; 0: none runs.
    http_port: int = 0
    # A directory with ca.pem, cert.pem and key.pem, which every service then has; empty: plaintext.
    tls: str = ""
    # Environment variables of the orchestrator.
    settings: tuple[tuple[str, str], ...] = ()
    # "asynchronous" or "synchronous"; empty leaves it to the orchestrator.
    rounds: str = ""
    # All services in one process, which has one port.
    colocated: bool = False
    # Environment variables of every service, for benchmarks.
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.colocated and self.tensor_parallel > 1:
            raise ValueError("the parts of a target are processes of their own, which one process cannot have")


def tls_files(directory: str) -> dict[str, str]:
    """The files of TLS in a directory, by what they are; none where there is no directory."""
    return {part: str(Path(directory) / f"{part}.pem") for part in ("ca", "cert", "key")} if directory else {}


def lab_moved(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service, with settings that are for measurements in COPPICE_LAB, as services want them."""
    from coppice.settings import LAB, LAB_VARIABLE, lab_overrides
    from drafter_svc.config import DrafterConfig
    from orchestrator.config import Config
    from verifier_svc.config import VerifierConfig

    fields = [field for one in (Config, VerifierConfig, DrafterConfig) for field in one.model_fields.items()]
    names = {name.upper() for name, field in fields if LAB in field.metadata}
    moved = {name.lower(): value for name, value in env.items() if name in names}
    rest = {name: value for name, value in env.items() if name not in names}
    return rest | ({LAB_VARIABLE: json.dumps(lab_overrides({**os.environ, **env}) | moved)} if moved else {})


class Topology:
    """Running services; `address` is the orchestrator's, and the others are known once it serves."""

    def __init__(self, spec: TopologySpec, echo: Echo | None = None) -> None:
        self._spec = spec
        self._echo = echo
        # In the order in which they were started.
        self._children: list[Child] = []
        self._metrics_ports = itertools.count(spec.metrics_port) if spec.metrics_port else itertools.repeat(0)
        self.address = ""
        self.http_address = ""
        self.verifier_addresses: tuple[str, ...] = ()
        self.drafter_addresses: tuple[str, ...] = ()

    @property
    def tls(self) -> bool:
        """Whether services speak TLS."""
        return bool(self._spec.tls)

    async def start(self) -> None:
        """Start every service and wait until the orchestrator, and the gateway if there is one, serves.

        Raises ChildError if one of them did not start (the message has its last words), or a bundled model is missing.
        """
        for model in (self._spec.target, *(drafter.model for drafter in self._spec.drafters)):
            if missing := missing_model(model):
                raise ChildError(missing)
        if self._spec.colocated:
            name = "coppice"
            self.address = await (await self._launch(name, "coppice.colocated", self._colocated_env())).ready(
                START_TIMEOUT_S
            )
        else:
            await self._start_services()
        if self._spec.http_port:
            gateway = await self._launch("gateway", "coppice.gateway", self._gateway_env())
            self.http_address = await gateway.ready(START_TIMEOUT_S)

    async def _start_services(self) -> None:
        metrics = self._metrics_env()
        count = self._spec.verifiers
        names = [f"verifier {number + 1}" for number in range(count)] if count > 1 else ["verifier"]
        verifiers = [await self._launch(name, "verifier_svc", self._verifier_env()) for name in names]
        drafters = [
            await self._launch(f"drafter {drafter.kind}", "drafter_svc", self._drafter_env(drafter))
            for drafter in self._spec.drafters
        ]
        await _all_ready([*verifiers, *drafters])
        self.verifier_addresses = tuple(child.address for child in verifiers)
        self.drafter_addresses = tuple(child.address for child in drafters)
        env = {**self._spec.env, **metrics, **self._front_tls_env(), **self._orchestrator_env()}
        self.address = await self._launch_orchestrator("orchestrator", env)

    async def add_orchestrator(self, name: str, env: Mapping[str, str]) -> str:
        """Start one more orchestrator for the running back ends; returns its address. Raises ChildError if it fails."""
        own = {**self._metrics_env(), **self._front_tls_env(), "LISTEN_ADDRESS": f"{LOCAL}:0"}
        return await self._launch_orchestrator(name, {**own, **env})

    async def add_verifier(self, name: str, env: Mapping[str, str]) -> str:
        """Start one more verifier, unknown to orchestrators; returns its address. Raises ChildError if it fails."""
        child = await self._launch(name, "verifier_svc", {**self._verifier_env(), **env})
        return await child.ready(START_TIMEOUT_S)

    async def add_drafter(self, name: str, drafter: DrafterSpec, env: Mapping[str, str]) -> str:
        """Start one more drafter, unknown to orchestrators; returns its address. Raises ChildError if it fails."""
        child = await self._launch(name, "drafter_svc", {**self._drafter_env(drafter), **env})
        return await child.ready(START_TIMEOUT_S)

    async def failed(self) -> ChildError:
        """Wait until a service ends by itself; returns what there is to say about it."""
        waits = [asyncio.create_task(child.ended()) for child in self._children]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Stop every service, the orchestrator first, so that running requests can finish."""
        while self._children:
            await self._children.pop().stop(STOP_TIMEOUT_S)

    async def _launch_orchestrator(self, name: str, env: Mapping[str, str]) -> str:
        back_ends = {
            "VERIFIER_ADDRESS": ",".join(self.verifier_addresses),
            "DRAFTER_ADDRESSES": ",".join(self.drafter_addresses),
            "REQUIRE_DRAFTERS": "true",
            "GRACE_S": f"{GRACE_S:g}",
        }
        orchestrator = await self._launch(name, "orchestrator", {**back_ends, **env})
        return await orchestrator.ready(START_TIMEOUT_S)

    async def _launch(self, name: str, module: str, env: dict[str, str]) -> Child:
        child = Child(name, module, lab_moved(env), self._echo)
        self._children.append(child)
        await child.start()
        return child

    def _orchestrator_env(self) -> dict[str, str]:
        spec = self._spec
        own = {"LISTEN_ADDRESS": f"{LOCAL}:{spec.port}", **_given(REDIS_URL=spec.redis, ROUNDS=spec.rounds)}
        return own | dict(spec.settings)

    def _colocated_env(self) -> dict[str, str]:
        spec, files = self._spec, tls_files(self._spec.tls)
        env = {"GRACE_S": f"{GRACE_S:g}", **self._metrics_env(), **self._orchestrator_env()}
        env |= {f"TLS_{part.upper()}": path for part, path in files.items() if part != "ca"}
        shared = _given(DEVICE=spec.device, THREADS=spec.threads)
        env |= {f"VERIFIER_{name}": value for name, value in (shared | self._target_env()).items()}
        env |= {f"DRAFTER_{name}": value for name, value in shared.items()}
        drafters = ",".join(f"{drafter.kind}={drafter.model}" for drafter in spec.drafters)
        env["DRAFTER_TARGET_MODEL"] = spec.target
        return env | {"VERIFIER_MODEL": spec.target, "VERIFIERS": str(spec.verifiers), "DRAFTERS": drafters}

    def _gateway_env(self) -> dict[str, str]:
        env = {
            "LISTEN_ADDRESS": f"{LOCAL}:{self._spec.http_port}",
            "ORCHESTRATOR_ADDRESS": self.address,
            "METRICS": "on",
            "GRACE_S": f"{GRACE_S:g}",
        }
        if files := tls_files(self._spec.tls):
            env |= {"TLS_CERT": files["cert"], "TLS_KEY": files["key"], "ORCHESTRATOR_TLS_CA": files["ca"]}
        return env

    def _metrics_env(self) -> dict[str, str]:
        """Always set: services must not all take the ports that our own environment names."""
        return {"METRICS_PORT": str(next(self._metrics_ports)), "HEALTH_PORT": "0"}

    def _front_tls_env(self) -> dict[str, str]:
        """Back ends ask the orchestrator for its certificate; the orchestrator asks clients for none."""
        files = tls_files(self._spec.tls)
        own = {f"TLS_{part.upper()}": path for part, path in files.items() if part != "ca"}
        return {**own, **{f"BACKEND_TLS_{part.upper()}": path for part, path in files.items()}}

    def _model_env(self, model: str) -> dict[str, str]:
        env = {**self._spec.env, "LISTEN_ADDRESS": f"{LOCAL}:0", "MODEL": model, **self._metrics_env()}
        if files := tls_files(self._spec.tls):
            env |= {"TLS_CERT": files["cert"], "TLS_KEY": files["key"], "TLS_CLIENT_CA": files["ca"]}
        return env | _given(DEVICE=self._spec.device, THREADS=self._spec.threads)

    def _target_env(self) -> dict[str, str]:
        space = {} if self._spec.space is None else {"SPACE_ADAPTER": self._spec.space}
        return _given(KV_CACHE_MIB=self._spec.kv_cache_mib) | space

    def _verifier_env(self) -> dict[str, str]:
        parallel = _given(TENSOR_PARALLEL=self._spec.tensor_parallel)
        return {**self._model_env(self._spec.target), **self._target_env(), **parallel}

    def _drafter_env(self, drafter: DrafterSpec) -> dict[str, str]:
        # On one machine drafters share the target's cores, and step back for it.
        own = {"DRAFTER_KIND": drafter.kind, "TARGET_MODEL": self._spec.target, "NICENESS": DRAFTER_NICENESS}
        return {**self._model_env(drafter.model), **own}


def _given(**settings: object) -> dict[str, str]:
    """The settings that have a value, as an environment has them."""
    return {name: str(value) for name, value in settings.items() if value}


async def _all_ready(children: Sequence[Child]) -> None:
    """Wait for every child; raises ChildError as soon as one of them fails."""
    waits = [asyncio.create_task(child.ready(START_TIMEOUT_S)) for child in children]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


@contextlib.asynccontextmanager
async def running(spec: TopologySpec, echo: Echo | None = None) -> AsyncIterator[Topology]:
    """A topology that runs while the context is open. Raises ChildError if a service did not start."""
    topology = Topology(spec, echo)
    try:
        await topology.start()
        yield topology
    finally:
        await topology.stop()
