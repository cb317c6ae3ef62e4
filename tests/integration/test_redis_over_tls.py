"""The prefix cache in a Redis that speaks TLS: what `rediss://` and its parameters are good for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from orchestrator.prefix_cache.redis_store import RedisStore
from orchestrator.prefix_cache.store import CacheCounts
from tests.certificates import HOST, Directory, directory
from tests.integration.test_orchestrator_metrics import free_port
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis


@pytest.fixture
def files(tmp_path: Path) -> Directory:
    return directory(tmp_path / "tls", trustme.CA())


@pytest.fixture
async def url(files: Directory) -> AsyncIterator[str]:
    """A Redis that asks its callers for a certificate."""
    port = free_port()
    pair = ("--tls-cert-file", files.cert, "--tls-key-file", files.key, "--tls-ca-cert-file", files.ca)
    async with redis_server("--tls-port", str(port), "--tls-auth-clients", "yes", *pair):
        yield f"rediss://{HOST}:{port}/0"


async def remembered(url: str) -> tuple[list[bytes | None], int]:
    """What a store at `url` has after a write, and how many of its calls failed."""
    counts = CacheCounts()
    store = RedisStore.open(url, ttl_s=60.0, timeout_s=5.0, counts=counts)
    try:
        await store.replace({b"key": None}, {b"key": b"value"})
        return await store.read([b"key"]), counts.errors
    finally:
        await store.close()


async def test_files_of_tls_are_parameters_of_the_url(url: str, files: Directory, tmp_path: Path) -> None:
    pair = f"ssl_certfile={files.cert}&ssl_keyfile={files.key}"
    assert await remembered(f"{url}?ssl_ca_certs={files.ca}&{pair}") == ([b"value"], 0)
    strangers = directory(tmp_path / "strangers", trustme.CA())
    for wrong in (f"ssl_ca_certs={strangers.ca}&{pair}", pair, f"ssl_ca_certs={files.ca}"):
        values, errors = await remembered(f"{url}?{wrong}")
        assert values == [None]
        assert errors
