"""Names for the beginnings of texts: a digest per block of tokens, of all tokens up to its end and of a salt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_DIGEST_BYTES = 16
# Separates digests of texts with long rope factors, whatever the salt is.
_LONG = b"long rope"


def first_digest(salt: str, *, is_long: bool = False) -> bytes:
    """The digest of no token. Texts with different salts have no digest in common.

    Nor have texts with long rope factors (`is_long`) and others.
    """
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=_LONG if is_long else b"").digest()


def longer_digest(digest: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of the tokens that `digest` stands for and one block more."""
    return hashlib.blake2b(digest + array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def prefix_digests(token_ids: Sequence[int], block_tokens: int, salt: str, *, is_long: bool = False) -> list[bytes]:
    """One digest per full block of `block_tokens` tokens, each of all tokens up to its end, the salt and `is_long`.

    The block with the last token is never shared, and has none. Empty when `block_tokens` is 0.
    """
    digests: list[bytes] = []
    digest = first_digest(salt, is_long=is_long)
    for end in range(block_tokens, len(token_ids), block_tokens) if block_tokens else ():
        digest = longer_digest(digest, token_ids[end - block_tokens : end])
        digests.append(digest)
    return digests
