"""Keys of the prefix cache: keyed hashes that cannot be forged without the secret and reveal no tokens."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

# Tokens hashed for a suffix key and for a statistics key; fewer if there are fewer.
SUFFIX_TOKENS = 8
BEGINNING_TOKENS = 32
# Common prefix of keys, to share a Redis with other data.
PREFIX = b"coppice:1:"


@dataclass(frozen=True)
class CacheNamespace:
    """Scope of sharing: processes with the same secret and target."""

    secret: bytes = field(repr=False)
    model: str
    # Of serving, or of the tokenizer where a verifier does not say.
    fingerprint: str


class TenantKeys:
    """HMAC-SHA256 under a tenant-specific key, over tagged, length-prefixed token ids.

    Requests of different namespaces or salts share no keys.
    """

    def __init__(self, namespace: CacheNamespace, cache_salt: str) -> None:
        self._key = _of_texts(namespace, "tenant", cache_salt)

    def prompt(self, tokens: Sequence[int]) -> bytes:
        """Key for continuations of a whole prompt."""
        return self._of(b"prompt", tokens)

    def suffix(self, tokens: Sequence[int], end: int) -> bytes:
        """Key for continuations of the last tokens before position `end`, in any context."""
        return self._of(b"suffix", tokens[max(0, end - SUFFIX_TOKENS) : end])

    def beginning(self, tokens: Sequence[int]) -> bytes:
        """Key for statistics of prompts with the same beginning."""
        return self._of(b"beginning", tokens[:BEGINNING_TOKENS])

    def _of(self, tag: bytes, tokens: Sequence[int]) -> bytes:
        message = struct.pack(f"<I{len(tag)}sI{len(tokens)}I", len(tag), tag, len(tokens), *tokens)
        return PREFIX + _digest(self._key, message)


def _of_texts(namespace: CacheNamespace, tag: str, *texts: str) -> bytes:
    parts = [text.encode() for text in (tag, namespace.model, namespace.fingerprint, *texts)]
    return _digest(namespace.secret, b"".join(struct.pack("<I", len(part)) + part for part in parts))


def _digest(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)
