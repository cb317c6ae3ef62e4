"""TLS for metrics: the certificate that a service serves with anyway."""

from __future__ import annotations

from coppice.net.tls import ServerTls

# METRICS_TLS: plain HTTP; HTTPS for everybody; HTTPS for those who show a certificate of TLS_CLIENT_CA.
OFF, ON, MUTUAL = "off", "on", "mutual"
METRICS_TLS = (OFF, ON, MUTUAL)


def check_metrics_tls(mode: str, tls: ServerTls | None) -> None:
    """See that METRICS_TLS is a mode, and that there are the files that it takes.

    Raises:
        ValueError: it is none, or there are not; the message names the variable.
    """
    if mode not in METRICS_TLS:
        raise ValueError(f"METRICS_TLS must be one of {', '.join(METRICS_TLS)}, got {mode!r}")
    if mode != OFF and tls is None:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CERT and TLS_KEY")
    if mode == MUTUAL and tls is not None and not tls.client_ca:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CLIENT_CA, whose certificates callers have to show")
