"""Choice of a replica for a sequence: prefix blocks it has cached, against its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Prefix blocks remembered per replica: a million tokens in blocks of 64.
MAX_BLOCKS = 16_384
# Cost of a sequence for those it shares passes with, in prompt blocks. An estimate for passes on CPUs: sixteen rounds
# of 2.5 ms, where a block of prompt takes 10 ms.
BLOCKS_PER_SEQUENCE = 4
# Cost of a lack of room, in prompt blocks: the sequence waits for others to end, or preempts them.
BLOCKS_WITHOUT_ROOM = 64
# Block size for the estimate if verifiers have no prefix cache.
DEFAULT_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class RouteCandidate:
    """A verifier as a destination for a sequence."""

    # Running and waiting sequences.
    num_sequences: int
    # Leading blocks of the prompt that it has probably cached.
    known_blocks: int = 0
    # None without a recent report.
    free_kv_blocks: int | None = None


def cost(candidate: RouteCandidate, num_blocks: int) -> int:
    """Cost of running a sequence of `num_blocks` blocks there, in prompt blocks to compute."""
    missing = max(0, num_blocks - candidate.known_blocks)
    is_full = candidate.free_kv_blocks is not None and candidate.free_kv_blocks < missing
    return missing + BLOCKS_PER_SEQUENCE * candidate.num_sequences + BLOCKS_WITHOUT_ROOM * is_full


class PrefixMemory:
    """Prefix blocks of sequences sent to one replica, in LRU order."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks remembered."""
        return next((index for index, digest in enumerate(digests) if digest not in self._digests), len(digests))

    def add(self, digests: Sequence[bytes]) -> None:
        """Remember a sequence's blocks. Later blocks need the earlier ones, so they are evicted first."""
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the replica's cache is gone."""
        self._digests.clear()
