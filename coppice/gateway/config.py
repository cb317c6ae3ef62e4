"""The gateway's settings, read once from the environment."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from coppice.net.tls import ChannelTls, ServerTls, TlsError, server_tls, settings_named
from coppice.settings import Mebibytes, Rule, Seconds, Settings, Switch, is_address, parts

ANY_ORIGIN = "*"


class GatewayConfig(Settings):
    """Settings of the gateway process."""

    listen_address: Annotated[str, Rule("HOST:PORT", is_address)] = Field(
        default="127.0.0.1:8000", description="Address to serve HTTP on; port 0 picks a free one."
    )
    orchestrator_address: Annotated[str, Rule("HOST:PORT", is_address)] = Field(
        description="Address of the orchestrator's public API."
    )
    served_model_name: str = Field(
        default="", description="Name of the model in requests and answers; empty: the last part of the target's name."
    )
    request_timeout_s: Seconds = Field(
        default=600.0,
        gt=0,
        description="Deadline of a request; a header `X-Request-Timeout` can set an earlier one.",
    )
    max_body_mib: Mebibytes = Field(default=1, ge=1, le=64, description="Largest body of a request.")
    max_connections: int = Field(
        default=512, ge=1, description="Connections at once; above it, idle ones are closed for new ones."
    )
    receive_s: Seconds = Field(default=30.0, gt=0, description="How long a request may take to arrive.")
    unread_s: Seconds = Field(
        default=10.0, gt=0, description="How long a client may leave its answer unread before its connection ends."
    )
    keep_alive_s: Seconds = Field(
        default=15.0, gt=0, description="Silence of a stream after which a comment is sent, for proxies in between."
    )
    grace_s: Seconds = Field(default=10.0, ge=0, description="How long running requests may take after SIGTERM.")
    allowed_origins: Annotated[
        tuple[str, ...], BeforeValidator(parts), Rule("origins separated by commas, or *", lambda _: True)
    ] = Field(default=(), description="Origins of web pages that may call it (CORS); empty: none, `*`: all.")
    metrics: Switch = Field(
        default="off", description="Serve the gateway's own metrics under `/metrics`, to every client."
    )

    tls_cert: str = Field(default="", description="PEM file of the certificate to serve with; empty: plain HTTP.")
    tls_key: str = Field(default="", description="PEM file of the certificate's key.")
    orchestrator_tls_ca: str = Field(
        default="", description="PEM file of the orchestrator's CA; empty: it is called in plaintext."
    )
    orchestrator_tls_cert: str = Field(default="", description="PEM file of the certificate shown to it.")
    orchestrator_tls_key: str = Field(default="", description="PEM file of that certificate's key.")
    orchestrator_tls_name: str = Field(
        default="", description="Name that its certificate must have; empty: the host of the address."
    )

    @model_validator(mode="after")
    def _files_fit_together(self) -> Self:
        _ = self.tls, self.orchestrator_tls
        return self

    @property
    def tls(self) -> ServerTls | None:
        """TLS files to serve with; None for plain HTTP."""
        return server_tls(self.tls_cert, self.tls_key, "", is_internal=False)

    @property
    def orchestrator_tls(self) -> ChannelTls | None:
        """TLS files for calls to the orchestrator; None for plaintext."""
        ca, cert = self.orchestrator_tls_ca, self.orchestrator_tls_cert
        key, name = self.orchestrator_tls_key, self.orchestrator_tls_name
        if not (ca or cert or key or name):
            return None
        with settings_named("ORCHESTRATOR_TLS_"):
            if not ca:
                raise TlsError("ca", "must be set if any other ORCHESTRATOR_TLS_ setting is")
            return ChannelTls(ca, cert, key, name)
