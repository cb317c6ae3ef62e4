"""Settings of all three services from one environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, repeat
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from coppice.settings import ConfigError, Port, Rule, Settings, parts
from drafter_svc.config import DrafterConfig
from orchestrator.config import Config
from verifier_svc.config import VerifierConfig

VERIFIER, DRAFTER = "VERIFIER_", "DRAFTER_"
# Niceness of drafters on cores shared with the verifier.
NICENESS = "10"
# Verifiers and drafters have no listening address and each its model: they only take these variables with a prefix.
_PREFIXED_ONLY = ("LISTEN_ADDRESS", "HEALTH_PORT", "METRICS_PORT", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "MODEL")
# Addresses of, and certificates for, verifiers and drafters elsewhere.
_NOT_HERE = ("VERIFIER_ADDRESS", "DRAFTER_ADDRESSES", "BACKEND_TLS_CA", "BACKEND_TLS_CERT", "BACKEND_TLS_KEY")


def _kinds(text: Any) -> Any:
    """Pairs of kind and model from "KIND=MODEL,…"; other types pass through to validation."""
    if not isinstance(text, str):
        return text
    return tuple((kind, model) for kind, _, model in (part.partition("=") for part in parts(text)))


class ColocatedSettings(Settings):
    """Settings of the colocated deployment itself."""

    verifiers: int = Field(default=1, ge=1, description="Verifiers in this process, each with its copy of the target.")
    drafters: Annotated[
        tuple[tuple[str, str], ...],
        BeforeValidator(_kinds),
        Rule("KIND=MODEL, separated by commas", lambda pairs: all(kind and model for kind, model in pairs)),
    ] = Field(default=(), description="Drafters in this process.")
    metrics_port: Port = Field(
        default=0, description="Port for the orchestrator's metrics; verifiers and drafters take the next ones."
    )


@dataclass(frozen=True)
class ColocatedConfig:
    """One orchestrator with its verifiers and drafters in the same process.

    A variable applies to each service that knows it, as with `coppice up`; with the prefix VERIFIER_ or DRAFTER_ it
    only applies to those. VERIFIER_MODEL is the target.
    """

    orchestrator: Config
    verifiers: tuple[VerifierConfig, ...]
    drafters: tuple[DrafterConfig, ...]

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> ColocatedConfig:
        """Configuration from `env`.

        Raises:
            ConfigError: a variable is missing, invalid, or not supported in one process; the message names it.
        """
        for name in _NOT_HERE:
            if env.get(name):
                raise ConfigError(f"{name} must not be set: verifiers and drafters are in this process")
        own = ColocatedSettings.from_env(env)
        ports = count(own.metrics_port) if own.metrics_port else repeat(0)
        metrics_port = next(ports)
        verifiers = tuple(_verifier(env, next(ports)) for _ in range(own.verifiers))
        drafters = tuple(_drafter(env, kind, model, next(ports)) for kind, model in own.drafters)
        addresses: dict[str, Any] = {
            "verifier_address": ",".join(names("verifier", len(verifiers))),
            "drafter_addresses": names("drafter", len(drafters)),
        }
        shared = {"REQUIRE_DRAFTERS": "true", **env}
        return cls(Config.from_env(shared, metrics_port=metrics_port, **addresses), verifiers, drafters)


def names(what: str, number: int) -> list[str]:
    """Addresses of verifiers or drafters in the in-memory network."""
    return [f"{what}-{index + 1}" for index in range(number)]


def _verifier(env: Mapping[str, str], metrics_port: int) -> VerifierConfig:
    config = VerifierConfig.from_env(env, prefix=VERIFIER, prefixed_only=_PREFIXED_ONLY, metrics_port=metrics_port)
    if config.tensor_parallel > 1:
        raise ConfigError("TENSOR_PARALLEL must be 1: ranks need processes of their own")
    return config


def _drafter(env: Mapping[str, str], kind: str, model: str, metrics_port: int) -> DrafterConfig:
    own = {"model": model, "drafter_kind": kind, "metrics_port": metrics_port}
    return DrafterConfig.from_env({"NICENESS": NICENESS, **env}, prefix=DRAFTER, prefixed_only=_PREFIXED_ONLY, **own)
