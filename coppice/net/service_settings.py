"""Settings of all services: address, metrics, TLS."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from coppice.net.tls import ServerTls, server_tls
from coppice.obs.metrics_server import check_metrics_tls
from coppice.settings import Port, Rule, Settings, is_address


class ServiceSettings(Settings):
    """Settings of a process that serves gRPC, and metrics over HTTP."""

    # Whether TLS requires client certificates.
    is_internal: ClassVar[bool] = True

    listen_address: Annotated[str, Rule("HOST:PORT", is_address)] = Field(
        default="127.0.0.1:0", description="Address to serve gRPC on; port 0 picks a free one."
    )
    health_port: Port = Field(
        default=0,
        description="Port for health checks alone, in plaintext, on the host of `LISTEN_ADDRESS`; 0 serves none.",
    )
    metrics_port: Port = Field(
        default=0, description="Port for metrics over HTTP, on the host of `LISTEN_ADDRESS`; 0 serves none."
    )
    metrics_tls: Literal["off", "on", "mutual"] = Field(
        default="off",
        description="Metrics over plain HTTP, over HTTPS with the certificate of `TLS_CERT`, or over HTTPS for clients "
        "that show a certificate of `TLS_CLIENT_CA`.",
    )
    tls_cert: str = Field(default="", description="PEM file of the certificate to serve with; empty: plaintext.")
    tls_key: str = Field(default="", description="PEM file of the certificate's key.")
    tls_client_ca: str = Field(
        default="",
        description="PEM file of the CA whose certificates callers must show; verifiers and drafters need it with TLS.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_metrics_tls(self.metrics_tls, self.tls)
        return self

    @property
    def tls(self) -> ServerTls | None:
        """TLS files; None for plaintext."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca, is_internal=self.is_internal)

    @property
    def host(self) -> str:
        """The host part of the listen address."""
        return self.listen_address.rpartition(":")[0]
