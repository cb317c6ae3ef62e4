"""What orchestrators tell one another of where prompts were sent: how much is kept, how long anybody waits for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from coppice.core.prefix_digests import prefix_digests
from orchestrator.peers.shared_affinity import TTL_S, WAIT_S, SharedAffinity, landmarks, verifier_digest
from orchestrator.peers.verifier_client import VerifierClient
from orchestrator.peers.verifier_pool import VerifierPool
from orchestrator.prefix_cache.keys import CacheNamespace
from orchestrator.prefix_cache.store import CacheCounts
from tests.fakes import eventually
from tests.toy_deployment import INFO

REALM = CacheNamespace(b"secret", "model", "fingerprint")
BLOCK = 4
DIGESTS = prefix_digests(list(range(101)), BLOCK, "")


class Store:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.writes: list[int] = []
        self.reads: list[int] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.reads.append(len(keys))
        await self.answers.wait()
        return [self.values.get(key) for key in keys]

    async def write(self, values: Mapping[bytes, bytes], ttl_s: float) -> None:
        assert ttl_s == TTL_S
        self.writes.append(len(values))
        self.values.update(values)

    async def close(self) -> None: ...


def affinity(store: Store, namespace: CacheNamespace = REALM) -> SharedAffinity:
    return SharedAffinity(store, CacheCounts(), namespace)


async def noted(store: Store, digests: Sequence[bytes], instance_id: str = "one", salt: str = "") -> None:
    shared = affinity(store)
    shared.note(instance_id, salt, digests)
    await eventually(lambda: bool(store.writes))
    await shared.close()


async def found(
    store: Store, digests: Sequence[bytes], salt: str = "", namespace: CacheNamespace = REALM
) -> dict[bytes, int]:
    """By verifier, how many first blocks it was given."""
    told: dict[bytes, int] = {}
    shared = affinity(store, namespace)
    await shared.look_up(salt, digests, told.__setitem__)
    await eventually(lambda: not shared._reads)
    await shared.close()
    return told


def test_landmarks_are_few_and_leave_out_at_most_a_third_of_any_common_beginning() -> None:
    for size in range(1, 300):
        marks = list(landmarks(size))
        assert marks == sorted(set(marks))
        assert marks[-1] == size
        for shared in range(1, size):
            # Another prompt is longer, or ends there, and has the same ones up to there.
            best = max(mark for mark in marks if mark <= shared)
            assert best >= 2 / 3 * shared
    assert list(landmarks(0)) == []
    assert len(list(landmarks(16_384))) < 32


@pytest.mark.parametrize("seed", range(5))
async def test_of_what_two_prompts_begin_with_alike_most_is_found(seed: int) -> None:
    rng = random.Random(seed)
    store, tokens = Store(), [rng.randrange(50) for _ in range(rng.randrange(60, 200))]
    await noted(store, prefix_digests(tokens, BLOCK, ""))
    shared = rng.randrange(BLOCK, len(tokens))
    other = tokens[:shared] + [51] * 50
    [(verifier, number)] = (await found(store, prefix_digests(other, BLOCK, ""))).items()
    assert verifier == verifier_digest("one")
    assert 2 / 3 * (shared // BLOCK) <= number <= shared // BLOCK


async def test_other_secrets_and_salts_find_nothing() -> None:
    store = Store()
    await noted(store, DIGESTS)
    assert await found(store, DIGESTS) == {verifier_digest("one"): len(DIGESTS)}
    assert await found(store, DIGESTS, salt="another") == {}
    assert await found(store, DIGESTS, namespace=replace(REALM, secret=b"another")) == {}
    assert await found(store, DIGESTS, namespace=replace(REALM, model="another")) == {}


async def test_garbage_is_counted_and_tells_nothing() -> None:
    store = Store()
    await noted(store, DIGESTS)
    for number, key in enumerate(store.values):
        store.values[key] = [b"", b"\x01\x11short", b"\x01\x10" + bytes(8), b"\x01\x11" + bytes(9)][number % 4]
    shared = affinity(store)
    told: list[bytes] = []
    await shared.look_up("", DIGESTS, lambda verifier, number: told.append(verifier))
    await eventually(lambda: not shared._reads)
    await shared.close()
    assert told == []
    assert shared.counts.invalid_values == len(store.values)


async def test_notes_are_written_together_and_no_more_are_kept_than_can_be_written() -> None:
    store = Store()
    shared = affinity(store)
    for number in range(2000):
        shared.note("one", "", prefix_digests([number] * 101, BLOCK, ""))
    assert len(shared._notes) < 4096 + 32
    await eventually(lambda: len(store.writes) == 3)
    await shared.close()
    assert store.writes == [256] * 3


async def pool_of(*instance_ids: str, shared_block_tokens: int = BLOCK) -> VerifierPool:
    pool = VerifierPool([f"127.0.0.1:{number + 1}" for number in range(len(instance_ids))], resume_s=1.0)
    for client, instance_id in zip(pool.clients, instance_ids, strict=True):
        client._info = replace(INFO, shared_block_tokens=shared_block_tokens, instance_id=instance_id)
        pool.on_up(client)
    pool._settle_on(pool.clients[0])
    return pool


def num_known(pool: VerifierPool, client: VerifierClient) -> int:
    return pool._prefixes[client].num_known(DIGESTS)


async def test_a_request_waits_for_the_answer_only_shortly_and_the_next_one_has_it() -> None:
    store = Store()
    await noted(store, DIGESTS, "two")
    pool = await pool_of("one", "two")
    pool.affinity = affinity(store)
    store.answers.clear()
    began_s = time.monotonic()
    await pool.recall(range(101), "")
    # Room for a machine that is busy with other things.
    assert WAIT_S <= time.monotonic() - began_s < 100 * WAIT_S
    assert num_known(pool, pool.clients[1]) == 0
    store.answers.set()
    await eventually(lambda: num_known(pool, pool.clients[1]) == len(DIGESTS))
    assert num_known(pool, pool.clients[0]) == 0
    # What is known here is not asked for.
    await pool.recall(range(101), "")
    assert len(store.reads) == 1
    await pool.affinity.close()
    await pool.close()


async def test_a_verifier_that_has_been_restarted_is_known_to_be_empty() -> None:
    store = Store()
    await noted(store, DIGESTS, "before")
    pool = await pool_of("after", "other")
    pool.affinity = affinity(store)
    await pool.recall(range(101), "")
    await eventually(lambda: pool.affinity is not None and pool.affinity.counts.hits > 0)
    assert [num_known(pool, client) for client in pool.clients] == [0, 0]
    await pool.affinity.close()
    await pool.close()


@pytest.mark.parametrize(
    ("instance_ids", "block_tokens", "size"),
    [(("one",), BLOCK, 101), (("one", "two"), 0, 101), (("one", "two"), BLOCK, BLOCK)],
    ids=["one verifier", "nothing is shared", "no full block"],
)
async def test_where_it_does_not_matter_nothing_is_asked(
    instance_ids: tuple[str, ...], block_tokens: int, size: int
) -> None:
    store = Store()
    pool = await pool_of(*instance_ids, shared_block_tokens=block_tokens)
    pool.affinity = affinity(store)
    await pool.recall(range(size), "")
    assert store.reads == []
    await pool.affinity.close()
    await pool.close()
