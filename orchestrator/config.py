"""The orchestrator's configuration: one frozen object, read once from the environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from coppice.net.tls import ChannelTls, ServerTls, TlsError, server_tls, settings_named
from coppice.obs.metrics_tls import OFF, check_metrics_tls

Value = TypeVar("Value")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


PLANNERS = ("adaptive", "fixed")
ROUNDS = ("asynchronous", "synchronous")
# A verifier is told the wait in microseconds, in 32 bits.
MAX_SYNCHRONOUS_WAIT_S = 3600.0


class ConfigError(ValueError):
    """A variable is missing or has a bad value; the message names it."""


@dataclass(frozen=True)
class Config:
    """What the orchestrator is told from outside; each field is the environment variable in lower case.

    Raises:
        ConfigError: a value is out of range.
    """

    # One verifier, or several of the same model, separated by commas.
    verifier_address: str
    drafter_addresses: tuple[str, ...] = ()
    listen_address: str = "127.0.0.1:0"
    # A drafter that does not fit, or that is not there in time, stops the start.
    require_drafters: bool = False
    # Most draft nodes of a round. Rows come in fours on CPU: fifteen nodes and the root make sixteen. Drafters leave
    # out the nodes that do not pay, so that few rounds have as many.
    max_nodes: int = 15
    # Longest wait for a round's draft.
    linger_ms: float = 40.0
    # Requests running at once, each output of a request counted.
    max_requests: int = 256
    # For calls whose client sets no deadline.
    default_timeout_s: float = 600.0
    connect_timeout_s: float = 30.0
    grace_s: float = 10.0
    # How long running requests outlive the loss of the verifier before they fail.
    resume_s: float = 5.0
    # Most outputs of one request, where MAX_REQUESTS is not fewer.
    max_outputs: int = 16
    # Whether requests get drafts from what followed the same tokens before, and are remembered for others.
    cache_drafter: bool = True
    # Where they are remembered: in this process, or in a Redis for several.
    redis_url: str = field(default="", repr=False)
    # A call of Redis that takes longer counts as failed.
    redis_timeout_ms: float = 30.0
    # What keys of the prefix cache are made with. Orchestrators that share a Redis need the same; empty: one of this
    # process's own.
    cache_secret: str = field(default="", repr=False)
    # Most memory of the prefix cache in this process, with a Redis or without.
    cache_mib: int = 64
    # How long something is remembered.
    cache_ttl_s: float = 86_400.0
    # Outputs that may wait for a place; more are turned away with RESOURCE_EXHAUSTED.
    max_queued: int = 256
    # The longest time in that queue; who would usually wait for longer is turned away at once. No more prompts are read
    # at once than have their first tokens in as long again. 0: no bound of its own.
    max_queue_wait_s: float = 0.0
    # As many outputs run at once as have a token in that time each, by the pace of late, the prompt's time included;
    # never more than MAX_REQUESTS. 0: always as many as those.
    max_token_ms: float = 0.0
    # Shares of the places, for tenants that are to have more than one: pairs of name and weight, as in "a=2,b=3".
    tenant_weights: tuple[tuple[str, int], ...] = ()
    # How rounds are planned: "adaptive" learns what pays, within MAX_NODES and LINGER_MS; "fixed" always spends these.
    planner: str = "adaptive"
    # Whether rounds wait for their drafts: "asynchronous", no longer than the planner lets them; "synchronous", for
    # comparison: draft, verify, draft, verify, with MAX_NODES in every round, whatever PLANNER says.
    rounds: str = "asynchronous"
    # With synchronous rounds, the longest wait for a draft: a drafter that hangs costs no more than that, now and then.
    synchronous_wait_s: float = 5.0
    # Metrics are served over HTTP there, on the host of LISTEN_ADDRESS; 0 serves none.
    metrics_port: int = 0
    # How they are served there: plain HTTP (off), HTTPS with the certificate below (on), or that for those who show
    # one of TLS_CLIENT_CA alone (mutual).
    metrics_tls: str = OFF
    # PEM files of the public API: its certificate and key, and the CA of those who may call; without a CA, everybody.
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    # PEM files for calls to verifiers and drafters: their CA, the certificate and key that they are shown, and the name
    # that theirs have to have, where that is not the host of the address. All empty: plaintext.
    backend_tls_ca: str = ""
    backend_tls_cert: str = ""
    backend_tls_key: str = ""
    backend_tls_name: str = ""
    # Health alone is served there in plaintext, on the host of LISTEN_ADDRESS, for probes without a certificate; 0
    # serves none.
    health_port: int = 0
    # Whose tokens the public API takes, as JSON lines (docs/security.md); empty: it asks for none.
    tokens_file: str = ""
    # Whether reflection answers without a token.
    open_reflection: bool = False
    # Where no tokens are asked for: how many outputs hosts, and the connections of a host, share out among them while
    # one of them asks for less than its part. What others have beyond theirs is paused. 0: nothing is ever paused.
    shared_places: int = 4
    # How long a client may leave a message that waits for it before its call is ended. 0: until its deadline.
    unread_s: float = 10.0

    def __post_init__(self) -> None:
        addresses = self.verifier_addresses
        _check("VERIFIER_ADDRESS", bool(addresses), "must be set, for example 127.0.0.1:50051")
        _check("VERIFIER_ADDRESS", len(set(addresses)) == len(addresses), f"names one twice: {self.verifier_address}")
        _check("MAX_NODES", 0 <= self.max_nodes <= 1024, f"must be in [0, 1024], got {self.max_nodes}")
        _check("LINGER_MS", 0 <= self.linger_ms <= 10_000, f"must be in [0, 10000], got {self.linger_ms}")
        _check("MAX_REQUESTS", self.max_requests >= 1, f"must be at least 1, got {self.max_requests}")
        _check("MAX_OUTPUTS", self.max_outputs >= 1, f"must be at least 1, got {self.max_outputs}")
        _check("MAX_QUEUED", self.max_queued >= 0, f"must be at least 0, got {self.max_queued}")
        for name in ("max_queue_wait_s", "max_token_ms", "shared_places", "unread_s"):
            value = getattr(self, name)
            _check(name.upper(), value >= 0, f"must be at least 0, got {value}")
        _check("TENANT_WEIGHTS", all(weight >= 1 for _, weight in self.tenant_weights), "must be at least 1 each")
        _check("CACHE_MIB", self.cache_mib >= 1, f"must be at least 1, got {self.cache_mib}")
        _check("REDIS_URL", self.cache_drafter or not self.redis_url, "needs CACHE_DRAFTER")
        _check("PLANNER", self.planner in PLANNERS, f"must be one of {', '.join(PLANNERS)}, got {self.planner!r}")
        _check("ROUNDS", self.rounds in ROUNDS, f"must be one of {', '.join(ROUNDS)}, got {self.rounds!r}")
        _check(
            "SYNCHRONOUS_WAIT_S",
            0 < self.synchronous_wait_s <= MAX_SYNCHRONOUS_WAIT_S,
            f"must be above 0 and at most {MAX_SYNCHRONOUS_WAIT_S:g}, got {self.synchronous_wait_s}",
        )
        _check("METRICS_PORT", 0 <= self.metrics_port < 1 << 16, f"must be in [0, 65535], got {self.metrics_port}")
        _check("HEALTH_PORT", 0 <= self.health_port < 1 << 16, f"must be in [0, 65535], got {self.health_port}")
        try:
            check_metrics_tls(self.metrics_tls, self.tls)
            _ = self.backend_tls
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("default_timeout_s", "connect_timeout_s", "resume_s", "redis_timeout_ms", "cache_ttl_s"):
            value = getattr(self, name)
            _check(name.upper(), value > 0, f"must be above 0, got {value}")
        _check("GRACE_S", self.grace_s >= 0, f"must be at least 0, got {self.grace_s}")

    @property
    def is_synchronous(self) -> bool:
        """Whether each round waits for its draft."""
        return self.rounds == "synchronous"

    @property
    def verifier_addresses(self) -> tuple[str, ...]:
        """Every verifier's address."""
        return _addresses(self.verifier_address)

    @property
    def tls(self) -> ServerTls | None:
        """The files of TLS for the public API; None for plaintext."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca, is_internal=False)

    @property
    def backend_tls(self) -> ChannelTls | None:
        """The files of TLS for calls to verifiers and drafters, who want to see a certificate; None for plaintext."""
        ca, cert, key, name = self.backend_tls_ca, self.backend_tls_cert, self.backend_tls_key, self.backend_tls_name
        if not (ca or cert or key or name):
            return None
        with settings_named("BACKEND_TLS_"):
            if not ca:
                raise TlsError("ca", "must be set where another of BACKEND_TLS_ is")
            if not (cert or key):
                raise TlsError("cert", "must be set: back ends serve nobody without a certificate")
            return ChannelTls(ca, cert, key, name)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Config:
        """The configuration that `env` describes.

        Raises:
            ConfigError: a variable is missing or has a bad value.
        """
        return cls(
            verifier_address=env.get("VERIFIER_ADDRESS", "").strip(),
            drafter_addresses=_read(env, "DRAFTER_ADDRESSES", _addresses, cls.drafter_addresses),
            listen_address=_read(env, "LISTEN_ADDRESS", str, cls.listen_address),
            require_drafters=_read(env, "REQUIRE_DRAFTERS", _boolean, cls.require_drafters),
            max_nodes=_read(env, "MAX_NODES", int, cls.max_nodes),
            linger_ms=_read(env, "LINGER_MS", _number, cls.linger_ms),
            max_requests=_read(env, "MAX_REQUESTS", int, cls.max_requests),
            default_timeout_s=_read(env, "DEFAULT_TIMEOUT_S", _number, cls.default_timeout_s),
            connect_timeout_s=_read(env, "CONNECT_TIMEOUT_S", _number, cls.connect_timeout_s),
            grace_s=_read(env, "GRACE_S", _number, cls.grace_s),
            resume_s=_read(env, "RESUME_S", _number, cls.resume_s),
            max_outputs=_read(env, "MAX_OUTPUTS", int, cls.max_outputs),
            cache_drafter=_read(env, "CACHE_DRAFTER", _boolean, cls.cache_drafter),
            redis_url=_read(env, "REDIS_URL", str, cls.redis_url),
            redis_timeout_ms=_read(env, "REDIS_TIMEOUT_MS", _number, cls.redis_timeout_ms),
            cache_secret=env.get("CACHE_SECRET", ""),
            cache_mib=_read(env, "CACHE_MIB", int, cls.cache_mib),
            cache_ttl_s=_read(env, "CACHE_TTL_S", _number, cls.cache_ttl_s),
            max_queued=_read(env, "MAX_QUEUED", int, cls.max_queued),
            max_queue_wait_s=_read(env, "MAX_QUEUE_WAIT_S", _number, cls.max_queue_wait_s),
            max_token_ms=_read(env, "MAX_TOKEN_MS", _number, cls.max_token_ms),
            tenant_weights=_read(env, "TENANT_WEIGHTS", _weights, cls.tenant_weights),
            shared_places=_read(env, "SHARED_PLACES", int, cls.shared_places),
            unread_s=_read(env, "UNREAD_S", _number, cls.unread_s),
            planner=_read(env, "PLANNER", str, cls.planner),
            rounds=_read(env, "ROUNDS", str, cls.rounds),
            synchronous_wait_s=_read(env, "SYNCHRONOUS_WAIT_S", _number, cls.synchronous_wait_s),
            metrics_port=_read(env, "METRICS_PORT", int, cls.metrics_port),
            metrics_tls=_read(env, "METRICS_TLS", str, cls.metrics_tls),
            tls_cert=_read(env, "TLS_CERT", str, cls.tls_cert),
            tls_key=_read(env, "TLS_KEY", str, cls.tls_key),
            tls_client_ca=_read(env, "TLS_CLIENT_CA", str, cls.tls_client_ca),
            backend_tls_ca=_read(env, "BACKEND_TLS_CA", str, cls.backend_tls_ca),
            backend_tls_cert=_read(env, "BACKEND_TLS_CERT", str, cls.backend_tls_cert),
            backend_tls_key=_read(env, "BACKEND_TLS_KEY", str, cls.backend_tls_key),
            backend_tls_name=_read(env, "BACKEND_TLS_NAME", str, cls.backend_tls_name),
            health_port=_read(env, "HEALTH_PORT", int, cls.health_port),
            tokens_file=_read(env, "TOKENS_FILE", str, cls.tokens_file),
            open_reflection=_read(env, "OPEN_REFLECTION", _boolean, cls.open_reflection),
        )


def _read(env: Mapping[str, str], name: str, parse: Callable[[str], Value], default: Value) -> Value:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _weights(text: str) -> tuple[tuple[str, int], ...]:
    pairs = [part.rpartition("=") for part in _addresses(text)]
    return tuple((name.strip(), int(weight)) for name, _, weight in pairs)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {text}")
    return value


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"must be true or false, got {text}")


def _check(name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {rule}")
