"""Keys and values of what prompts begin with, kept for sequences that begin alike.

A drafter reads prompts in pieces of one length, counted from the first token, so that a piece's rows depend on the
tokens up to its end alone, to the last bit. What a sequence has read is kept under a digest of those tokens and of the
salt; another one copies it and drafts what it would have drafted anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coppice.core.prefix_digests import first_digest, longer_digest

# Rows of a piece. Larger ones are hardly faster (640 tokens of the bundled model: 12 to 14 ms with 128 and 256 rows,
# 20 with 64), and of a beginning less than one piece is read in vain.
PIECE_ROWS = 128


@dataclass(frozen=True, slots=True)
class KvBlock:
    """The keys and values of one piece: `content` is the forward's own, and takes `num_bytes`."""

    content: Any
    num_bytes: int


class PrefixBlocks:
    """Blocks by the digest of all tokens up to their end, in bounded memory; the one left longest ago goes first.

    The model thread's own, save for the counts, which any thread may read.
    """

    def __init__(self, max_bytes: int) -> None:
        """Keeps nothing with `max_bytes` 0."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Tokens that sequences have copied instead of reading them.
        self.num_reused_tokens = 0
        self._blocks: OrderedDict[bytes, KvBlock] = OrderedDict()

    @property
    def shared_block_tokens(self) -> int:
        """Tokens of a block; 0 when nothing is kept."""
        return PIECE_ROWS if self.max_bytes else 0

    def find(self, digests: Sequence[bytes]) -> KvBlock | None:
        """The block that ends where the last digest does; the blocks before it are used with it."""
        block = self._blocks.get(digests[-1])
        if block is not None:
            self.num_reused_tokens += PIECE_ROWS
            self._touch(digests)
        return block

    def add(self, digests: Sequence[bytes], block: KvBlock) -> None:
        """Keep a block behind those before it, as far as there is room for it."""
        if digests[-1] not in self._blocks:
            self._blocks[digests[-1]] = block
            self.num_bytes += block.num_bytes
        self._touch(digests)
        while self.num_bytes > self.max_bytes:
            _, left = self._blocks.popitem(last=False)
            self.num_bytes -= left.num_bytes

    def _touch(self, digests: Sequence[bytes]) -> None:
        # Later blocks are of no use without the earlier ones, so they are the first to go.
        for digest in reversed(digests):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)


class PrefixKey:
    """The whole pieces that one sequence has read from its first token on, as any other of its salt would have."""

    def __init__(self, blocks: PrefixBlocks, salt: str) -> None:
        self._blocks = blocks
        self._salt = salt
        self._digests: list[bytes] = []

    def anew(self) -> PrefixKey:
        """The same for a cache that has read nothing."""
        return PrefixKey(self._blocks, self._salt)

    def follows(self, num_rows: int) -> bool:
        """Whether a piece behind so many rows is the next one of the beginning, and worth a digest."""
        return num_rows == len(self._digests) * PIECE_ROWS and self._blocks.shared_block_tokens > 0

    def find(self, piece: Sequence[int]) -> KvBlock | None:
        """What is kept of the next piece, which then belongs to the beginning; None if there is nothing."""
        self._digests.append(self._digest(piece))
        block = self._blocks.find(self._digests)
        if block is None:
            self._digests.pop()
        return block

    def add(self, piece: Sequence[int], block: KvBlock) -> None:
        """Let others use the next piece, which the sequence has read."""
        self._digests.append(self._digest(piece))
        self._blocks.add(self._digests, block)

    def _digest(self, piece: Sequence[int]) -> bytes:
        return longer_digest(self._digests[-1] if self._digests else first_digest(self._salt), piece)
