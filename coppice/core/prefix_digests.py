"""Digests of token prefixes: one per block, over all tokens up to its end and a salt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_DIGEST_BYTES = 16
# Separates digests of texts with long rope factors, for any salt.
_LONG = b"long rope"


def first_digest(salt: str, *, is_long: bool = False) -> bytes:
    """Digest of the empty prefix.

    Texts with different salts have no digest in common, nor have texts with (`is_long`) and without long rope factors.
    """
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=_LONG if is_long else b"").digest()


def longer_digest(digest: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of the prefix of `digest` extended by one block."""
    return hashlib.blake2b(digest + array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def prefix_digests(token_ids: Sequence[int], block_tokens: int, salt: str, *, is_long: bool = False) -> list[bytes]:
    """One digest per full block of `block_tokens` tokens, over all tokens up to its end, the salt and `is_long`.

    The block with the last token is never shared and has none. Empty if `block_tokens` is 0.
    """
    digests: list[bytes] = []
    digest = first_digest(salt, is_long=is_long)
    for end in range(block_tokens, len(token_ids), block_tokens) if block_tokens else ():
        digest = longer_digest(digest, token_ids[end - block_tokens : end])
        digests.append(digest)
    return digests
