"""Choice of a sequence's replica: its known blocks of the prompt, against its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Blocks of prompts remembered per replica: a million tokens, in blocks of 64.
MAX_BLOCKS = 16_384
# What a sequence costs those that run with it, in blocks of prompt to compute. A guess from passes on CPUs:
# sixteen rounds of 2.5 ms each, where a block of prompt takes 10 ms.
BLOCKS_PER_SEQUENCE = 4
# What it costs to have no room: the sequence waits for others to end, or makes them compute their tokens again.
BLOCKS_WITHOUT_ROOM = 64
# For counting where the verifiers share nothing, and do not say how long their blocks are.
DEFAULT_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class RouteCandidate:
    """A verifier that a sequence could go to."""

    # Sequences that run or wait there.
    num_sequences: int
    # How many of the prompt's first blocks it has probably computed before.
    known_blocks: int = 0
    # None where it has not said so lately.
    free_kv_blocks: int | None = None


def cost(candidate: RouteCandidate, num_blocks: int) -> int:
    """What it costs to run a sequence of `num_blocks` blocks there, in blocks of prompt to compute."""
    missing = max(0, num_blocks - candidate.known_blocks)
    is_full = candidate.free_kv_blocks is not None and candidate.free_kv_blocks < missing
    return missing + BLOCKS_PER_SEQUENCE * candidate.num_sequences + BLOCKS_WITHOUT_ROOM * is_full


class PrefixMemory:
    """Which blocks the sequences of one replica began with; the ones that were left longest ago are forgotten."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def num_known(self, digests: Sequence[bytes]) -> int:
        """How many of a sequence's first blocks are remembered."""
        return next((index for index, digest in enumerate(digests) if digest not in self._digests), len(digests))

    def add(self, digests: Sequence[bytes]) -> None:
        """Remember a sequence's blocks. Later ones are of no use without the earlier, so they are forgotten first."""
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the replica has gone, and its cache with it."""
        self._digests.clear()
