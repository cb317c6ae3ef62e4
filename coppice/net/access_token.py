"""Access tokens of the public API: how they are made, and what a server keeps of them."""

from __future__ import annotations

import hashlib
import secrets

# So that people, and programs that look for leaked secrets, know one when they see it.
PREFIX = "coppice_"
RANDOM_BYTES = 32
METADATA_KEY = "authorization"


def new_token() -> str:
    """A token of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def token_digest(token: str) -> str:
    """What a server keeps of a token: its SHA-256, in hexadecimal.

    A slow hash is for passwords, which can be guessed. Nobody guesses 256 random bits, however fast they are hashed.
    """
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token; none without."""
    return ((METADATA_KEY, f"Bearer {token}"),) if token else ()
