"""Keys: the same for the same tokens of the same tenant, and for nothing else."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from dataclasses import replace

from orchestrator.prefix_cache.keys import BEGINNING_TOKENS, PREFIX, SUFFIX_TOKENS, CacheNamespace, TenantKeys

REALM = CacheNamespace(b"secret", "model", "fingerprint")
TOKENS = tuple(range(40))


def keys_of(keys: TenantKeys) -> set[bytes]:
    return {keys.prompt(TOKENS), keys.suffix(TOKENS, 40), keys.beginning(TOKENS)}


def test_realms_and_tenants_have_no_key_in_common() -> None:
    namespaces = [
        REALM,
        replace(REALM, secret=b"other"),
        replace(REALM, model="other"),
        replace(REALM, fingerprint="other"),
        # What moves from one part to the next.
        CacheNamespace(b"secret", "modelf", "ingerprint"),
    ]
    everyone = [keys_of(TenantKeys(namespace, salt)) for namespace in namespaces for salt in ("", "a", "fingerprint")]
    assert all(len(keys) == 3 for keys in everyone)
    for one, other in itertools.combinations(everyone, 2):
        assert not one & other


def test_keys_depend_on_the_tokens_that_they_are_of_and_on_no_others() -> None:
    keys = TenantKeys(REALM, "a")
    other = (99, *TOKENS[1:])
    assert keys.prompt(TOKENS) != keys.prompt(other)
    assert keys.prompt(TOKENS) != keys.prompt(TOKENS[:-1])
    assert keys.suffix(TOKENS, SUFFIX_TOKENS + 1) == keys.suffix(other, SUFFIX_TOKENS + 1)
    assert keys.suffix(TOKENS, SUFFIX_TOKENS) != keys.suffix(other, SUFFIX_TOKENS)
    assert keys.beginning(TOKENS) == keys.beginning(TOKENS[:BEGINNING_TOKENS])
    assert keys.beginning(TOKENS) != keys.beginning(other)


def test_a_key_is_the_hmac_of_its_length_prefixed_parts() -> None:
    """Written out once more, so that other implementations can share a Redis."""
    tenant = b"".join(struct.pack("<I", len(part)) + part for part in (b"tenant", b"model", b"fingerprint", b"a"))
    key = hmac.new(b"secret", tenant, hashlib.sha256).digest()
    message = struct.pack("<I", 6) + b"prompt" + struct.pack("<I", 3) + struct.pack("<III", 7, 8, 9)
    expected = PREFIX + hmac.new(key, message, hashlib.sha256).digest()
    assert TenantKeys(REALM, "a").prompt([7, 8, 9]) == expected


def test_the_secret_does_not_show() -> None:
    assert "secret" not in repr(REALM)
