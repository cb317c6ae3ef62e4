"""The whole system on this machine: verifier, drafters and orchestrator as separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coppice.checkpoints.bundled import MODELS
from coppice.cli.child import Child, ChildError, Echo
from coppice.cli.errors import WRONG
from coppice.settings import LAB, LAB_VARIABLE, lab_overrides

# A foreign checkpoint may have to be downloaded first.
START_TIMEOUT_S = 600.0
# After which the first start says why it takes so long; others of the bundled models take less.
SLOW_START_S = 20.0
# How long the orchestrator may let requests finish, and then each service take to go.
GRACE_S = 10.0
STOP_TIMEOUT_S = 15.0
LOCAL = "127.0.0.1"
BACK_ENDS = ("verifier_svc", "drafter_svc")
GATEWAY = "coppice.gateway"
# How long the gateway has, once an orchestrator is killed, to tell the streams that it had.
LAST_WORDS_S = 0.5
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

        Raises ValueError if there is no such kind.
        """
        # Where the command line is a client alone, drafters are not installed.
        from drafter_svc.drafters.kinds import KINDS

        kind, _, model = text.partition("=")
        if kind not in KINDS:
            raise ValueError(
                f"a drafter is KIND or KIND=PATH_OR_HUB_ID, with a kind of {', '.join(KINDS)}; got {text!r}"
            )
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
    # Numbers and quantisation of the target, as verifiers' settings have them.
    dtype: str = ""
    quantization: str = ""
    # Directory of the head with which verifiers draft where no drafter does; empty leaves it to the environment.
    head: str = ""
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
        if self.colocated and self.verifiers > 1:
            raise ValueError("several verifiers are processes of their own, which one process cannot have")


def tls_files(directory: str) -> dict[str, str]:
    """The files of TLS in a directory, by what they are; none where there is no directory."""
    return {part: str(Path(directory) / f"{part}.pem") for part in ("ca", "cert", "key")} if directory else {}


