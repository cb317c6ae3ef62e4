"""Settings of all three services from one environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, repeat

from drafter_svc.config import DrafterConfig
from orchestrator.config import Config
from verifier_svc.config import VerifierConfig

VERIFIER, DRAFTER = "VERIFIER_", "DRAFTER_"
# How far drafters step back on cores that they share with the verifier.
NICENESS = "10"
# Back ends have no door of their own, and each its model.
_LEFT_OUT = (
    "LISTEN_ADDRESS",
    "HEALTH_PORT",
    "METRICS_PORT",
    "TLS_CERT",
    "TLS_KEY",
    "TLS_CLIENT_CA",
    "MODEL",
)
# They name back ends elsewhere, and the way there.
_NOT_HERE = ("VERIFIER_ADDRESS", "DRAFTER_ADDRESSES", "BACKEND_TLS_CA", "BACKEND_TLS_CERT", "BACKEND_TLS_KEY")


@dataclass(frozen=True)
class ColocatedConfig:
    """One orchestrator, and the back ends that it has in its own process.

    A variable is for every service that knows it, as `coppice up` passes its environment on; one with the prefix
    VERIFIER_ or DRAFTER_ is for those alone. VERIFIER_MODEL is the target, DRAFTERS are the drafters as KIND=MODEL,
    separated by commas, and VERIFIERS says how many verifiers there are, each with its own copy of the target.
    """

    orchestrator: Config
    verifiers: tuple[VerifierConfig, ...]
    drafters: tuple[DrafterConfig, ...]

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> ColocatedConfig:
        """The configuration that `env` describes.

        Raises:
            ValueError: a variable is missing, has a bad value, or asks for what one process does not do; the message
                names it.
        """
        for name in _NOT_HERE:
            if env.get(name):
                raise ValueError(f"{name} must not be set: verifiers and drafters are in this process")
        ports = _metrics_ports(env.get("METRICS_PORT") or "0")
        metrics_port = next(ports)
        verifiers = tuple(_verifier(env, next(ports)) for _ in range(_number_of_verifiers(env)))
        drafters = tuple(_drafter(env, kind, model, next(ports)) for kind, model in _kinds(env.get("DRAFTERS", "")))
        own = {
            "REQUIRE_DRAFTERS": "true",
            **env,
            "METRICS_PORT": metrics_port,
            "VERIFIER_ADDRESS": ",".join(names("verifier", len(verifiers))),
            "DRAFTER_ADDRESSES": ",".join(names("drafter", len(drafters))),
        }
        return cls(Config.from_env(own), verifiers, drafters)


def names(what: str, number: int) -> list[str]:
    """What the orchestrator calls its back ends by."""
    return [f"{what}-{index + 1}" for index in range(number)]


def _verifier(env: Mapping[str, str], metrics_port: str) -> VerifierConfig:
    config = VerifierConfig.from_env({**_for(env, VERIFIER), "METRICS_PORT": metrics_port})
    if config.tensor_parallel > 1:
        raise ValueError("TENSOR_PARALLEL must be 1: the parts of a target are processes of their own")
    return config


def _drafter(env: Mapping[str, str], kind: str, model: str, metrics_port: str) -> DrafterConfig:
    own = {"MODEL": model, "DRAFTER_KIND": kind, "METRICS_PORT": metrics_port}
    return DrafterConfig.from_env({"NICENESS": NICENESS, **_for(env, DRAFTER), **own})


def _for(env: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The environment as a back end of this kind has it."""
    shared = {name: value for name, value in env.items() if name not in _LEFT_OUT}
    own = {name.removeprefix(prefix): value for name, value in env.items() if name.startswith(prefix)}
    return {**shared, **own}


def _number_of_verifiers(env: Mapping[str, str]) -> int:
    text = env.get("VERIFIERS") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"VERIFIERS must be a whole number of at least 1, got {text!r}")
    return int(text)


def _kinds(text: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, text.split(",")):
        kind, _, model = part.partition("=")
        if not (kind and model):
            raise ValueError(f"DRAFTERS must be KIND=MODEL, separated by commas, got {part!r}")
        yield kind, model


def _metrics_ports(first: str) -> Iterator[str]:
    """The orchestrator's, and the next ones; 0 for everyone where there are none."""
    if not first.isdecimal():
        raise ValueError(f"METRICS_PORT must be a whole number, got {first!r}")
    return map(str, count(int(first)) if int(first) else repeat(0))
