"""The orchestrator's settings, read once from the environment."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from coppice.net.service_settings import ServiceSettings
from coppice.net.tls import ChannelTls, TlsError, settings_named
from coppice.settings import LAB, VERBATIM, Mebibytes, Milliseconds, Nodes, Rule, Seconds, parts

# Sent to verifiers in microseconds, as 32 bits.
MAX_SYNCHRONOUS_WAIT_S = 3600.0
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def _distinct(text: str) -> bool:
    addresses = parts(text)
    return 0 < len(addresses) == len(set(addresses))


def _weights(text: Any) -> Any:
    """Pairs of name and weight from "a=2,b=3"; other types pass through to validation."""
    if not isinstance(text, str):
        return text
    pairs = [part.rpartition("=") for part in parts(text)]
    return tuple((name.strip(), weight) for name, _, weight in pairs)


class Config(ServiceSettings):
    """Settings of the orchestrator process."""

    is_internal: ClassVar[bool] = False

    verifier_address: Annotated[
        str,
        Rule("HOST:PORT, or several different ones separated by commas, for example 127.0.0.1:50051", _distinct),
    ] = Field(description="Address of the verifier, or of several verifiers of one model.")
    target_revision: str = Field(
        default="",
        description="Serve what verifiers of this `TARGET_REVISION` serve, also while most are still older ones; "
        "empty: what most verifiers serve.",
    )
    drafter_addresses: Annotated[
        tuple[str, ...], BeforeValidator(parts), Rule("HOST:PORT, separated by commas", lambda _: True)
    ] = Field(default=(), description="Addresses of the drafters.")
    require_drafters: bool = Field(
        default=False, description="Stop at start if a drafter does not fit the target, or cannot be reached in time."
    )
    connect_timeout_s: Seconds = Field(
        default=30.0, gt=0, description="Longest wait for verifiers and drafters at start."
    )
    resume_s: Seconds = Field(
        default=5.0, gt=0, description="How long running requests wait for a verifier after theirs was lost."
    )
    grace_s: Seconds = Field(default=10.0, ge=0, description="How long running requests may take after SIGTERM.")
    default_timeout_s: Seconds = Field(
        default=600.0, gt=0, description="Deadline of calls whose client sets no deadline."
    )
    unread_s: Seconds = Field(
        default=10.0,
        ge=0,
        description="How long a client may leave a message unread before its call ends; 0: until its deadline.",
    )

    # Rows are padded to multiples of four on CPU: fifteen nodes and the root fill sixteen. Drafters skip nodes that do
    # not pay.
    max_nodes: Nodes = Field(default=15, ge=0, le=1024, description="Most draft nodes of a round.")
    linger_ms: Milliseconds = Field(default=40.0, ge=0, le=10_000, description="Longest wait for a round's draft.")
    planner: Annotated[Literal["adaptive", "fixed"], LAB] = Field(
        default="adaptive",
        description="`adaptive` learns which drafts pay; `fixed` always spends `MAX_NODES` and `LINGER_MS`.",
    )
    rounds: Annotated[Literal["asynchronous", "synchronous"], LAB] = Field(
        default="asynchronous",
        description="`synchronous`: every round waits for a draft of `MAX_NODES`, for comparison.",
    )
    synchronous_wait_s: Annotated[Seconds, LAB] = Field(
        default=5.0, gt=0, le=MAX_SYNCHRONOUS_WAIT_S, description="Longest wait for a draft in synchronous rounds."
    )

    max_requests: int = Field(
        default=256, ge=1, description="Outputs that run at once, each output of a request counted."
    )
    max_outputs: Annotated[int, LAB] = Field(
        default=16, ge=1, description="Most outputs of one request, within `MAX_REQUESTS`."
    )
    max_queued: int = Field(
        default=256, ge=0, description="Outputs that may wait for a place; more are refused with RESOURCE_EXHAUSTED."
    )
    max_queue_wait_s: Seconds = Field(
        default=0.0,
        ge=0,
        description="Longest usual wait in the queue and, again, for first tokens, before requests are refused; "
        "0 sets no bound.",
    )
    max_token_ms: Milliseconds = Field(
        default=0.0,
        ge=0,
        description="Run only as many outputs as have a token in this time each, prompts included; 0 sets no bound.",
    )
    tenant_weights: Annotated[
        tuple[tuple[str, int], ...],
        BeforeValidator(_weights),
        Rule("NAME=WEIGHT, separated by commas, each weight at least 1", lambda pairs: all(n >= 1 for _, n in pairs)),
    ] = Field(default=(), description="Tenants' shares of the places, as in `a=2,b=3`; others have 1.")
    shared_places: int = Field(
        default=4,
        ge=0,
        description="Without tokens: outputs that hosts, and connections of a host, share evenly before any is paused; "
        "0 never pauses.",
    )
    tokens_file: str = Field(
        default="", description="File of the tenants whose tokens are accepted, as JSON lines; empty: no token needed."
    )
    open_reflection: bool = Field(default=False, description="Answer gRPC reflection without a token.")
    watch_rounds: bool = Field(
        default=False,
        description="Offer the stream of rounds (`WatchRounds`): a tenant sees its own requests' tokens, an admin, and "
        "without tokens every client, those of all.",
    )

    cache_drafter: bool = Field(
        default=True, description="Draft from what followed the same tokens in earlier requests, and remember it."
    )
    cache_mib: Mebibytes = Field(default=64, ge=1, description="Memory of the prefix cache in this process.")
    cache_ttl_s: Seconds = Field(default=86_400.0, gt=0, description="How long the prefix cache remembers.")
    cache_secret: Annotated[str, VERBATIM] = Field(
        default="",
        repr=False,
        description="Secret for keys of the prefix cache, the same for all orchestrators of one Redis; empty: random.",
    )
    redis_url: Annotated[
        str, Rule("a URL as in redis://HOST:6379/0", lambda url: not url or url.startswith(REDIS_SCHEMES))
    ] = Field(default="", repr=False, description="Redis in which orchestrators share the prefix cache; empty: none.")
    redis_timeout_ms: Annotated[Milliseconds, LAB] = Field(
        default=30.0, gt=0, description="Time after which a call of Redis counts as failed."
    )

    backend_tls_ca: str = Field(
        default="", description="PEM file of the CA of verifiers and drafters; empty: they are called in plaintext."
    )
    backend_tls_cert: str = Field(default="", description="PEM file of the certificate shown to them.")
    backend_tls_key: str = Field(default="", description="PEM file of that certificate's key.")
    backend_tls_name: str = Field(
        default="", description="Name that their certificates must have; empty: the host of the address."
    )

    @model_validator(mode="after")
    def _backends_fit_together(self) -> Self:
        if self.redis_url and not self.cache_drafter:
            raise ValueError("REDIS_URL needs CACHE_DRAFTER")
        _ = self.backend_tls
        return self

    @property
    def is_synchronous(self) -> bool:
        """Whether each round waits for its draft."""
        return self.rounds == "synchronous"

    @property
    def verifier_addresses(self) -> tuple[str, ...]:
        """Every verifier's address."""
        return tuple(parts(self.verifier_address))

    @property
    def backend_tls(self) -> ChannelTls | None:
        """TLS files for calls to verifiers and drafters, which require a client certificate; None for plaintext."""
        ca, cert, key, name = self.backend_tls_ca, self.backend_tls_cert, self.backend_tls_key, self.backend_tls_name
        if not (ca or cert or key or name):
            return None
        with settings_named("BACKEND_TLS_"):
            if not ca:
                raise TlsError("ca", "must be set if any other BACKEND_TLS_ setting is")
            if not (cert or key):
                raise TlsError("cert", "must be set: verifiers and drafters require a client certificate")
            return ChannelTls(ca, cert, key, name)
