"""Keys of the prefix cache: hashes that nobody without the secret can make, and that say nothing of the tokens."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

# Tokens that a suffix key and a statistics key depend on, or as many as there are.
SUFFIX_TOKENS = 8
BEGINNING_TOKENS = 32
# In front of every key, so that one Redis can hold other things, too.
PREFIX = b"coppice:1:"


@dataclass(frozen=True)
class CacheNamespace:
    """Who may share anything at all: those who know the secret and serve the same target."""

    secret: bytes = field(repr=False)
    model: str
    tokenizer_fingerprint: str


class TenantKeys:
    """HMAC-SHA256 under a key of the tenant's own, over tagged, length-prefixed token ids.

    Requests of different namespaces or salts have no key in common.
    """

    def __init__(self, namespace: CacheNamespace, cache_salt: str) -> None:
        self._key = _of_texts(namespace, "tenant", cache_salt)

    def prompt(self, tokens: Sequence[int]) -> bytes:
        """Of what follows a whole prompt."""
        return self._of(b"prompt", tokens)

    def suffix(self, tokens: Sequence[int], end: int) -> bytes:
        """Of what follows the last tokens before position `end`, whatever stands before them."""
        return self._of(b"suffix", tokens[max(0, end - SUFFIX_TOKENS) : end])

    def beginning(self, tokens: Sequence[int]) -> bytes:
        """Of the statistics of prompts that begin as this one does."""
        return self._of(b"beginning", tokens[:BEGINNING_TOKENS])

    def holder(self, digest: bytes) -> bytes:
        """Of the verifier that was given the blocks of this digest."""
        return PREFIX + _digest(self._key, struct.pack("<I6s", 6, b"holder") + digest)

    def _of(self, tag: bytes, tokens: Sequence[int]) -> bytes:
        message = struct.pack(f"<I{len(tag)}sI{len(tokens)}I", len(tag), tag, len(tokens), *tokens)
        return PREFIX + _digest(self._key, message)


def knowledge_key(namespace: CacheNamespace, hardware: str, exactness: int, sources: Sequence[str]) -> bytes:
    """Of what a planner has learned of a verifier on such hardware, with drafts of these sources."""
    return PREFIX + _of_texts(namespace, "knowledge", hardware, str(exactness), *sorted(sources))


def _of_texts(namespace: CacheNamespace, tag: str, *texts: str) -> bytes:
    parts = [text.encode() for text in (tag, namespace.model, namespace.tokenizer_fingerprint, *texts)]
    return _digest(namespace.secret, b"".join(struct.pack("<I", len(part)) + part for part in parts))


def _digest(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)
