"""Access tokens of the public API: creation and digests."""

from __future__ import annotations

import hashlib
import secrets

# A recognisable prefix, also for secret scanners.
PREFIX = "coppice_"
RANDOM_BYTES = 32
METADATA_KEY = "authorization"


def new_token() -> str:
    """A token of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def token_digest(token: str) -> str:
    """SHA-256 of a token in hexadecimal, which is all that a server stores.

    A fast hash is enough: unlike passwords, 256 random bits cannot be guessed.
    """
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call with a token; empty without one."""
    return ((METADATA_KEY, f"Bearer {token}"),) if token else ()