def lab_moved(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service, with settings that are for measurements in COPPICE_LAB, as services want them."""
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

    def __init__(self, spec: TopologySpec, echo: Echo | None = None, *, verbose: bool = True) -> None:
        self._spec = spec
        self._echo = echo
        self._verbose = verbose
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

        Raises ChildError if a setting is wrong, a port is taken, or one of them did not start: with its last words.
        """
        spec = self._spec
        served = 1 if spec.colocated else 1 + spec.verifiers + len(spec.drafters)
        metrics = range(spec.metrics_port, spec.metrics_port + served) if spec.metrics_port else ()
        ports = [port for port in (spec.port, spec.http_port, *metrics) if port]
        if twice := {port for port in ports if ports.count(port) > 1}:
            what = f"--port, --http-port and the {served} from --metrics-port on"
            raise ChildError(f"port {min(twice)} is asked for twice: {what} must differ", WRONG)
        for port in ports:
            refuse_taken(port)
        slow = asyncio.get_running_loop().call_later(SLOW_START_S, self._say_why_slow)
        try:
            await self._start_all()
        finally:
            slow.cancel()

    async def _start_all(self) -> None:
        if self._spec.colocated:
            from coppice.colocated.config import ColocatedConfig

            env = self._colocated_env()
            check_settings("coppice", ColocatedConfig, env)
            self.address = await (await self._launch("coppice", "coppice.colocated", env)).ready(START_TIMEOUT_S)
        else:
            await self._start_services()
        if self._spec.http_port:
            gateway = await self._launch("gateway", GATEWAY, self._gateway_env())
            self.http_address = await gateway.ready(START_TIMEOUT_S)

    async def _start_services(self) -> None:
        from drafter_svc.config import DrafterConfig
        from orchestrator.config import Config
        from verifier_svc.config import VerifierConfig

        metrics = self._metrics_env()
        count = self._spec.verifiers
        names = [f"verifier {number + 1}" for number in range(count)] if count > 1 else ["verifier"]
        back_ends: list[tuple[str, str, Any, dict[str, str]]]
        back_ends = [(name, "verifier_svc", VerifierConfig, self._verifier_env()) for name in names]
        back_ends += [
            (f"drafter {drafter.kind}", "drafter_svc", DrafterConfig, self._drafter_env(drafter))
            for drafter in self._spec.drafters
        ]
        env = {**self._spec.env, **metrics, **self._front_tls_env(), **self._orchestrator_env()}
        # All before the first starts: models take long to load.
        check_settings("orchestrator", Config, {"VERIFIER_ADDRESS": f"{LOCAL}:1", **env})
        for name, _, settings, own in back_ends:
            check_settings(name, settings, own)
        children = [await self._launch(name, module, own) for name, module, _, own in back_ends]
        await _all_ready(children)
        self.verifier_addresses = tuple(child.address for child in children[:count])
        self.drafter_addresses = tuple(child.address for child in children[count:])
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

    async def stop(
        self, front_s: float = STOP_TIMEOUT_S, back_s: float = STOP_TIMEOUT_S, *, is_interrupted: bool = False
    ) -> None:
        """Stop what clients call first, so that running requests can finish, and then the back ends together.

        Each in front has `front_s` until it is killed, the back ends `back_s`. Those in front stop one after another,
        or together, with requests that run, where it is interrupted: then the gateway has `LAST_WORDS_S` more, to tell
        its clients.
        """
        children, self._children = self._children, []
        front = [child for child in reversed(children) if child.module not in BACK_ENDS]
        gateways = [child.stop(front_s + LAST_WORDS_S) for child in front if is_interrupted and child.module == GATEWAY]
        last = asyncio.gather(*gateways)
        if is_interrupted:
            await asyncio.gather(*(child.stop(front_s) for child in front if child.module != GATEWAY))
        else:
            for child in front:
                await child.stop(front_s)
        back_ends = [child.stop(back_s) for child in reversed(children) if child.module in BACK_ENDS]
        await asyncio.gather(last, *back_ends)

    def _say_why_slow(self) -> None:
        if self._echo is not None:
            self._echo("still loading: the first start on a machine compiles for its processor, a minute or more")

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
        if self._echo is not None and not self._children:
            self._echo(f"loading {Path(self._spec.target).name} ...")
        child = Child(name, module, lab_moved(env), self._echo, verbose=self._verbose)
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
        spec = self._spec
        own = {"DTYPE": spec.dtype, "QUANTIZATION": spec.quantization, "EAGLE_HEAD": spec.head}
        return _given(KV_CACHE_MIB=spec.kv_cache_mib, **own) | space

    def _verifier_env(self) -> dict[str, str]:
        parallel = _given(TENSOR_PARALLEL=self._spec.tensor_parallel)
        return {**self._model_env(self._spec.target), **self._target_env(), **parallel}

    def _drafter_env(self, drafter: DrafterSpec) -> dict[str, str]:
        # On one machine drafters share the target's cores, and step back for it.
        own = {"DRAFTER_KIND": drafter.kind, "TARGET_MODEL": self._spec.target, "NICENESS": DRAFTER_NICENESS}
        return {**self._model_env(drafter.model), **own}


def check_settings(name: str, settings: Any, env: Mapping[str, str]) -> None:
    """Raise ChildError if a service would refuse its environment, which `settings` reads."""
    try:
        settings.from_env({**os.environ, **lab_moved(env)})
    except ValueError as error:
        raise ChildError(f"{name}: {error}", WRONG) from error


def refuse_taken(port: int) -> None:
    """Raise ChildError if a port of this machine cannot be listened at."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCAL, port))
        except OSError as error:
            hint = (
                "it needs root; take one from 1024 on"
                if isinstance(error, PermissionError)
                else "take another one, or end what has it"
            )
            raise ChildError(f"port {port} cannot be had ({error.strerror}): {hint}", WRONG) from error


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
