"""Where a sequence goes: blocks that a verifier has, its company, its room."""

from __future__ import annotations

import random

import pytest

from coppice.core.prefix_digests import prefix_digests
from orchestrator.peers.routing import BLOCKS_PER_SEQUENCE, BLOCKS_WITHOUT_ROOM, PrefixMemory, RouteCandidate, cost

BLOCK = 4


def slow_shared_blocks(one: list[int], other: list[int]) -> int:
    """How many full blocks two prompts begin with alike, of those that a prompt may share."""
    most = min((len(one) - 1) // BLOCK, (len(other) - 1) // BLOCK)
    return max(count for count in range(most + 1) if one[: count * BLOCK] == other[: count * BLOCK])


def test_digests_are_equal_exactly_where_prompts_begin_alike() -> None:
    chooser = random.Random(1)
    prompts = [[chooser.randrange(2) for _ in range(chooser.randrange(1, 14))] for _ in range(60)]
    shared = set()
    for one in prompts:
        for other in prompts:
            memory = PrefixMemory()
            memory.add(prefix_digests(one, BLOCK, "salt"))
            assert memory.num_known(prefix_digests(other, BLOCK, "salt")) == slow_shared_blocks(one, other)
            assert memory.num_known(prefix_digests(other, BLOCK, "pepper")) == 0
            shared.add(slow_shared_blocks(one, other))
    assert shared == {0, 1, 2, 3}


def test_without_shared_blocks_there_are_no_digests() -> None:
    assert prefix_digests(list(range(100)), 0, "") == []


def test_the_blocks_left_longest_ago_are_forgotten_from_their_end() -> None:
    memory = PrefixMemory(max_blocks=5)
    first = prefix_digests([1] * 13, BLOCK, "")
    second = prefix_digests([2] * 13, BLOCK, "")
    memory.add(first)
    memory.add(second)
    assert len(memory) == 5
    assert (memory.num_known(first), memory.num_known(second)) == (2, 3)
    memory.add(first)
    assert (memory.num_known(first), memory.num_known(second)) == (3, 2)
    memory.clear()
    assert memory.num_known(first) == 0


@pytest.mark.parametrize(
    ("better", "worse", "num_blocks"),
    [
        (RouteCandidate(0), RouteCandidate(1), 3),
        (RouteCandidate(0, known_blocks=3), RouteCandidate(0), 3),
        # What is known is worth company, up to a point.
        (RouteCandidate(1, known_blocks=BLOCKS_PER_SEQUENCE + 1), RouteCandidate(0), 9),
        (RouteCandidate(0), RouteCandidate(1, known_blocks=BLOCKS_PER_SEQUENCE - 1), 9),
        # A verifier without room is worse than a busy one, unless the room is not needed.
        (RouteCandidate(5, free_kv_blocks=9), RouteCandidate(0, free_kv_blocks=8), 9),
        (RouteCandidate(0, known_blocks=5, free_kv_blocks=4), RouteCandidate(1, free_kv_blocks=99), 9),
        (RouteCandidate(1), RouteCandidate(2, free_kv_blocks=BLOCKS_WITHOUT_ROOM), 1),
    ],
)
def test_the_cheaper_verifier(better: RouteCandidate, worse: RouteCandidate, num_blocks: int) -> None:
    assert cost(better, num_blocks) < cost(worse, num_blocks)
